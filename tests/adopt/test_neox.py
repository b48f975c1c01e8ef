"""Keys of GPT-NeoX."""

import math
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from tests.adopt._samples import NEOX_MODEL, NEOX_PATHS, adopted, config_of, refusals


def test_neox_gated_widths_are_neoxs(tmp_path: Path) -> None:
    model = NEOX_MODEL.replace(
        '"norm": "layernorm"',
        '"norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 32768, '
        '"mlp_multiple_of": 256, "hidden_size_": 1',
    ).replace('"hidden_size_": 1', '"rms_norm_epsilon": 1.0e-6')
    result = adopted(tmp_path, "a.yml", model, NEOX_PATHS)
    assert config_of(tmp_path, result).model.ffn_hidden_size == 11008


def test_neox_first_weights_have_neoxs_deviations(tmp_path: Path) -> None:
    methods = '"init_method": "small_init", "output_layer_init_method": "wang_init"'
    text = NEOX_MODEL.replace('"norm": "layernorm"', methods)
    model = config_of(tmp_path, adopted(tmp_path, "a.yml", text, NEOX_PATHS)).model
    assert model.init_method_std == pytest.approx(math.sqrt(2 / (5 * 768)))
    assert model.residual_init_std == pytest.approx(2 / 12 / math.sqrt(768))


def test_neox_batches_need_the_number_of_gpus(tmp_path: Path) -> None:
    asked = adopted(tmp_path, "a.yml", NEOX_MODEL, NEOX_PATHS)
    assert "train.global_batch_size" in dict(asked.draft.questions)  # type: ignore[union-attr]
    known = adopted(tmp_path, "a.yml", NEOX_MODEL, NEOX_PATHS, ranks=8)
    result = config_of(tmp_path, known)
    assert (result.train.global_batch_size, result.launch.nproc_per_node) == (128, 8)


def test_neox_has_its_ranks_with_a_batch_of_all_replicas_too(tmp_path: Path) -> None:
    model = NEOX_MODEL.replace('"norm"', '"train_batch_size": 64, "norm"')
    result = config_of(tmp_path, adopted(tmp_path, "a.yml", model, NEOX_PATHS, ranks=4))
    assert (result.train.global_batch_size, result.launch.nproc_per_node) == (64, 4)


@pytest.mark.parametrize(
    ("keys", "each", "hosts"),
    [
        ('"global_num_gpus": 6', 6, None),
        ('"global_num_gpus": 16', 8, 2),
        ('"global_num_gpus": 20', 4, 5),
        ('"num_gpus": 4, "num_nodes": 4', 4, 4),
        ('"num_gpus": 4, "num_nodes": -1', None, None),
    ],
)
def test_neox_runs_on_as_many_gpus_as_are_written(
    keys: str, each: int | None, hosts: int | None, tmp_path: Path
) -> None:
    model = NEOX_MODEL.replace('"norm"', f'{keys}, "norm"')
    draft = adopted(tmp_path, "a.yml", model, NEOX_PATHS).draft
    assert draft is not None
    assert (draft.get("launch.nproc_per_node"), draft.get("launch.nnodes")) == (each, hosts)


@pytest.mark.parametrize(
    ("old", "new", "feature"),
    [
        ('[["flash"], 12]', '[["mamba"], 12]', "attention of kind mamba"),
        ('"norm": "layernorm"', '"output_layer_init_method": "orthogonal"', "initialization"),
        ('"norm": "layernorm"', '"moe_num_experts": 8', "mixture of experts"),
        ('"norm": "layernorm"', '"use_bias_in_mlp": false', "biases in some linear layers"),
        ('"norm": "layernorm"', '"no_such_key": 8', "unknown here"),
        ('"norm": "layernorm"', '"use_no_such_key": true', "unknown here"),
        ('"norm": "layernorm"', '"deepspeed_extra_args": {"amp": 1}', "passed on to DeepSpeed"),
        ('"pos-emb": "rotary"', '"pos-emb": "sinusoidal"', "these positions"),
        ('"eps": 1.0e-8', '"adam_w_mode": false', "as a part of the gradient"),
        ('"eps": 1.0e-8', '"bias_correction": false', "without correction of its moments"),
        ('"norm": "layernorm"', '"use_qk_layernorm": true', "one norm that queries and keys share"),
        ('"lr-decay-style": "cosine"', '"lr-decay-style": "linear"', "stops at min_lr 6e-05"),
        ('"lr-decay-style": "cosine", ', "", "stops at min_lr 6e-05"),
    ],
)
def test_neox_features_that_are_absent(tmp_path: Path, old: str, new: str, feature: str) -> None:
    result = adopted(tmp_path, "a.yml", NEOX_MODEL.replace(old, new), NEOX_PATHS)
    assert any(feature in text for text in refusals(result))


