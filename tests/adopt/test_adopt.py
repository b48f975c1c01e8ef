"""Files of other programs become configurations that say where each value comes from."""

import contextlib
import math
import re
from pathlib import Path

import pytest
import yaml

from megacore.adopt.adopt import Adoption, adopt
from megacore.adopt.megatron_flags import MEGATRON
from megacore.adopt.neox_keys import NEOX
from megacore.adopt.read import BOOLEANS
from megacore.adopt.rules import names
from megacore.config import RunConfig, load_config
from megacore.errors import ConfigError
from tests.adopt._samples import BERT, DEEPSPEED_SCRIPT, FILES, NANOTRON, NEOX_MODEL, NEOX_PATHS
from tests.adopt._samples import MEGATRON as SCRIPT

GOLDEN = Path(__file__).parent / "golden"
GPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 "
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 100 --lr 1e-4 --data-path /d/a --vocab-file /d/v.json "
    "--merge-file /d/m.txt "
)


def adopted(tmp_path: Path, name: str, text: str, *more: str, **options: object) -> Adoption:
    """Adopt a file with this text, together with further files of GPT-NeoX."""
    path = tmp_path / name
    path.write_text(text)
    paths = [path]
    for number, content in enumerate(more):
        paths.append(tmp_path / f"more{number}{path.suffix}")
        paths[-1].write_text(content)
    return adopt(paths, **options)  # type: ignore[arg-type]


def config_of(tmp_path: Path, result: Adoption) -> RunConfig:
    """Load the written text with the loader of configurations."""
    assert result.text, result.draft and [each.text for each in result.draft.refused]
    target = tmp_path / "adopted.yaml"
    target.write_text(result.text)
    return load_config(str(target))


def gpt(tmp_path: Path, flags: str, **options: object) -> Adoption:
    return adopted(tmp_path, "gpt.sh", GPT + flags, **options)


def config(tmp_path: Path, flags: str) -> RunConfig:
    return config_of(tmp_path, gpt(tmp_path, flags))


def refusals(result: Adoption) -> list[str]:
    assert result.draft is not None
    return [each.text for each in result.draft.refused]


@pytest.mark.parametrize("name", FILES)
def test_samples_become_the_golden_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    paths = [path]
    if name == "neox.yml":
        paths.append(tmp_path / "paths.yml")
        paths[1].write_text(NEOX_PATHS)
    result = adopt(paths)
    assert result.outcome == "adopted"
    assert result.text == (GOLDEN / f"{path.stem}.yaml").read_text()
    assert config_of(tmp_path, result).model.num_layers > 0
    assert result.comparison is not None
    assert result.comparison.agrees


@pytest.mark.parametrize("name", FILES)
def test_each_value_names_its_origin_and_no_setting_is_dropped(tmp_path: Path, name: str) -> None:
    more = (NEOX_PATHS,) if name == "neox.yml" else ()
    result = adopted(tmp_path, name, FILES[name], *more, partial=True)
    values = [line for line in result.text.splitlines() if not line.startswith("#")]
    leaves = [line for line in values if line.strip() and not line.rstrip().endswith(":")]
    assert all("  # " in line for line in leaves)
    assert result.settings is not None
    for setting in result.settings:
        assert names(result.text, setting.name), f"{setting} is nowhere"


def test_unknown_and_absent_flags_are_refused_by_name_with_place_and_nearest(
    tmp_path: Path,
) -> None:
    result = gpt(tmp_path, "\\\n --num-layerz 3 --num-experts 8 \\\n --fp8-format hybrid --bf16")
    assert result.outcome == "refused"
    assert result.text == ""
    assert refusals(result) == [
        "--num-layerz 3 (gpt.sh:2): unknown here; nearest: did you mean --num-layers",
        "--num-experts 8 (gpt.sh:2): mixture of experts; nearest: a dense model: leave out the "
        "flags of experts",
        "--fp8-format hybrid (gpt.sh:3): fp8; nearest: train.precision bf16",
    ]


