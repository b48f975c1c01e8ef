"""Layouts that are refused, the numbers in the message, and the layouts proposed instead."""

import itertools
import re
from typing import Any

import pytest

from megacore.config import RunConfig
from megacore.config.layouts import ParallelLayout, check_layout, nearest_layouts, refused
from megacore.config.load import parse_config
from megacore.errors import ConfigError


def values(**changes: Any) -> dict[str, Any]:
    """Return configuration values with changes named `section__key`.

    The model has 12 layers of 12 heads; batches are of 48.
    """
    sections: dict[str, Any] = {
        "name": "small",
        "data": {
            "source": {"kind": "source_tree"},
            "tokenizer": {"kind": "train-bpe"},
            "seq_length": 64,
        },
        "model": {"num_layers": 12, "hidden_size": 48, "num_attention_heads": 12},
        "optim": {"lr": 1e-3},
        "train": {"micro_batch_size": 1, "global_batch_size": 48, "train_iters": 10},
        "checkpoint": {"save_interval": 5},
        "parallel": {},
        "deepspeed": {},
        "launch": {},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        (sections[section] if key else sections)[key or section] = value
    return sections


def make(
    tp: int = 1, pp: int = 1, v: int = 1, ranks: int | str = "auto", **changes: Any
) -> RunConfig:
    sizes = {
        "parallel__tensor_model_parallel_size": tp,
        "parallel__pipeline_model_parallel_size": pp,
        "parallel__virtual_pipeline_model_parallel_size": v,
        "launch__nproc_per_node": ranks,
    }
    return parse_config(values(**sizes, **changes), origin="test")


DEEPSPEED: dict[str, Any] = {"engine": "deepspeed"}
T5: dict[str, Any] = {
    "family": "t5",
    "data__append_eod": False,
    "data__split_sentences": True,
    "data__tokenizer": {
        "kind": "train-bpe",
        "special_tokens": ["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
        "vocab_extra_ids": 100,
    },
    "model__position_embedding_type": "relative",
}

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (
        {"tp": 8, "ranks": 8},
        (
            "model.num_attention_heads 12 is not a multiple of parallel.tensor_model_parallel_size "
            "8: use tensor 4 x pipeline 2 x data 1, tensor 4 x pipeline 1 x data 2 or tensor 2 x "
            "pipeline 4 x data 1"
        ),
    ),
    "heads of an unknown number of ranks": (
        {"tp": 8},
        (
            "model.num_attention_heads 12 is not a multiple of parallel.tensor_model_parallel_size "
            "8: use tensor 4 x pipeline 2, tensor 2 x pipeline 4 or tensor 1 x pipeline 8"
        ),
    ),
    "nothing fits": (
        {"tp": 5, "ranks": 5, "model__num_layers": 3},
        "parallel.tensor_model_parallel_size 5: no layout of 5 ranks works, use another number",
    ),
    "groups": (
        {"tp": 4, "model__num_query_groups": 6},
        (
            "model.num_query_groups 6 is neither a multiple nor a divisor of "
            "parallel.tensor_model_parallel_size 4: use tensor 2 x pipeline 2"
        ),
    ),
    "keys and values": (
        {"tp": 4, "model__num_query_groups": 1, "model__kv_channels": 5},
        "the 10 features of keys and values (2 x model.num_query_groups 1 x 5 of a head) are not a "
        "multiple of parallel.tensor_model_parallel_size 4: use tensor 2 x pipeline 2",
    ),
    "ffn": (
        {"tp": 4, "model__ffn_hidden_size": 90},
        "model.ffn_hidden_size 90 is not a multiple of parallel.tensor_model_parallel_size 4: use "
        "tensor 2 x pipeline 2 or tensor 1 x pipeline 4",
    ),
    "divided parameters with a pipeline": (
        {"pp": 2, "ranks": 4, "parallel__data_parallel_sharding": "parameters"},
        "set parallel.data_parallel_sharding to gradients, or "
        "parallel.pipeline_model_parallel_size to 1",
    ),
    "sequence parallel without tensor parallel": (
        {"ranks": 2, "parallel__sequence_parallel": True},
        (
            "parallel.sequence_parallel is true but parallel.tensor_model_parallel_size is 1, so "
            "that no ranks share a sequence: set parallel.sequence_parallel to false, or use "
            "tensor 2 x pipeline 1 x data 1"
        ),
    ),
    "sequence": (
        {"tp": 4, "parallel__sequence_parallel": True, "data__seq_length": 66},
        (
            "data.seq_length 66 is not a multiple of parallel.tensor_model_parallel_size 4, which "
            "parallel.sequence_parallel divides it by: set parallel.sequence_parallel to false, or "
            "use tensor 2"
        ),
    ),
    "uniform": (
        {"pp": 8, "parallel__pipeline_partition": "uniform"},
        (
            "model.num_layers 12 is not a multiple of parallel.pipeline_model_parallel_size 8, "
            "which parallel.pipeline_partition uniform needs: set parallel.pipeline_partition to "
            "balanced, or use tensor 2 x pipeline 4"
        ),
    ),
    "uniform chunks": (
        {"pp": 2, "v": 4, "parallel__pipeline_partition": "uniform"},
        (
            "model.num_layers 12 is not a multiple of parallel.pipeline_model_parallel_size 2 x "
            "parallel.virtual_pipeline_model_parallel_size 4 = 8 chunks, which "
            "parallel.pipeline_partition uniform needs: set parallel.pipeline_partition to "
            "balanced, or use tensor 1 x pipeline 2 x virtual 3, "
        ),
    ),
    "fewer layers than stages": (
        {"pp": 16},
        (
            "model.num_layers 12 is less than parallel.pipeline_model_parallel_size 16, and each "
            "chunk needs a layer: use tensor 2 x pipeline 8 or tensor 4 x pipeline 4"
        ),
    ),
    "fewer layers than chunks": (
        {"pp": 4, "v": 4},
        (
            "model.num_layers 12 is less than parallel.pipeline_model_parallel_size 4 x "
            "parallel.virtual_pipeline_model_parallel_size 4 = 16 chunks, and each chunk needs a "
            "layer: use tensor 1 x pipeline 4 x virtual 3"
        ),
    ),
    "list too short": (
        {"pp": 4, "parallel__pipeline_partition": [6, 6]},
        (
            "parallel.pipeline_partition [6, 6] has 2 entries for "
            "parallel.pipeline_model_parallel_size 4: give it 4, or use tensor 2 x pipeline 2"
        ),
    ),
    "list with another sum": (
        {"pp": 2, "parallel__pipeline_partition": [6, 5]},
        (
            "parallel.pipeline_partition [6, 5] adds up to 11 layers and model.num_layers is 12: "
            "make it add up to 12"
        ),
    ),
    "list with an empty chunk": (
        {"pp": 2, "parallel__pipeline_partition": [0, 12]},
        (
            "parallel.pipeline_partition [0, 12] has a chunk of 0 layers: give each at least 1, or "
            "0 only to the last"
        ),
    ),
    "virtual without stages": (
        {"v": 2, "ranks": 2},
        (
            "parallel.virtual_pipeline_model_parallel_size is 2 but "
            "parallel.pipeline_model_parallel_size is 1, so that there are no stages: set "
            "parallel.virtual_pipeline_model_parallel_size to 1, or use tensor 1 x pipeline 1 x "
            "data 2, tensor 1 x pipeline 2 x virtual 2 x data 1 or "
        ),
    ),
    "gpipe with chunks": (
        {"pp": 2, "v": 2, "parallel__pipeline_schedule": "gpipe"},
        (
            "parallel.virtual_pipeline_model_parallel_size is 2 but parallel.pipeline_schedule "
            "gpipe has one chunk per stage: set it to 1f1b, or set "
            "parallel.virtual_pipeline_model_parallel_size to 1, or use tensor 1 x pipeline 2 or "
            "tensor 2 x pipeline 1"
        ),
    ),
    "batch": (
        {"tp": 2, "ranks": 10},
        (
            "train.global_batch_size 48 is not a multiple of train.micro_batch_size 1 x 5 "
            "data-parallel ranks = 5: use 50, or use tensor 2 x pipeline 5 x data 1"
        ),
    ),
    "batch of one rank": (
        {"train__micro_batch_size": 5},
        "train.global_batch_size 48 is not a multiple of train.micro_batch_size 5: use 50",
    ),
    "interleaving": (
        {"pp": 4, "v": 2, "ranks": 8, "train__global_batch_size": 12},
        (
            "train.global_batch_size 12 / (train.micro_batch_size 1 x 2 data-parallel ranks = 2) = "
            "6 micro batches, which is not a multiple of parallel.pipeline_model_parallel_size 4 "
            "as parallel.virtual_pipeline_model_parallel_size 2 needs it: use 16, or use "
        ),
    ),
    "interleaving of a ramp-up": (
        {"pp": 2, "v": 2, "train__rampup_batch_size": {"start": 6, "increment": 3, "samples": 100}},
        (
            "train.rampup_batch_size.increment 3 / (train.micro_batch_size 1) = 3 micro batches, "
            "which is not a multiple of parallel.pipeline_model_parallel_size 2"
        ),
    ),
    "ramp-up": (
        {"ranks": 4, "train__rampup_batch_size": {"start": 6, "increment": 6, "samples": 100}},
        (
            "train.rampup_batch_size.start 6 is not a multiple of train.micro_batch_size 1 x 4 "
            "data-parallel ranks = 4: use 8, or use "
        ),
    ),
    "ramp-up's increment": (
        {"ranks": 8, "train__rampup_batch_size": {"start": 8, "increment": 20, "samples": 100}},
        (
            "train.rampup_batch_size.increment 20 is not a multiple of train.micro_batch_size 1 x "
            "8 data-parallel ranks = 8: use 24, or use "
        ),
    ),
    "ZeRO stage 2 in a pipeline": (
        {**DEEPSPEED, "pp": 2, "ranks": 4, "deepspeed__zero_stage": 2},
        (
            "deepspeed.zero_stage is 2 but parallel.pipeline_model_parallel_size is 2, and "
            "DeepSpeed's pipeline keeps the gradients of all micro batches until the step, so that "
            "replicas can divide only the optimizer's state: set deepspeed.zero_stage to 1, or "
            "use tensor 2 x pipeline 1 x data 2, tensor 1 x pipeline 1 x data 4 or tensor 4 x "
            "pipeline 1 x data 1"
        ),
    ),
    "ZeRO stage 3 of a file in a pipeline": (
        {**DEEPSPEED, "pp": 4, "deepspeed__config": {"zero_optimization": {"stage": 3}}},
        (
            "zero_optimization.stage of deepspeed.config is 3 but "
            "parallel.pipeline_model_parallel_size is 4, and DeepSpeed's pipeline keeps the "
            "gradients of all micro batches until the step, so that replicas can divide only "
            "the optimizer's state: set zero_optimization.stage of deepspeed.config to 1, or use "
            "tensor 4 x pipeline 1"
        ),
    ),
    "chunks in DeepSpeed's pipeline": (
        {**DEEPSPEED, "pp": 2, "v": 2},
        (
            "parallel.virtual_pipeline_model_parallel_size is 2 but engine is deepspeed, whose "
            "stages have one chunk each: set it to 1, or set engine to native, or use tensor 1 x "
            "pipeline 2 or tensor 2 x pipeline 1"
        ),
    ),
    "delayed weight gradients without stages": (
        {"parallel__delay_weight_gradients": True},
        (
            "parallel.delay_weight_gradients is true but parallel.pipeline_model_parallel_size is "
            "1, so that no stage waits for the gradient of its output: set "
            "parallel.delay_weight_gradients to false"
        ),
    ),
    "delayed weight gradients with divided gradients": (
        {
            "pp": 2,
            "ranks": 4,
            "parallel__delay_weight_gradients": True,
            "parallel__data_parallel_sharding": "gradients",
        },
        (
            "parallel.delay_weight_gradients is true but parallel.data_parallel_sharding is "
            "gradients, which reduces the gradients when each backward pass ends: set "
            "parallel.delay_weight_gradients to false"
        ),
    ),
    "delayed weight gradients in DeepSpeed's pipeline": (
        {**DEEPSPEED, "pp": 2, "ranks": 2, "parallel__delay_weight_gradients": True},
        (
            "parallel.delay_weight_gradients is true but engine is deepspeed, whose backward "
            "passes are whole: set it to false, or set engine to native"
        ),
    ),
    "gpipe in DeepSpeed's pipeline": (
        {**DEEPSPEED, "pp": 2, "ranks": 2, "parallel__pipeline_schedule": "gpipe"},
        (
            "parallel.pipeline_schedule is gpipe but engine is deepspeed, whose pipeline has only "
            "1F1B: set it to 1f1b, or set engine to native, or use tensor 2 x pipeline 1 x data 1 "
            "or tensor 1 x pipeline 1 x data 2"
        ),
    ),
    "heads with ZeRO stage 3": (
        {**DEEPSPEED, "tp": 8, "ranks": 8, "deepspeed__zero_stage": 3},
        (
            "model.num_attention_heads 12 is not a multiple of parallel.tensor_model_parallel_size "
            "8: use tensor 4 x pipeline 1 x data 2, tensor 2 x pipeline 1 x data 4 or tensor 1 x "
            "pipeline 1 x data 8"
        ),
    ),
    "ranks": (
        {"tp": 2, "pp": 2, "ranks": 6},
        (
            "6 ranks are not a multiple of parallel.tensor_model_parallel_size 2 x "
            "parallel.pipeline_model_parallel_size 2 = 4 ranks per replica: set "
            "launch.nproc_per_node to 4, or use "
        ),
    ),
    "too few ranks": (
        {"tp": 4, "ranks": 1},
        "1 rank is not a multiple of parallel.tensor_model_parallel_size 4",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_impossible_layout_is_refused_with_layouts_that_work(case: str) -> None:
    changes, sentence = CASES[case]
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert sentence in str(caught.value)
    for tp, pp, v, dp in proposals(str(caught.value)):
        ranks = changes.get("ranks", changes.get("tp", 1) * changes.get("pp", 1))
        assert tp * pp * dp == ranks
        make(**(changes | {"tp": tp, "pp": pp, "v": v, "ranks": ranks}))


def proposals(message: str) -> list[tuple[int, int, int, int]]:
    """Return the layouts that a message names."""
    matches = re.findall(
        r"tensor (\d+) x pipeline (\d+)(?: x virtual (\d+))?(?: x data (\d+))?", message
    )
    return [(int(tp), int(pp), int(v or 1), int(dp or 1)) for tp, pp, v, dp in matches]


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 12, "ranks": 12},
        {"tp": 4, "model__num_query_groups": 2},
        {"tp": 4, "parallel__sequence_parallel": True, "ranks": 8},
        {"pp": 12, "ranks": 12},
        {"pp": 5, "ranks": 5},
        {"pp": 2, "v": 6, "parallel__pipeline_partition": "uniform"},
        {"pp": 3, "parallel__pipeline_partition": [5, 7, 0]},
        {"pp": 2, "v": 2, "parallel__pipeline_partition": [3, 3, 3, 3]},
        {"pp": 2, "parallel__pipeline_schedule": "gpipe"},
        {"pp": 2, "v": 2, "parallel__delay_weight_gradients": True},
        {
            "pp": 2,
            "ranks": 4,
            "parallel__delay_weight_gradients": True,
            "parallel__data_parallel_sharding": "optimizer",
        },
        {"ranks": 1, "parallel__data_parallel_sharding": "optimizer"},
        {"ranks": 1, "parallel__data_parallel_sharding": "parameters"},
        {"ranks": 4, "pp": 2, "parallel__data_parallel_sharding": "gradients"},
        {
            "pp": 2,
            "v": 2,
            "ranks": 4,
            "train__rampup_batch_size": {"start": 4, "increment": 4, "samples": 100},
        },
        {"tp": 2, "pp": 2, "ranks": 16},
        {
            **DEEPSPEED,
            "tp": 2,
            "pp": 2,
            "ranks": 8,
            "deepspeed__zero_stage": 1,
            "parallel__sequence_parallel": True,
        },
        {
            **DEEPSPEED,
            "pp": 2,
            "ranks": 2,
            "parallel__pipeline_partition": [5, 7],
            "deepspeed__zero_stage": 0,
        },
        {
            **DEEPSPEED,
            "pp": 2,
            "ranks": 4,
            "deepspeed__zero_stage": 1,
            "deepspeed__offload_optimizer": "cpu",
        },
        {
            **DEEPSPEED,
            "tp": 2,
            "ranks": 4,
            "deepspeed__zero_stage": 3,
            "deepspeed__offload_param": "cpu",
        },
        {
            **DEEPSPEED,
            "ranks": 2,
            "parallel__pipeline_schedule": "gpipe",
            "deepspeed__zero_stage": 2,
        },
        {**DEEPSPEED, **T5, "tp": 2, "ranks": 4, "deepspeed__zero_stage": 2},
        {**DEEPSPEED, **T5, "pp": 2, "ranks": 4, "deepspeed__zero_stage": 1},
        {"pp": 2, "v": 2, "deepspeed__zero_stage": 3},
    ],
)
def test_possible_layouts_are_accepted(changes: dict[str, Any]) -> None:
    make(**changes)