def test_neox_takes_iterations_of_decay_before_a_fraction(tmp_path: Path) -> None:
    text = NEOX_MODEL.replace('"warmup"', '"lr_decay_fraction": 0.5, "warmup"')
    assert config_of(tmp_path, adopted(tmp_path, "a.yml", text)).optim.lr_decay_iters == 1000
    text = text.replace('"lr-decay-iters": 1000, ', "")
    assert config_of(tmp_path, adopted(tmp_path, "a.yml", text)).optim.lr_decay_iters == 500


@pytest.mark.parametrize(
    ("kind", "pipeline", "fused", "window"),
    [
        ("flash", 0, True, 65),
        ("global", 0, True, None),
        ("global", 2, False, 65),
        ("global", 2, True, "refused"),
        ("flash", 2, True, 65),
    ],
)
def test_neox_has_a_window_in_flash_attention_and_masks_of_a_pipeline(
    tmp_path: Path, kind: str, pipeline: int, fused: bool, window: int | str | None
) -> None:
    text = NEOX_MODEL.replace('[["flash"], 12]', f'[["{kind}"], 12]').replace(
        '"pipe-parallel-size": 0', f'"pipe-parallel-size": {pipeline}, "sliding_window_width": 64'
    )
    if not fused:
        text = text.replace(', "scaled-upper-triang-masked-softmax-fusion": true', "")
    result = adopted(tmp_path, "a.yml", text, NEOX_PATHS)
    if window == "refused":
        assert any("a window in some layers" in each for each in refusals(result))
    else:
        assert config_of(tmp_path, result).model.sliding_window == window


def test_neox_has_a_z_loss_for_reward_models_only(tmp_path: Path) -> None:
    text = NEOX_MODEL.replace('"norm": "layernorm"', '"z_loss": 0.001')
    assert config_of(tmp_path, adopted(tmp_path, "a.yml", text, NEOX_PATHS)).train.z_loss == 0


def test_a_cosine_that_ends_early_rises_again_in_neox(tmp_path: Path) -> None:
    text = NEOX_MODEL.replace('"lr-decay-iters": 1000', '"lr-decay-iters": 500')
    assert "cosine rises again" in adopted(tmp_path, "a.yml", text, NEOX_PATHS).text
    assert "rises again" not in adopted(tmp_path, "b.yml", NEOX_MODEL, NEOX_PATHS).text


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"hidden-size": 768', '"hidden-size": wide', r"hidden_size is 'wide' \(a\.yml:4\): give"),
        ('"num-layers": 12', '"num-layers": 0', r"num_layers is '0' .*integer above 0$"),
        (
            '"gradient_accumulation_steps": 8',
            '"gradient_accumulation_steps": .inf',
            "gradient_accumulation_steps is 'inf' ",
        ),
        (
            '{"stage": 1',
            '{"stage": 5',
            r"zero_optimization\.stage is '5' \(a\.yml:\d+\): give 0 to 3",
        ),
    ],
)
def test_wrong_values_of_neox_are_named(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        adopted(tmp_path, "a.yml", NEOX_MODEL.replace(old, new), NEOX_PATHS)


@pytest.mark.parametrize(("params", "rate"), [('{"lr": 0.006}', 0.006), ("{}", 0.001)])
def test_the_learning_rate_is_that_of_the_optimizer(
    tmp_path: Path, params: str, rate: float
) -> None:
    written = '{"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8}},'
    text = NEOX_MODEL.replace(written, f'{params}}}, "lr": 0.1,')
    result = adopted(tmp_path, "a.yml", text)
    assert config_of(tmp_path, result).optim.lr == rate
    assert "GPT-NeoX takes the learning rate of optimizer.params" in result.text