def test_partial_writes_the_rest_with_the_refused_flags_at_the_top(tmp_path: Path) -> None:
    result = gpt(tmp_path, "--num-experts 8 --bf16", partial=True)
    assert result.outcome == "refused"
    assert "#   --num-experts 8 (gpt.sh:1): mixture of experts" in result.text
    assert config_of(tmp_path, result).train.precision == "bf16"


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ("--multi-latent-attention", "multi-latent attention"),
        ("--squared-relu", "squared ReLU"),
        ("--position-embedding-type rope --yarn-beta-fast 16", "this scaling of rotary positions"),
        (
            "--position-embedding-type rope --use-rope-scaling "
            "--rotary-seq-len-interpolation-factor 2",
            "two scalings at once",
        ),
        ("--window-size 127,0 --window-attn-skip-freq [1,0,1,1]", "a list of layers"),
        ("--window-size 127,1", "a window after the token"),
        ("--optimizer sgd", "other optimizers than AdamW"),
        ("--optimizer lion", "other optimizers than AdamW and Muon"),
        ("--optimizer muon", "no --muon-nesterov: momentum without Nesterov's term"),
        ("--optimizer muon --muon-nesterov", "quintic): other coefficients of Newton-Schulz"),
        ("--optimizer muon --muon-extra-scale-factor 0.5", "another factor of Muon's updates"),
        ("--optimizer muon --muon-no-split-qkv", "queries, keys and values as one matrix"),
        (
            "--optimizer muon --muon-tp-mode blockwise --tensor-model-parallel-size 2",
            "Newton-Schulz of a rank's part",
        ),
        ("--mock-data", "made-up data"),
        ("--tokenizer-type NullTokenizer", "token files without a tokenizer"),
        ("--split 100,0,0", "an empty split"),
        ("--position-embedding-type yarn", "positions yarn"),
        ("--data-path a b c", "paths weighted by their size"),
        ("--step-batch-size-schedule '0:8 1B:16 3B:64'", "batch sizes in uneven steps"),
        ("--mamba-num-heads 4", "state-space layers"),
        ("--grpo-group-size 2", "reinforcement learning"),
        ("--use-megatron-fsdp", "FSDP"),
        ("--recompute-granularity selective --recompute-modules mlp", "recomputation of these"),
        ("--lr-decay-style exponential", "this schedule"),
        ("--save /b --load /a --no-load-optim", "it continues the iterations of --load /a"),
        ("--padded-vocab-size 51200", "a padded size of one's own"),
        ("--export-kd-teacher-load /t", "distillation"),
        ("--export-kd-cfg /t.yaml", "distillation"),
        ("--logits-load-dir /t", "distillation"),
        ("--logits-load-kd-loss-alpha 0.5", "distillation"),
        ("--no-weight-decay-cond-type qwen3_next", "weight decay of other weights"),
        ("--eod-mask-loss --calculate-per-token-loss", "a mean over the tokens of the batch"),
        ("--micro-batch-size 3", "the result"),
    ],
)
def test_every_class_of_absent_features_is_refused(
    tmp_path: Path, flags: str, feature: str
) -> None:
    result = gpt(tmp_path, flags)
    assert result.outcome in ("refused", "incomplete")
    assert any(feature in text for text in refusals(result))


SAME_MUON = "--muon-nesterov --muon-extra-scale-factor .2 --muon-coefficient-type simple"


@pytest.mark.parametrize(
    ("flags", "momentum", "sharding"),
    [
        ("--optimizer muon", 0.9, "none"),
        ("--optimizer dist_muon --muon-momentum 0.95 --muon-tp-mode blockwise", 0.95, "optimizer"),
    ],
)
def test_muon_with_the_same_update_is_translated(
    tmp_path: Path, flags: str, momentum: float, sharding: str
) -> None:
    result = gpt(tmp_path, f"{flags} {SAME_MUON} --muon-num-ns-steps 5 --swiglu")
    translated = config_of(tmp_path, result)
    assert (translated.optim.name, translated.optim.muon_momentum) == ("muon", momentum)
    assert translated.parallel.data_parallel_sharding == sharding
    assert "gate and up projection as one matrix" in result.text


