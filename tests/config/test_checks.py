"""Combinations of values that cannot work, except division over ranks (see test_layouts)."""

from typing import Any

import pytest

from megacore.config import RunConfig
from megacore.config.load import parse_config
from megacore.errors import ConfigError


def make(**sections: Any) -> RunConfig:
    """Return a small run; each keyword replaces values of one section.

    It has 2 layers of width 32, batches of 8 and 100 iterations.
    """
    values: dict[str, Any] = {
        "data": {
            "source": {"kind": "source_tree"},
            "tokenizer": {"kind": "train-bpe"},
            "seq_length": 64,
        },
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
        "optim": {"lr": 1e-3},
        "train": {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 100},
        "checkpoint": {"save_interval": 5},
    }
    for section, changes in sections.items():
        old = values.get(section)
        values[section] = old | changes if isinstance(old, dict) else changes
    return parse_config({"name": "small", **values}, origin="test")


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**sections)
    return str(caught.value)


RAMP = {"start": 2, "increment": 2, "samples": 60}


@pytest.mark.parametrize(
    ("optim", "sentence"),
    [
        (
            {"lr_warmup_iters": 5, "lr_warmup_samples": 40, "lr_warmup_fraction": 0.1},
            (
                "optim.lr_warmup_iters 5 and optim.lr_warmup_samples 40 and "
                "optim.lr_warmup_fraction 0.1 are given together: keep one of them"
            ),
        ),
        (
            {"lr_warmup_samples": 793},
            (
                "optim.lr_warmup_samples 793, which are 100 iterations, does not end before the "
                "decay does at 100: set it below 793"
            ),
        ),
        (
            {"lr_warmup_iters": 50, "lr_decay_iters": 50},
            "does not end before the decay does at 50: set it below 50",
        ),
        (
            {"lr_warmup_init": 2e-3, "lr_warmup_iters": 5},
            "optim.lr_warmup_init 0.002 is above optim.lr 0.001: lower it",
        ),
        ({"lr_warmup_style": "log"}, "optim.lr_warmup_style is log and there is no warm-up"),
        ({"lr_warmup_init": 1e-4}, "optim.lr_warmup_init is 0.0001 and there is no warm-up"),
        (
            {"lr_decay_style": "inverse-square-root"},
            "inverse-square-root counts from the end of the warm-up",
        ),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_fraction": 0.001}, "there is none"),
        ({"lr_decay_style": "WSD"}, "optim.lr_decay_style is WSD without optim.lr_wsd_decay_iters"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 91, "lr_warmup_iters": 10},
            (
                "optim.lr_wsd_decay_iters 91 is longer than the 90 iterations between the end of "
                "the warm-up at 10 and the end of the decay at 100: lower it to at most 90"
            ),
        ),
        (
            {"lr_wsd_decay_iters": 9},
            "optim.lr_wsd_decay_iters is 9 but optim.lr_decay_style is cosine",
        ),
        (
            {"lr_wsd_decay_style": "linear", "lr_decay_style": "constant"},
            (
                "optim.lr_wsd_decay_style is linear but optim.lr_decay_style is constant: set the "
                "latter to WSD, or remove the former"
            ),
        ),
        (
            {"loss_scale": {"initial": 2.0, "minimum": 4.0}},
            "optim.loss_scale.initial 2 is below optim.loss_scale.minimum 4: raise the former",
        ),
        (
            {"start_weight_decay": 0.1, "end_weight_decay": 0.2},
            "optim.start_weight_decay 0.1 and optim.end_weight_decay 0.2 are given but "
            "optim.weight_decay_incr_style is constant",
        ),
        ({"end_weight_decay": 0.0}, "optim.end_weight_decay 0.0 is given but"),
        (
            {"muon_momentum": 0.9},
            "optim.muon_momentum is 0.9 but optim.name is adam: set the latter to muon",
        ),
        (
            {"weight_decay_incr_style": "linear"},
            "but neither optim.start_weight_decay nor optim.end_weight_decay",
        ),
    ],
)
def test_impossible_schedules_are_refused(optim: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(optim={"lr": 1e-3} | optim)


@pytest.mark.parametrize(
    "optim",
    [
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 90, "lr_warmup_iters": 10},
        {"lr_decay_style": "inverse-square-root", "lr_warmup_samples": 1},
        {"lr_warmup_samples": 792},
        {"lr_warmup_init": 1e-3, "lr_warmup_iters": 1},
        {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.0},
        {"lr_wsd_decay_style": "exponential"},
        {"loss_scale": {"initial": 2.0, "minimum": 2.0}},
    ],
)
def test_schedules_at_the_limits_are_accepted(optim: dict[str, Any]) -> None:
    make(optim={"lr": 1e-3} | optim)


