"""Flags of Megatron-LM's and Megatron-DeepSpeed's training programs."""

from pathlib import Path

import pytest

from megacore.errors import ConfigError
from tests.adopt._samples import GPT, adopted, config, config_of, gpt, refusals
from tests.adopt._samples import MEGATRON as SCRIPT


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


def test_options_of_wsd_have_no_effect_on_other_schedules(tmp_path: Path) -> None:
    flags = "--lr-wsd-decay-style linear --lr-wsd-decay-iters 7 --lr-decay-style"
    result = gpt(tmp_path, f"{flags} constant")
    assert result.text.count("the schedule is not WSD") == 2
    assert config_of(tmp_path, result).optim.lr_decay_style == "constant"
    optim = config(tmp_path, f"{flags} WSD").optim
    assert (optim.lr_wsd_decay_style, optim.lr_wsd_decay_iters) == ("linear", 7)


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
    text = GPT.replace("--global-batch-size 16", "--step-batch-size-schedule '0:16 16K:32, 32K:48'")
    result = config_of(tmp_path, adopted(tmp_path, "gpt.sh", text))
    rampup = result.train.rampup_batch_size
    assert rampup is not None
    assert (rampup.start, rampup.increment, rampup.samples) == (16, 16, 250)
    assert result.train.global_batch_size == 48


@pytest.mark.parametrize(
    ("flags", "warmup", "decay"),
    [  # the batch grows for 6 x 16, 3 x 32 and 2 x 48 samples, 288 in 11 iterations
        ("--train-iters 100 --lr-warmup-iters 4", 256, 106),
        ("--train-iters 100 --lr-decay-iters 50 --lr-warmup-fraction 0.1", 320, 56),
        ("--train-samples 6400 --lr-warmup-fraction 0.1", 640, 106),
    ],
)
def test_schedules_in_iterations_count_whole_batches_while_the_batch_grows(
    tmp_path: Path, flags: str, warmup: int, decay: int
) -> None:
    text = GPT.replace("--train-iters 100", flags).replace("size 16", "size 64")
    result = config_of(
        tmp_path, adopted(tmp_path, "gpt.sh", f"{text} --rampup-batch-size 16 16 250")
    )
    assert result.optim.lr_warmup_samples == warmup
    assert result.lr_decay_iters == decay


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


def test_given_ranks_have_at_most_8_on_a_host_and_are_the_origin(tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 12 --global-batch-size 16"
    result = gpt(tmp_path, flags, ranks=12, partial=True)
    assert result.draft is not None
    for name, value in (("nproc_per_node", 4), ("nnodes", 3)):
        entry = result.draft.values[f"launch.{name}"]
        assert entry == (value, "--ranks 12 (the command line)")


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


def test_zero_bubble_schedules_are_delayed_weight_gradients(tmp_path: Path) -> None:
    flags = "--overlap-grad-reduce --enable-zbh1-pipeline --enable-zbh1-exact-semantics"
    result = adopted(tmp_path, "gpt.sh", SCRIPT.replace("--overlap-grad-reduce", flags))
    parallel = config_of(tmp_path, result).parallel
    assert parallel.delay_weight_gradients
    assert parallel.pipeline_model_parallel_size == 2


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
        ("--seq-length 16 64", r"^gpt\.sh: --seq-length is '16 64' \(gpt\.sh:1\): give one value$"),
        ("--encoder-num-layers 8", r"--encoder-num-layers is '8' .*give it or --num-layers, not"),
        ("--encoder-seq-length 8", r"--encoder-seq-length is '8' .*give it or --seq-length, not"),
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


def test_a_learning_rate_that_no_flag_gives_is_a_question(tmp_path: Path) -> None:
    result = adopted(tmp_path, "gpt.sh", GPT.replace("--lr 1e-4", ""))
    assert "optim.lr: which learning rate?" in result.text


def test_an_unknown_flag_without_a_similar_name_is_refused_in_short(tmp_path: Path) -> None:
    assert refusals(gpt(tmp_path, "--zzz 3"))[0].endswith("unknown here; nearest: leave it out")


def test_words_without_a_flag_are_refused_one_by_one(tmp_path: Path) -> None:
    assert refusals(gpt(tmp_path, "--bf16 yes please --swiglu no")) == [
        f"{word} (gpt.sh:1): a word that belongs to no flag; nearest: leave it out"
        for word in ("yes", "please", "no")
    ]


def test_a_micro_batch_that_no_flag_gives_is_a_question(tmp_path: Path) -> None:
    result = adopted(tmp_path, "gpt.sh", GPT.replace("--micro-batch-size 2", ""))
    assert "train.micro_batch_size: how many samples has a micro batch?" in result.text
    assert config_of(tmp_path, result).train.micro_batch_size == 1


def test_a_limit_of_zero_ends_no_run(tmp_path: Path) -> None:
    train = config(tmp_path, "--exit-interval 0 --exit-duration-in-mins 0").train
    assert (train.exit_interval, train.exit_duration_minutes) == (None, None)


def test_buckets_of_gradients_are_counted_in_fp32(tmp_path: Path) -> None:
    assert config(tmp_path, "--ddp-bucket-size 40960000").parallel.grad_reduce_bucket_mb == 156.25


def test_checks_of_losses_name_the_keys_that_decide_them(tmp_path: Path) -> None:
    result = gpt(tmp_path, "--check-for-spiky-loss --rerun-mode disabled")
    assert result.draft is not None
    reasons = {setting.name: reason for setting, reason in result.draft.without_effect}
    for flag in ("--check-for-spiky-loss", "--rerun-mode"):
        assert "train.loss_spike_action" in reasons[flag]


def test_an_interval_of_zero_saves_at_the_end_only(tmp_path: Path) -> None:
    assert config(tmp_path, "--save-interval 0").checkpoint.save_interval == 100