def test_options_of_muon_have_no_effect_on_adamw(tmp_path: Path) -> None:
    assert (
        config(tmp_path, f"{SAME_MUON} --muon-momentum 0.8 --optimizer adam").optim.name == "adam"
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--use-rope-scaling", {"kind": "llama3", "factor": 8.0}),
        ("--use-rope-scaling --rope-scaling-factor 32", {"kind": "llama3", "factor": 32.0}),
        ("--rotary-seq-len-interpolation-factor 4", {"kind": "linear", "factor": 4.0}),
        ("--rotary-seq-len-interpolation-factor 1", None),
        ("--rope-scaling-factor 32", None),
    ],
)
def test_scaled_rotary_positions(
    tmp_path: Path, flags: str, expected: dict[str, object] | None
) -> None:
    model = config(tmp_path, f"--position-embedding-type rope {flags}").model
    scaling = model.rope_scaling
    shown = None if scaling is None else {"kind": scaling.kind, "factor": scaling.factor}  # type: ignore[union-attr]
    assert shown == expected


def test_scalings_without_rotary_positions_have_no_effect(tmp_path: Path) -> None:
    assert config(tmp_path, "--use-rope-scaling").model.rope_scaling is None


def test_biases_of_queries_keys_and_values_are_counted(tmp_path: Path) -> None:
    result = gpt(tmp_path, "--disable-bias-linear --add-qkv-bias")
    assert config_of(tmp_path, result).model.add_qkv_bias
    without = gpt(tmp_path, "--disable-bias-linear")
    assert result.comparison is not None
    assert without.comparison is not None
    assert result.comparison.agrees
    more = result.comparison.parameters[0] - without.comparison.parameters[0]
    assert more == 4 * 3 * 256
    assert not config(tmp_path, "--add-qkv-bias").model.add_qkv_bias


@pytest.mark.parametrize(
    ("flags", "window", "skip"),
    [
        ("--window-size 127,0", 128, None),
        ("--window-size (127,0) --window-attn-skip-freq 2", 128, 2),
        ("--window-size 127,0 --window-attn-skip-freq 1", None, None),
        ("--window-attn-skip-freq 2", None, None),
    ],
)
def test_windows_are_megatrons(
    tmp_path: Path, flags: str, window: int | None, skip: int | None
) -> None:
    model = config(tmp_path, flags.replace("(127,0)", "'(127,0)'")).model
    assert (model.sliding_window, model.window_attn_skip_freq) == (window, skip)


def test_norms_are_parametrized_and_placed_as_in_megatron(tmp_path: Path) -> None:
    result = gpt(tmp_path, "--apply-layernorm-1p --qk-layernorm")
    model = config_of(tmp_path, result).model
    assert model.apply_layernorm_1p
    assert model.qk_layernorm
    assert result.comparison is not None
    assert result.comparison.agrees


def test_values_that_request_nothing_have_no_effect(tmp_path: Path) -> None:
    flags = "--context-parallel-size 1 --num-experts 1 --optimizer adam --data-impl mmap"
    assert gpt(tmp_path, flags).outcome == "adopted"
    assert gpt(tmp_path, "--calculate-per-token-loss --log-throughput").outcome == "adopted"


@pytest.mark.parametrize(
    ("flags", "activation", "width"),
    [
        ("", "gelu_tanh", 1024),
        ("--no-bias-gelu-fusion", "gelu", 1024),
        ("--disable-bias-linear", "gelu", 1024),
        ("--openai-gelu", "gelu_tanh", 1024),
        ("--swiglu", "swiglu", 640),
        ("--swiglu --ffn-hidden-size 700", "swiglu", 700),
    ],
)
def test_the_mlp_is_that_of_megatrons_arguments(
    tmp_path: Path, flags: str, activation: str, width: int
) -> None:
    model = config(tmp_path, flags).model
    assert (model.activation, model.ffn_hidden_size) == (activation, width)


@pytest.mark.parametrize(
    ("flags", "positions"),
    [
        ("", "learned_absolute"),
        ("--position-embedding-type rope", "rope"),
        ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
        ("--position-embedding-type none --rotary-base 5000", "none"),
        ("--no-position-embedding", "none"),
    ],
)
def test_positions(tmp_path: Path, flags: str, positions: str) -> None:
    assert config(tmp_path, flags).model.position_embedding_type == positions


def test_defaults_are_megatrons(tmp_path: Path) -> None:
    result = config(tmp_path, "")
    assert result.optim.lr_decay_style == "linear"
    assert result.train.precision == "fp32"
    assert result.train.eval_iters == 100
    assert result.checkpoint.save_interval == 100
    assert result.data.split == "969,30,1"
    assert not result.data.shuffle_documents
    assert (result.model.hidden_dropout, result.optim.weight_decay) == (0.1, 0.01)


