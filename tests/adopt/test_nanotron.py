"""Keys of nanotron."""

from pathlib import Path

import pytest

from megacore.errors import ConfigError
from tests.adopt._samples import NANOTRON, adopted, config_of, refusals


def test_numbers_of_ranks_and_hosts_name_all_sizes_of_nanotron(tmp_path: Path) -> None:
    text = NANOTRON.replace("dp: 2,", "dp: 2, context_parallel_size: 2,")
    draft = adopted(tmp_path, "a.yaml", text).draft
    assert draft is not None
    for name, value in (("nproc_per_node", 8), ("nnodes", 2)):
        entry = draft.values[f"launch.{name}"]
        assert entry == (value, "dp x tp x cp x pp = 16 ranks")


@pytest.mark.parametrize(
    ("old", "new", "feature"),
    [
        ("rope_scaling: null", "rope_scaling: {factor: 2.0}", "scaled rotary"),
        ("cosine", "1-sqrt", ""),
        ("hf_dataset_or_datasets: some-team/stories", "dataset_folder: /d/a", "datatrove"),
        ("init_method: {std: 0.025}", "init_method: {std: 0.025, use_mup: true}", "µP"),
        ("zero_stage: 1", "zero_stage: 2", "ZeRO stage"),
        ("zero_stage: 1", "zero_stage: 3", "ZeRO stage"),
        ("zero_stage: 1", "zero_stage: true", "ZeRO stage"),
    ],
)
def test_nanotron_variants(tmp_path: Path, old: str, new: str, feature: str) -> None:
    result = adopted(tmp_path, "a.yaml", NANOTRON.replace(old, new))
    if feature:
        assert any(feature in text for text in refusals(result))
    else:
        optim = config_of(tmp_path, result).optim
        assert (optim.lr_decay_style, optim.lr_wsd_decay_iters) == ("WSD", 980)


def test_nanotrons_schedule_decays_as_its_defaults_say(tmp_path: Path) -> None:
    text = NANOTRON.replace("    min_decay_lr: 3.0e-05\n", "")
    assert config_of(tmp_path, adopted(tmp_path, "a.yaml", text)).optim.min_lr == 0.0003
    text = NANOTRON.replace("    lr_decay_steps: 980\n", "")
    text = text.replace("lr_decay_starting_step: null", "lr_decay_starting_step: 800")
    optim = config_of(tmp_path, adopted(tmp_path, "b.yaml", text)).optim
    assert (optim.lr_decay_iters, optim.lr_wsd_decay_iters) == (1780, 980)


@pytest.mark.parametrize("line", ["  clip_grad: null\n", ""])
def test_nanotron_without_a_limit_does_not_clip(tmp_path: Path, line: str) -> None:
    text = NANOTRON.replace("  clip_grad: 1.0\n", line)
    assert config_of(tmp_path, adopted(tmp_path, "a.yaml", text)).optim.clip_grad == 0


def test_nanotrons_qwen2_has_biases_and_divided_positions(tmp_path: Path) -> None:
    options = "rope_scaling: null\n    attention_bias: true"
    options += "\n    rope_seq_len_interpolation_factor: 4"
    text = NANOTRON.replace("rope_scaling: null", options)
    llama = refusals(adopted(tmp_path, "a.yaml", text))
    assert any("biases of q, k and v" in each for each in llama)
    assert any("divided positions" in each for each in llama)
    text = text.replace("is_llama_config: true", "is_qwen2_config: true")
    result = adopted(tmp_path, "b.yaml", text)
    model = config_of(tmp_path, result).model
    assert model.add_qkv_bias
    assert model.rope_scaling is not None
    assert model.rope_scaling.model_dump() == {"kind": "linear", "factor": 4.0}
    assert result.comparison is not None
    assert result.comparison.agrees


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("dp: 2", "dp: two", r"parallelism\.dp is 'two' \(a\.yaml:\d+\): give an integer"),
        ("lr_decay_steps: 980", "lr_decay_steps: [1]", r"lr_decay_steps is '1' .*give an integer"),
        ("min_decay_lr: 3.0e-05", "min_decay_lr: low", r"min_decay_lr is 'low' .*give a number"),
        ("vocab_size: 32000", "vocab_size: 99999999999", r"vocab_size is '99999999999' .*at most"),
        (
            "    dataset:\n",
            "    dataset: [1]\n    other:\n",
            "data_stages is .*give a list of stages",
        ),
    ],
)
def test_wrong_values_of_nanotron_are_named(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        adopted(tmp_path, "a.yaml", NANOTRON.replace(old, new))


def test_a_mamba_of_nanotron_is_refused_as_such(tmp_path: Path) -> None:
    text = NANOTRON.replace(
        "    hidden_size: 512\n", "    d_model: 512\n    is_mamba_config: true\n"
    )
    result = adopted(tmp_path, "a.yaml", text)
    assert (result.outcome, result.draft and result.draft.missing) == ("refused", [])
    assert any("state-space layers (Mamba)" in text for text in refusals(result))