def test_the_padded_vocabulary_is_checked_if_known() -> None:
    config = make(tp=3, ranks=3)
    assert check_layout(config, 3) == ParallelLayout(tensor=3)
    assert check_layout(config, 3, padded_vocab_size=384) == ParallelLayout(tensor=3)
    message = (
        r"the padded vocabulary of 512 entries is not a multiple of "
        r"parallel\.tensor_model_parallel_size 3: set model\.make_vocab_size_divisible_by \(now "
        r"128\) to 384, or use tensor 1 x pipeline 3 x data 1 or tensor 1 x pipeline 1 x data 3$"
    )
    with pytest.raises(ValueError, match=message):
        check_layout(config, 3, padded_vocab_size=512)


def test_nearest_layouts_are_the_closest_that_work() -> None:
    config = make(train__global_batch_size=24, model__num_query_groups=4)
    for requested in (
        ParallelLayout(tensor=8, data=3),
        ParallelLayout(pipeline=6, data=4),
        ParallelLayout(tensor=3, pipeline=2, virtual=2, data=4),
    ):
        layouts = [
            ParallelLayout(tensor=tp, pipeline=pp, virtual=v, data=24 // (tp * pp))
            for tp, pp, v in itertools.product(range(1, 25), range(1, 25), range(1, 13))
            if 24 % (tp * pp) == 0 and (v == 1 or requested.virtual > 1)
        ]
        working = [layout for layout in layouts if refused(config, layout) is None]
        nearest = nearest_layouts(config, requested, 24)
        assert len(nearest) == 3
        assert set(nearest) <= set(working)
        assert (
            max(layout.distance(requested) for layout in nearest)
            <= sorted(other.distance(requested) for other in working)[2]
        )
        assert nearest[0].distance(requested) == min(other.distance(requested) for other in working)
    valid = ParallelLayout(tensor=2, pipeline=2, data=6)
    assert nearest_layouts(config, valid, 24)[0] == valid


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            T5 | {"ranks": 2},
            "parallel.context_parallel_size is 2 but family is t5, and only causal models divide "
            "their sequences: set parallel.context_parallel_size to 1",
        ),
        (
            DEEPSPEED | {"ranks": 2},
            "parallel.context_parallel_size is 2 but engine is deepspeed, which does not divide "
            "sequences: set engine to native, or set parallel.context_parallel_size to 1",
        ),
        (
            {"ranks": 2, "model__position_embedding_type": "alibi"},
            "parallel.context_parallel_size is 2 but model.position_embedding_type is alibi, whose "
            "biases are not divided",
        ),
        (
            {"ranks": 2, "data__seq_length": 62},
            "data.seq_length 62 is not a multiple of 4: it is divided into 2 x "
            "parallel.context_parallel_size 2 chunks: use 64, or set "
            "parallel.context_parallel_size to 1",
        ),
        (
            {"ranks": 8, "tp": 4, "parallel__sequence_parallel": True, "data__seq_length": 60},
            "data.seq_length 60 is not a multiple of 8: it is divided into 2 x "
            "parallel.context_parallel_size 2 chunks, and over 2 ranks x "
            "parallel.tensor_model_parallel_size 4 by parallel.sequence_parallel: use 64",
        ),
        (
            {
                "ranks": 6,
                "tp": 3,
                "parallel__sequence_parallel": True,
                "model__hidden_dropout": 0.1,
                "data__seq_length": 60,
            },
            "parallel.context_parallel_size is 2 with parallel.sequence_parallel and an odd "
            "parallel.tensor_model_parallel_size 3, whose ranks would draw other numbers for "
            "model.hidden_dropout 0.1: set parallel.sequence_parallel to false",
        ),
        (
            {"ranks": 6, "tp": 2},
            "6 ranks are not a multiple of parallel.tensor_model_parallel_size 2 x "
            "parallel.context_parallel_size 2 x parallel.pipeline_model_parallel_size 1 = 4 ranks "
            "per replica: set launch.nproc_per_node to 4, or use tensor 3 x context 2 x pipeline "
            "1 x data 1",
        ),
    ],
)
def test_sequences_that_cannot_be_divided_are_refused(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(parallel__context_parallel_size=2, **changes)
    assert sentence in str(caught.value)


def test_ranks_that_divide_sequences_are_no_replicas() -> None:
    config = make(tp=2, ranks=8, parallel__context_parallel_size=2)
    assert check_layout(config, 8) == ParallelLayout(tensor=2, data=2, context=2)
    assert config.parallel.ranks_per_replica == 4
    assert {
        layout.context
        for layout in nearest_layouts(config, ParallelLayout.of(config.parallel, 8), 8)
    } == {2}


def test_ranks_of_several_hosts_are_counted_together() -> None:
    launch = {"launch__kind": "slurm", "launch__nnodes": 5, "launch__allow_cpu": True}
    with pytest.raises(
        ConfigError, match=r"start 32 ranks on all hosts \(launch\.nnodes"
    ) as caught:
        make(tp=4, pp=4, ranks=8, **launch)
    assert "set launch.nproc_per_node" not in str(caught.value)