def test_the_vocabulary_is_padded_as_megatron_pads_it(tmp_path: Path) -> None:
    model = config(tmp_path, "--tensor-model-parallel-size 4").model
    assert model.make_vocab_size_divisible_by == 512
    assert model.padded_vocab_size(50257) == 50688


def test_samples_are_iterations_with_the_growth_of_the_batch(tmp_path: Path) -> None:
    text = GPT.replace("--train-iters 100", "").replace("size 16", "size 64")
    flags = "--rampup-batch-size 16 16 480 --train-samples 1000 --lr-warmup-samples 64"
    result = config_of(tmp_path, adopted(tmp_path, "gpt.sh", text + flags))
    # 16 x 10, 32 x 5 and 48 x 4 samples (512), then 7 batches of 64.
    assert result.train.train_iters == 26
    assert result.train.rampup_batch_size is not None
    assert result.lr_warmup_iters == 4


def test_even_steps_of_the_batch_are_a_ramp_up(tmp_path: Path) -> None:
    text = GPT.replace("--global-batch-size 16", "--step-batch-size-schedule '0:16 16K:32 32K:48'")
    result = config_of(tmp_path, adopted(tmp_path, "gpt.sh", text))
    rampup = result.train.rampup_batch_size
    assert rampup is not None
    assert (rampup.start, rampup.increment, rampup.samples) == (16, 16, 250)
    assert result.train.global_batch_size == 48