def test_warm_up_iterations_account_for_the_ramp_up() -> None:
    train = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 100}
    optim = {"lr": 1e-3, "lr_warmup_samples": 60}
    assert make(train=train, optim=optim).lr_warmup_iters == 8
    # Ten batches of 2, then five of 4 and four of 6, which end at 64.
    assert (
        make(train=train | {"rampup_batch_size": RAMP}, optim=optim).lr_warmup_iters == 10 + 5 + 4
    )
    assert make(train=train, optim={"lr": 1e-3, "lr_warmup_fraction": 0.25}).lr_warmup_iters == 25


@pytest.mark.parametrize(
    ("ramp", "sentence"),
    [
        (
            {"start": 8},
            "train.rampup_batch_size.start 8 is not below train.global_batch_size 8: lower it",
        ),
        (
            {"increment": 4},
            "train.global_batch_size 8 - train.rampup_batch_size.start 2 = 6 is not a multiple of "
            "train.rampup_batch_size.increment 4: choose an increment that divides 6",
        ),
        (
            {"start": 5, "increment": 3},
            "train.rampup_batch_size.start 5 is not a multiple of train.micro_batch_size 2",
        ),
        (
            {"increment": 3},
            (
                "train.rampup_batch_size.increment 3 is not a multiple of train.micro_batch_size "
                "2: use 4"
            ),
        ),
        ({"samples": 0}, "train.rampup_batch_size.samples is 0"),
    ],
)
def test_impossible_ramp_ups_are_refused(ramp: dict[str, int], sentence: str) -> None:
    train = {
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 100,
        "rampup_batch_size": RAMP | ramp,
    }
    assert sentence in refusal(train=train)


def test_recompute_num_layers_needs_recomputation() -> None:
    train = {
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 100,
        "recompute_num_layers": 1,
    }
    assert "train.recompute_num_layers is 1 but train.recompute is none" in refusal(train=train)
    assert make(train=train | {"recompute": "selective"}).train.recompute_num_layers == 1


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"train": {"kernels": {"attention": "cpp"}}, "model": {"attn_logit_softcapping": 50.0}},
            "attention is cpp but model.attn_logit_softcapping is 50, and the C++ kernel has no",
        ),
        (
            {"train": {"kernels": {"attention": "flex"}, "compile": "off"}},
            "attention is flex but train.compile is off, and FlexAttention runs in compiled layers",
        ),
        (
            {"train": {"kernels": {"attention": "flex"}}, "engine": "deepspeed"},
            "attention is flex but engine is deepspeed, and FlexAttention runs in compiled layers",
        ),
        (
            {"train": {"kernels": {"attention": "flex"}}, "model": {"attention_dropout": 0.1}},
            "attention is flex but model.attention_dropout is 0.1, and FlexAttention drops no",
        ),
        (
            {
                "train": {"kernels": {"attention": "flex"}},
                "model": {"attention_dropout": 0.0, "kv_channels": 8},
            },
            "attention is flex but the heads have 8 features, and FlexAttention needs 16 or more",
        ),
        (
            {"train": {"kernels": {"weight_gradient": "torch_fp32"}, "precision": "fp32"}},
            "weight_gradient is torch_fp32 but train.precision is fp32, and it multiplies in half",
        ),
        (
            {"train": {"kernels": {"dropout": "cpp"}, "compile": "on"}},
            "dropout is cpp but train.compile is on, and it does not run in layers that torch",
        ),
        (
            {"train": {"kernels": {"adamw": "cpp"}, "precision": "fp16"}},
            (
                "train.kernels.adamw is cpp but train.precision is fp16, and the C++ kernels "
                "compute in fp32 and bf16 only: set the former to auto or plain"
            ),
        ),
    ],
)
def test_kernels_that_can_never_run_are_refused(sections: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**sections)


@pytest.mark.parametrize("sharding", ["none", "optimizer", "gradients", "parameters"])
def test_cuda_graphs_need_passes_without_communication(sharding: str) -> None:
    sections = {
        "train": {"cuda_graphs": True},
        "parallel": {"data_parallel_sharding": sharding},
    }
    if sharding in ("none", "optimizer"):
        assert make(**sections).train.cuda_graphs
    else:
        assert (
            f"train.cuda_graphs is true and parallel.data_parallel_sharding is {sharding}, which "
            "communicates in every pass, but a graph holds no communication: set train.cuda_graphs "
            "to false, or the sharding to optimizer"
        ) in refusal(**sections)