def test_hosts_are_added_where_a_replica_does_not_fit(tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type p2p"
    assert "ranks always gather keys and values here" in gpt(tmp_path, flags).text
    divided = config(tmp_path, flags)
    assert divided.parallel.context_parallel_size == 2
    assert divided.launch.nproc_per_node == 8
    result = gpt(tmp_path, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4")
    launch = config_of(tmp_path, result).launch
    assert (launch.nproc_per_node, launch.nnodes, launch.hostfile) == (8, 2, "hostfile")
    assert any("launch.nnodes is 2" in remark for remark in result.draft.remarks)  # type: ignore[union-attr]


def test_checkpoints_from_elsewhere_become_questions(tmp_path: Path) -> None:
    result = gpt(tmp_path, "--save /c/new --load /c/old --finetune")
    assert config_of(tmp_path, result).train.pretrained_checkpoint == "/c/old"
    assert any("megacore import" in text for _, text in result.draft.questions)  # type: ignore[union-attr]


def test_missing_numbers_are_listed_with_their_variables(tmp_path: Path) -> None:
    text = GPT.replace("--num-layers 4", "--num-layers $LAYERS")
    result = adopted(tmp_path, "gpt.sh", text)
    assert result.outcome == "incomplete"
    assert [str(each[0]) for each in result.draft.missing] == ["--num-layers $LAYERS (gpt.sh:1)"]  # type: ignore[union-attr]
    given = adopted(tmp_path, "gpt.sh", text, given={"LAYERS": "6"})
    assert config_of(tmp_path, given).model.num_layers == 6


_OFFLOAD = '"offload_optimizer": {"device": "cpu"},'


@pytest.mark.parametrize(
    ("stage", "sharding"), [(0, "none"), (1, "optimizer"), (2, "gradients"), (3, "parameters")]
)
def test_zero_without_offload_is_native(tmp_path: Path, stage: int, sharding: str) -> None:
    text = DEEPSPEED_SCRIPT.replace(_OFFLOAD, "").replace("ZERO:-2", f"ZERO:-{stage}")
    result = adopted(tmp_path, "ds.sh", text)
    translated = config_of(tmp_path, result)
    assert (translated.engine, translated.parallel.data_parallel_sharding) == ("native", sharding)
    assert translated.deepspeed == type(translated.deepspeed)()
    remarks = result.draft.remarks  # type: ignore[union-attr]
    assert any(f"data_parallel_sharding: {sharding}" in each for each in remarks) == (stage > 0)
    assert any("reduce_bucket_size" in each and "engine native" in each for each in remarks)


@pytest.mark.parametrize(
    ("stage", "zero", "blocks", "reason"),
    [
        (2, _OFFLOAD, "", "offload of the optimizer (cpu)"),
        (3, '"offload_param": {"device": "cpu"},', "", "offload of weights (cpu)"),
        (2, "", '"activation_checkpointing": {"cpu_checkpointing": true},', "of activations"),
    ],
)
def test_what_only_deepspeed_has_keeps_its_engine(
    tmp_path: Path, stage: int, zero: str, blocks: str, reason: str
) -> None:
    text = DEEPSPEED_SCRIPT.replace(_OFFLOAD, zero).replace("ZERO:-2", f"ZERO:-{stage}")
    result = adopted(
        tmp_path, "ds.sh", text.replace('"steps_per_print"', f'{blocks} "steps_per_print"')
    )
    assert result.draft is not None
    assert result.draft.values["engine"].value == "deepspeed"
    assert result.draft.values["deepspeed.zero_stage"].value == stage
    (remark,) = [each for each in result.draft.remarks if each.startswith("engine deepspeed")]
    assert reason in remark


def test_offloaded_zero_2_is_deepspeed(tmp_path: Path) -> None:
    second = config_of(tmp_path, adopted(tmp_path, "ds.sh", DEEPSPEED_SCRIPT))
    assert second.engine == "deepspeed"
    assert (second.deepspeed.zero_stage, second.deepspeed.offload_optimizer) == (2, "cpu")
    assert second.train.train_iters == math.ceil(300e6 / 1024 / 128)


def test_zero_bubble_schedules_are_delayed_weight_gradients(tmp_path: Path) -> None:
    flags = "--overlap-grad-reduce --enable-zbh1-pipeline --enable-zbh1-exact-semantics"
    result = adopted(tmp_path, "gpt.sh", SCRIPT.replace("--overlap-grad-reduce", flags))
    parallel = config_of(tmp_path, result).parallel
    assert parallel.delay_weight_gradients
    assert parallel.pipeline_model_parallel_size == 2


def test_curriculum_learning_of_the_json_is_refused(tmp_path: Path) -> None:
    text = DEEPSPEED_SCRIPT.replace(
        '"steps_per_print": 10', '"curriculum_learning": {"enabled": true}'
    )
    (refusal, *_) = refusals(adopted(tmp_path, "ds.sh", text))
    assert "curriculum learning" in refusal
    assert "data.seq_length_schedule" in refusal


def test_megatron_passes_its_own_optimizer_to_deepspeed(tmp_path: Path) -> None:
    own = '"optimizer": {"type": "Lion", "params": {"lr": 7.0, "betas": [0.1, 0.2]}}'
    text = DEEPSPEED_SCRIPT.replace(
        '"steps_per_print": 10', f'{own}, "scheduler": {{"type": "WarmupLR"}}'
    )
    result = adopted(tmp_path, "ds.sh", text)
    optim = config_of(tmp_path, result).optim
    assert (optim.lr, optim.adam_beta1, optim.adam_beta2) == (3e-4, 0.9, 0.999)
    assert "the program passes its own optimizer" in result.text


def test_deepspeeds_loss_scale_wins_over_the_flags(tmp_path: Path) -> None:
    flags = "--hysteresis 4 --min-loss-scale 64 --loss-scale-window 7 --initial-loss-scale 8"
    text = DEEPSPEED_SCRIPT.replace("--hysteresis 2", flags)
    text = text.replace(', "initial_scale_power": 11', ', "loss_scale_window": 500')
    scale = config_of(tmp_path, adopted(tmp_path, "ds.sh", text)).optim.loss_scale
    shown = (scale.initial, scale.window, scale.hysteresis, scale.minimum)
    assert shown == (2.0**16, 500, 2, 1.0)
    constant = text.replace('"loss_scale": 0', '"loss_scale": 128')
    scale = config_of(tmp_path, adopted(tmp_path, "ds.sh", constant)).optim.loss_scale
    assert (scale.initial, scale.minimum, scale.window) == (128, 128, 10**9)
    neox = NEOX_MODEL.replace(', "initial_scale_power": 12', "")
    assert config_of(tmp_path, adopted(tmp_path, "a.yml", neox)).optim.loss_scale.initial == 2.0**16
    alone = adopted(tmp_path, "ds.json", '{"fp16": {"enabled": true}, "train_batch_size": 8}')
    assert config_of(tmp_path, alone).optim.loss_scale.initial == 2.0**16


@pytest.mark.parametrize(
    ("old", "new", "both"),
    [
        ('batch_size_per_gpu": $MBS', 'batch_size_per_gpu": 2', "--micro-batch-size 4"),
        ('train_batch_size": $GBS', 'train_batch_size": 64', "--global-batch-size 128"),
        ('"steps_per_print": 10', '"gradient_accumulation_steps": 2', "--global-batch-size 128"),
    ],
)
def test_batches_of_the_json_that_contradict_the_flags_are_refused(
    tmp_path: Path, old: str, new: str, both: str
) -> None:
    refused = refusals(adopted(tmp_path, "ds.sh", DEEPSPEED_SCRIPT.replace(old, new)))
    assert any(new.strip('"').replace('"', "") in text and both in text for text in refused)


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


def test_deepspeeds_json_and_accelerates_yaml_alone(tmp_path: Path) -> None:
    json = (
        '{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, '
        '"zero_optimization": {"stage": 3}}'
    )
    result = config_of(tmp_path, adopted(tmp_path, "ds.json", json))
    assert (result.engine, result.train.precision) == ("native", "bf16")
    assert result.parallel.data_parallel_sharding == "parameters"
    pytest.importorskip("accelerate")
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
        "num_processes: 4\nnum_machines: 1\n"
    )
    result = config_of(tmp_path, adopted(tmp_path, "acc.yaml", text))
    assert (result.launch.nproc_per_node, result.train.precision) == (4, "bf16")


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.sh", "python tools/preprocess_data.py --input x", "data preparation"),
        ("a.sh", "python tools/run_text_generation_server.py --load x", "generation or inference"),
        ("a.sh", "python tasks/main.py --task RACE", "fine-tuning"),
        ("a.sh", "python pretrain_vlm.py --num-layers 2", "multimodal"),
        ("a.sh", "echo hello", "starts no Python program"),
        ("a.yaml", "foo: 1\n", "settings of none of"),
        ("a.yml", "data_path: x\nvocab_file: y\n", "a part of a GPT-NeoX configuration"),
    ],
)
def test_what_trains_no_language_model_is_named(
    tmp_path: Path, name: str, text: str, what: str
) -> None:
    result = adopted(tmp_path, name, text)
    assert result.outcome == "other"
    assert what in result.other