def test_heads_must_be_a_multiple_of_the_query_groups() -> None:
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    message = refusal(model=model | {"num_query_groups": 3})
    assert (
        "model.num_attention_heads 4 is not a multiple of model.num_query_groups 3: choose groups"
        in message
    )
    assert make(model=model | {"num_query_groups": 2}).model.query_groups == 2


@pytest.mark.parametrize("name", ["label_smoothing", "z_loss"])
def test_negative_loss_terms_are_refused(name: str) -> None:
    train = {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 100}
    assert f"train.{name} is -0.1" in refusal(train=train | {name: -0.1})


SOURCE = {"kind": "source_tree"}
OTHER = {"kind": "jsonl", "files": ["a.jsonl"]}
BLEND = [{"weight": 1, "source": SOURCE}, {"weight": 2, "source": OTHER}]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"source": None},
            (
                "data.source is missing: give it a value, or give data.blend or data.split_blends "
                "instead"
            ),
        ),
        ({"blend": BLEND}, "data.source and data.blend are given together: keep one of them"),
        (
            {"source": None, "blend": [*BLEND, BLEND[0]]},
            (
                "data.blend[2] names the source of data.blend[0] again: give it the sum of their "
                "weights once"
            ),
        ),
        ({"source": None, "blend": [{"weight": 0, "source": SOURCE}]}, "data.blend[0].weight is 0"),
        (
            {"source": None, "blend": [{"weight": 1, "source": {"kind": "s3"}}]},
            "data.blend[0].source",
        ),
        (
            {"source": None, "blend": [{"weight": 1, "source": {"kind": "jsonl", "fles": []}}]},
            "unknown key data.blend[0].source.fles (did you mean files?)",
        ),
        (
            {
                "source": None,
                "split": "1,1,1",
                "split_blends": dict.fromkeys(("train", "valid", "test"), BLEND),
            },
            (
                "data.split is '1,1,1' but data.split_blends says what each split holds: remove "
                "one of them"
            ),
        ),
        (
            {"packing": "unpacked", "index_style": "neox"},
            (
                "data.packing is unpacked but data.index_style is neox, which is for samples cut "
                "from documents end to end"
            ),
        ),
        (
            {"index_style": "neox", "add_extra_token": False},
            (
                "data.index_style is neox but data.add_extra_token is false, which GPT-NeoX does "
                "not have"
            ),
        ),
        (
            {"append_eod": False, "reset_attention_mask": True},
            (
                "data.reset_attention_mask is true but data.append_eod is false, so that no "
                "document has an end"
            ),
        ),
        (
            {"fim": {"rate": 0.5}},
            "data.fim needs the tokens <fim_prefix>, <fim_middle>, <fim_suffix>: add them to "
            "data.tokenizer.special_tokens",
        ),
        (
            {"dask_address": "tcp://a:8786"},
            "data.dask_address is tcp://a:8786 but data.shard_runner is threads",
        ),
        ({"keep_newlines": True}, "data.keep_newlines is true but data.split_sentences is false"),
        ({"language": "german"}, "data.language is german but data.split_sentences is false"),
    ],
)
def test_impossible_data_is_refused(data: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(data=data)


@pytest.mark.parametrize("kind", ["alibi", "none"])
def test_reset_position_ids_needs_position_ids(kind: str) -> None:
    model = {"position_embedding_type": kind}
    message = refusal(model=model, data={"reset_position_ids": True})
    assert (
        f"data.reset_position_ids is true but model.position_embedding_type is {kind}, which "
        "counts no pos"
    ) in message
    make(model=model, data={"reset_attention_mask": True})
    make(model={"position_embedding_type": "rope"}, data={"reset_position_ids": True})


def test_sources_are_listed_once_in_the_order_of_the_configuration() -> None:
    blends = {
        "train": BLEND,
        "valid": BLEND[1:],
        "test": [{"weight": 1, "source": {"kind": "prefix", "prefix": "p"}}],
    }
    config = make(data={"source": None, "split_blends": blends})
    assert [source.kind for source in config.data.sources] == ["source_tree", "jsonl", "prefix"]
    assert make(data={"source": None, "blend": BLEND}).data.sources == config.data.sources[:2]


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "prefix", "prefix": "p"},
        {"kind": "http", "files": [{"url": "http://a/p.bin?v=1"}, {"url": "http://a/p.idx"}]},
    ],
)
def test_eod_mask_loss_accepts_sources_with_tokenized_documents(source: dict[str, Any]) -> None:
    config = make(data={"source": source, "append_eod": False, "eod_mask_loss": True})
    assert config.data.eod_mask_loss