@pytest.mark.parametrize("value", ["x", "{a: 1}", "[2]", "1.0e+400", "-3"])
@pytest.mark.parametrize("key", ['"hidden-size": 768', '"num-layers": 12'])
def test_sizes_of_the_wrong_kind_are_one_sentence(tmp_path: Path, key: str, value: str) -> None:
    text = NEOX_MODEL.replace(key, f"{key.partition(':')[0]}: {value}")
    with contextlib.suppress(ConfigError):
        assert adopted(tmp_path, "a.yml", text, NEOX_PATHS).outcome == "refused"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num-layers two", r"^gpt\.sh: --num-layers is 'two' \(gpt\.sh:1\): give an integer$"),
        ("--lr fast", r"--lr is 'fast' \(gpt\.sh:1\): give a number"),
        ("--num-query-groups x --group-query-attention", r"--num-query-groups is 'x' .*integer"),
        (
            "--vocab-size -1",
            r"^gpt\.sh: --vocab-size is '-1' \(gpt\.sh:1\): give an integer above 0$",
        ),
        ("--vocab-size many", r"--vocab-size is 'many' .*give an integer"),
        ("--num-layers -2", r"--num-layers is '-2' \(gpt\.sh:1\): give an integer above 0"),
        ("--micro-batch-size 0", r"^gpt\.sh: --micro-batch-size is '0' .*integer above 0$"),
        ("--micro-batch-size 2.5", r"^gpt\.sh: --micro-batch-size is '2\.5' .*give an integer$"),
        ("--tensor-model-parallel-size 0", r"--tensor-model-parallel-size is '0' .*above 0$"),
        ("--seq-length 0 --train-tokens 9", r"--seq-length is '0' .*integer above 0$"),
        ("--eval-iters -1", r"--eval-iters is '-1' \(gpt\.sh:1\): give at least 0 and at most"),
        ("--rampup-batch-size 4 4 x", r"--rampup-batch-size is '4 4 x' .*three integers above 0"),
        ("--deepspeed --zero-stage 7", r"--zero-stage is '7' .*give at least 0 and at most 3$"),
        ("--vocab-size 99999999999", r"--vocab-size is '99999999999' .*at most 1,073,741,824$"),
        (
            "--vocab-file ''",
            r"--vocab-file +\(gpt\.sh:1\): string should have at least 1 character",
        ),
        ("--data-path ''", r"--data-path +\(gpt\.sh:1\): string should have at least 1 character"),
    ],
)
def test_wrong_values_are_named_with_flag_and_line(
    tmp_path: Path, flags: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        gpt(tmp_path, flags)


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


def test_null_requests_nothing(tmp_path: Path) -> None:
    text = NANOTRON.replace("num_key_value_heads: 4", "num_key_value_heads: null")
    result = adopted(tmp_path, "a.yaml", text)
    assert config_of(tmp_path, result).model.query_groups == 8
    text = NEOX_MODEL.replace('"seq-length": 2048', '"seq-length": 2048, "z-loss": null')
    result = adopted(tmp_path, "a.yml", text, NEOX_PATHS)
    assert config_of(tmp_path, result).train.z_loss == 0
    assert "#   z_loss: None (a.yml:5): it requests nothing" in result.text


def test_sizes_that_no_key_says_are_missing(tmp_path: Path) -> None:
    result = adopted(tmp_path, "a.yaml", NANOTRON.replace("    hidden_size: 512\n", ""))
    assert result.draft is not None
    assert (result.outcome, result.text) == ("incomplete", "")
    assert [name for _, name in result.draft.missing] == ["model.hidden_size"]
    result = adopted(tmp_path, "a.yml", NEOX_MODEL.replace('"hidden-size": 768,', ""), NEOX_PATHS)
    assert result.draft is not None
    assert [name for _, name in result.draft.missing] == ["model.hidden_size"]


def test_a_mamba_of_nanotron_is_refused_as_such(tmp_path: Path) -> None:
    text = NANOTRON.replace(
        "    hidden_size: 512\n", "    d_model: 512\n    is_mamba_config: true\n"
    )
    result = adopted(tmp_path, "a.yaml", text)
    assert (result.outcome, result.draft and result.draft.missing) == ("refused", [])
    assert any("state-space layers (Mamba)" in text for text in refusals(result))


def test_flags_that_wait_for_a_missing_value_are_in_the_remarks(tmp_path: Path) -> None:
    text = GPT.replace("--global-batch-size 16", "--global-batch-size $GBS")
    result = adopted(tmp_path, "gpt.sh", text + "--lr-warmup-iters 5 --bf16")
    assert result.outcome == "incomplete"
    assert result.draft is not None
    assert result.settings is not None
    for flag in ("--train-iters 100", "--lr-warmup-iters 5"):
        (remark,) = [each for each in result.draft.remarks if flag in each]
        assert remark.endswith("once the missing values are given")


def test_words_without_a_flag_are_refused_one_by_one(tmp_path: Path) -> None:
    assert refusals(gpt(tmp_path, "--bf16 yes please --swiglu no")) == [
        f"{word} (gpt.sh:1): a word that belongs to no flag; nearest: leave it out"
        for word in ("yes", "please", "no")
    ]


def test_an_interval_of_zero_saves_at_the_end_only(tmp_path: Path) -> None:
    assert config(tmp_path, "--save-interval 0").checkpoint.save_interval == 100


def test_the_path_of_a_json_may_be_unknown(tmp_path: Path) -> None:
    result = gpt(tmp_path, "--deepspeed --deepspeed_config ds_$(date).json --zero-stage 1")
    assert config_of(tmp_path, result).parallel.data_parallel_sharding == "optimizer"
    assert "this file was not found" in result.text


def test_unreadable_values_of_deepspeeds_json_are_refused_by_name(tmp_path: Path) -> None:
    json = (
        '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, "fp16": '
        '{"enabled": true, "hysteresis": 1e999, "initial_scale_power": 99999}, '
        '"optimizer": {"params": {"betas": []}}}'
    )
    keys = [re.split("[: ]", text)[0] for text in refusals(adopted(tmp_path, "ds.json", json))]
    assert keys == ["fp16.hysteresis", "fp16.initial_scale_power", "optimizer.params.betas"]


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: none
  offload_param_device: none
  zero_stage: 2
distributed_type: DEEPSPEED
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


@pytest.mark.parametrize(
    ("old", "new", "engine", "sharding", "offload"),
    [
        ("", "", "native", "gradients", ("none", "none")),
        ("zero_stage: 2", "zero_stage: 3", "native", "parameters", ("none", "none")),
        ("optimizer_device: none", "optimizer_device: cpu", "deepspeed", "none", ("cpu", "none")),
        (
            "none\n  offload_param_device: none\n  zero_stage: 2",
            "cpu\n  offload_param_device: cpu\n  zero_stage: 3",
            "deepspeed",
            "none",
            ("cpu", "cpu"),
        ),
    ],
)
def test_accelerates_zero_and_hosts_are_translated(
    tmp_path: Path, old: str, new: str, engine: str, sharding: str, offload: tuple[str, str]
) -> None:
    pytest.importorskip("accelerate")
    result = adopted(tmp_path, "acc.yaml", ACCELERATE.replace(old, new) if old else ACCELERATE)
    config = config_of(tmp_path, result)
    assert (config.engine, config.parallel.data_parallel_sharding) == (engine, sharding)
    assert (config.deepspeed.offload_optimizer, config.deepspeed.offload_param) == offload
    assert (config.launch.nnodes, config.launch.nproc_per_node) == (2, 8)
    assert (config.optim.clip_grad, config.train.global_batch_size) == (0.5, 16)
    assert result.draft is not None
    assert "launch.hostfile" in [name for name, _ in result.draft.questions]
    for line in ACCELERATE.splitlines():
        assert line.strip().partition(":")[0] in result.text


def test_a_json_that_accelerates_yaml_names_is_refused_with_the_command(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    block = "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    text = block + "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
    result = adopted(tmp_path, "acc.yaml", text, partial=True)
    assert refusals(result) == [
        "deepspeed_config_file ds.json: settings in another file; nearest: megacore adopt ds.json"
    ]
    assert config_of(tmp_path, result).launch.nproc_per_node == 4


def test_files_of_several_programs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two scripts"):
        adopted(tmp_path, "a.sh", GPT, GPT)
    with pytest.raises(ConfigError, match="belong to nanotron, neox"):
        adopted(tmp_path, "a.yaml", NANOTRON, NEOX_MODEL)


def test_a_fragment_of_flags_is_adopted_with_questions(tmp_path: Path) -> None:
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16 --swiglu"
    )
    result = adopted(tmp_path, "model.sh", f'MODEL_ARGS=" \\\n {flags} \\\n"\n')
    assert result.outcome == "adopted"
    names = [name for name, _ in result.draft.questions]  # type: ignore[union-attr]
    assert {"train.train_iters", "train.global_batch_size", "data.source.prefix"} <= set(names)


def test_the_count_of_parameters_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.models.parameters.parameter_count", lambda spec: 7)
    result = gpt(tmp_path, "")
    assert result.outcome == "refused"
    assert "7 by ours" in refusals(result)[0]


def test_tables_name_fields_that_exist(tmp_path: Path) -> None:
    fields: set[str] = set()

    def walk(prefix: str, section: object) -> None:
        for name, info in section.model_fields.items():  # type: ignore[attr-defined]
            inner = [info.annotation, *getattr(info.annotation, "__args__", ())]
            fields.add(f"{prefix}{name}")
            for kind in inner:
                if hasattr(kind, "model_fields"):
                    walk(f"{prefix}{name}.", kind)

    walk("", RunConfig)
    for rules in (MEGATRON, NEOX):
        for name, rule in rules.exact.items():
            field = getattr(rule, "field", None)
            assert field is None or field in fields, f"{name} -> {field}"
    assert {name for name in BOOLEANS if MEGATRON.rule(name) is None} == set()


def test_yaml_values_survive_the_comments(tmp_path: Path) -> None:
    result = adopted(tmp_path, "megatron.sh", SCRIPT)
    assert yaml.safe_load(result.text)["optim"]["min_lr"] == 3e-5
    assert adopted(tmp_path, "bert.sh", BERT).outcome == "adopted"
