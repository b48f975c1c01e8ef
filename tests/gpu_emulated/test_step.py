"""Iterations on fake GPUs: waits, copies from the host, timer events and communication."""

import functools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megacore.config import RunConfig, load_config
from megacore.plan.memory import estimate_stages
from tests.gpu_emulated.step import Case, Communication, Record

_LAYOUT = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.sequence_parallel": True,
    "launch.nproc_per_node": 8,
    "model.num_layers": 2,
    "train.compile": "off",
    "train.micro_batch_size": 1,
    "train.global_batch_size": 6,
}
WITHOUT_DEEPSPEED = {
    "gpt2-13b-3d": "its pipeline reads the shape of each message from the tensor it receives",
    "gpt2-xl-zero3-offload": "ZeRO-3 compares objects of the ranks, which nobody sends",
}
"""Confs of which DeepSpeed cannot run on fake tensors, and why. The native engine runs them in
their layout and precision."""
_NATIVE = {
    "engine": "native",
    "deepspeed.zero_stage": None,
    "deepspeed.config": None,
    "deepspeed.offload_optimizer": "none",
    "deepspeed.offload_param": "none",
}


FAST = {"bert-345m", "gpt2-345m", "gpt2-tiny", "llama-1b", "t5-tiny"}
"""Confs of the fast tests, one for each kind of model; the slow tests run all others."""


@functools.cache
def _config(conf: str) -> RunConfig:
    """Return a conf without overrides, which is read once."""
    return load_config(conf)


def _vocab_size(conf: str) -> int:
    return getattr(_config(conf).data.tokenizer, "vocab_size", None) or 50257


def _short(conf: str) -> dict[str, Any]:
    """Return overrides of a conf for two layers per stage and as few micro batches as possible."""
    config = _config(conf)
    parallel, ranks = config.parallel, _ranks(conf)
    stages = parallel.pipeline_model_parallel_size
    replicas = ranks // (stages * parallel.tensor_model_parallel_size)
    values = {
        "model.num_layers": 2 * stages,
        "train.compile": "off",
        "train.global_batch_size": config.train.micro_batch_size * replicas * stages,
    }
    return values | (_NATIVE if conf in WITHOUT_DEEPSPEED else {})


def _ranks(conf: str) -> int:
    ranks = _config(conf).launch.nproc_per_node
    return 1 if ranks == "auto" else ranks


def _cases(conf: str) -> dict[str, Case]:
    """Return the last rank of a conf, and with pipeline stages the first rank too."""
    ranks = _ranks(conf)
    stages = _config(conf).parallel.pipeline_model_parallel_size
    return {
        f"{conf} rank {rank}": Case(conf, rank, ranks, _short(conf), _vocab_size(conf))
        for rank in sorted({0 if stages > 1 else ranks - 1, ranks - 1})
    }


CONFS = sorted(path.stem for path in Path("conf").glob("*.yaml"))
CASES = {name: case for conf in CONFS for name, case in _cases(conf).items()}
"""Every conf in its layout."""
DEEPSPEED = [
    name
    for name, case in CASES.items()
    if _config(case.conf).engine == "deepspeed" and case.conf not in WITHOUT_DEEPSPEED
]
NATIVE = [name for name in CASES if name not in DEEPSPEED]


def _marked(names: list[str]) -> list[Any]:
    """Mark the slow cases."""
    return [
        name if CASES[name].conf in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


LAYOUT = {
    f"rank {rank}": Case("gpt2-345m", rank=rank, world_size=8, overrides=_LAYOUT)
    for rank in range(8)
}
PARTS = {
    f"context parallel rank {rank}": Case(
        "gpt2-345m",
        rank=rank,
        world_size=4,
        overrides=_LAYOUT
        | {
            "parallel.context_parallel_size": 2,
            "parallel.pipeline_model_parallel_size": 1,
            "launch.nproc_per_node": 4,
            "train.global_batch_size": 1,
        },
        iterations_only=True,
    )
    for rank in range(4)
}
"""Tensor 2 x context 2, with dropout and sequence parallelism."""
DIVIDED = {
    f"divided parameters, rank {rank}": Case(
        "gpt2-345m",
        rank,
        2,
        {
            "parallel.data_parallel_sharding": "parameters",
            "launch.nproc_per_node": 2,
            "model.num_layers": 3,
            "train.micro_batch_size": 4,
            "train.global_batch_size": 16,
            "train.compile": "off",
        },
        iterations_only=True,
    )
    for rank in range(2)
}
"""Both replicas of a model whose weights they divide, with two micro batches."""
SCALED = {
    f"rope {scaling['kind']}": Case(
        "llama-1b",
        overrides=_short("llama-1b")
        | {
            "launch.nproc_per_node": 1,
            "train.global_batch_size": _config("llama-1b").train.micro_batch_size,
            "model.rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                **scaling,
            },
        },
    )
    for scaling in (
        {"kind": "dynamic"},
        {"kind": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32},
    )
}
"""Rotary positions that depend on the length of a sequence."""
_LARGE_RANKS = (0, 7, 8, 16, 23, 32, 48, 56, 63)
LARGE = {
    f"64 ranks, rank {rank}": Case(
        "gpt2-345m",
        rank,
        64,
        {
            "parallel.tensor_model_parallel_size": 8,
            "parallel.pipeline_model_parallel_size": 4,
            "parallel.sequence_parallel": True,
            "parallel.data_parallel_sharding": "optimizer",
            "launch.nproc_per_node": 64,
            "model.num_layers": 4,
            "train.compile": "off",
            "train.micro_batch_size": 1,
            "train.global_batch_size": 8,
        },
    )
    for rank in _LARGE_RANKS
}
"""First, middle and last ranks of tensor 8 x data 2 x pipeline 4: two of each kind of group, and
every stage of rank 0's pipeline."""
_SIZES = {
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "max_position_embeddings",
    "init_method_std",
    "make_vocab_size_divisible_by",
}


def _kinds_of_layers() -> list[str]:
    """Return one conf of those whose layers differ only in sizes."""
    confs: dict[str, str] = {}
    for conf in CONFS:
        config = _config(conf)
        model = config.model.model_dump_json(exclude=_SIZES)
        train = config.train.model_dump_json(include={"recompute", "precision", "kernels"})
        confs.setdefault(f"{config.family} {model} {train}", conf)
    return list(confs.values())


OPERATIONS = {
    "bert-345m": 297,
    "bert-tiny": 283,  # without dropout
    "codeparrot-small": 295,
    "gpt2-13b-3d": 412,
    "gpt2-345m": 432,  # with full recomputation
    "gpt2-345m-h200": 295,
    "gpt2-tiny": 281,
    "llama-1b": 400,  # with selective recomputation
    "llama-tiny": 385,
    "t5-220m": 728,
    "t5-tiny": 679,
}
"""Operations of forward and backward that a layer starts for each micro batch, by conf; with T5, a
layer of the encoder and one of the decoder. On a GPU each takes a few microseconds of the host: a
larger number needs a reason. They are those of the native engine without divided layers."""
_SERIAL = {
    "launch.nproc_per_node": 1,
    "parallel.tensor_model_parallel_size": 1,
    "parallel.sequence_parallel": False,
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.virtual_pipeline_model_parallel_size": 1,
}
DEPTHS = {
    f"{conf} {layers} layers": Case(
        conf,
        overrides=_short(conf)
        | (_NATIVE if _config(conf).engine == "deepspeed" else {})
        | _SERIAL
        | {
            "model.num_layers": layers,
            "train.global_batch_size": _config(conf).train.micro_batch_size,
        },
        vocab_size=_vocab_size(conf),
        one_iteration=True,
        iterations_only=True,
    )
    for conf in _kinds_of_layers()
    for layers in (2, 3)
}

GRAPHS = {
    f"{conf} with a graph": Case(
        conf,
        rank,
        ranks,
        _short(conf) | {"train.cuda_graphs": True, **values},
        _vocab_size(conf),
        iterations_only=True,
    )
    for conf, rank, ranks, values in (
        ("gpt2-345m", 0, 1, {"train.global_batch_size": 8}),  # fp16, dropout, recomputation
        ("gpt2-tiny", 1, 2, {"parallel.data_parallel_sharding": "optimizer"}),
        ("llama-1b", 7, 8, {}),
        ("bert-345m", 0, 1, {}),
        ("t5-tiny", 1, 2, {"model.hidden_dropout": 0.1, "train.recompute": "selective"}),
    )
}
"""Iterations of which forward and backward are CUDA graphs."""
FAST_GRAPHS = [name for name, case in GRAPHS.items() if case.conf.startswith("gpt2")]


_MICRO_BATCH = "train.micro_batch_size"


def _divided(
    conf: str, rank: int, tensor: int = 1, pipeline: int = 1, data: int = 1, **values: Any
) -> Case:
    """Return a rank of a layout with four layers; keyword arguments have __ for each dot."""
    overrides = {name.replace("__", "."): value for name, value in values.items()}
    samples = overrides.setdefault(_MICRO_BATCH, _config(conf).train.micro_batch_size)
    return Case(
        conf,
        rank,
        tensor * pipeline * data,
        {
            "parallel.tensor_model_parallel_size": tensor,
            "parallel.pipeline_model_parallel_size": pipeline,
            "launch.nproc_per_node": tensor * pipeline * data,
            "model.num_layers": 4,
            "train.compile": "off",
            "train.global_batch_size": samples * data * (4 if pipeline > 1 else 1),
        }
        | overrides,
        _vocab_size(conf),
        memory=True,
        one_iteration=True,  # which needs as much memory as others
        iterations_only=True,
    )


_SEQUENCE = {"parallel__sequence_parallel": True}
_INTERLEAVED = {"parallel__virtual_pipeline_model_parallel_size": 2}
_LARGEST = _SEQUENCE | {"parallel__data_parallel_sharding": "optimizer"}
_T5 = {"train__micro_batch_size": 16}
_DELAYED = {"parallel__delay_weight_gradients": True, "parallel__pipeline_partition": [2, 2]}
MEMORY = {
    "gpt, full recomputation": _divided("gpt2-345m", 0, train__recompute="full"),
    "gpt, selective recomputation": _divided("gpt2-345m", 0, train__recompute="selective"),
    "gpt, tensor, sequence": _divided("gpt2-345m", 0, 4, train__recompute="none", **_SEQUENCE),
    "gpt, distributed optimizer": _divided(
        "gpt2-345m", 1, data=2, parallel__data_parallel_sharding="optimizer"
    ),
    "gpt, divided gradients": _divided(
        "gpt2-345m", 1, data=2, parallel__data_parallel_sharding="gradients"
    ),
    "gpt, divided parameters": _divided(
        "gpt2-345m", 1, data=2, parallel__data_parallel_sharding="parameters"
    ),
    "llama, divided parameters": _divided(
        "llama-1b", 3, 2, data=4, parallel__data_parallel_sharding="parameters", **_SEQUENCE
    ),
    "gpt, divided sequences": _divided(
        "gpt2-345m", 1, data=2, parallel__context_parallel_size=2, train__recompute="none"
    ),
    "bert, last stage": _divided("bert-345m", 3, 2, 2),
    "t5": _divided("t5-220m", 0, **_T5),
    "t5, last stage": _divided("t5-220m", 1, pipeline=2, **_T5),
    "llama, first stage": _divided("llama-1b", 0, 2, 2, 2, **_LARGEST),
    "llama, last stage": _divided("llama-1b", 7, 2, 2, 2, **_LARGEST),
    "llama, interleaved, first stage": _divided("llama-1b", 0, pipeline=2, **_INTERLEAVED),
    "llama, interleaved, last stage": _divided("llama-1b", 1, pipeline=2, **_INTERLEAVED),
    "gpt, delayed, first stage": _divided(
        "gpt2-345m", 0, pipeline=2, train__recompute="none", **_DELAYED
    ),
    "gpt, delayed, last stage": _divided(
        "gpt2-345m", 1, pipeline=2, train__recompute="none", **_DELAYED
    ),
    "gpt, delayed, full recomputation": _divided(
        "gpt2-345m", 1, pipeline=2, train__recompute="full", **_DELAYED
    ),
    "llama, delayed, last stage": _divided("llama-1b", 3, 2, 2, **_DELAYED, **_SEQUENCE),
    "llama, gpipe": _divided(
        "llama-1b", 0, pipeline=2, parallel__pipeline_schedule="gpipe", train__micro_batch_size=2
    ),
}


_COMPILED: dict[str, tuple[int, int, int]] = {
    "bert-345m": (0, 1, 1),
    "gpt2-345m": (0, 1, 1),
    "llama-1b": (1, 2, 1),
    "t5-220m": (0, 1, 2),
}
"""Rank, ranks that divide each layer, and number of kinds of layers."""
COMPILED = {
    f"{conf} compiled": Case(
        conf,
        rank,
        ranks,
        _short(conf)
        | {
            "parallel.tensor_model_parallel_size": ranks,
            "parallel.sequence_parallel": ranks > 1,
            "launch.nproc_per_node": ranks,
            "train.global_batch_size": _config(conf).train.micro_batch_size,
            "train.compile": "on",
            # Inductor, which compiles the cross entropy, needs the properties of a GPU.
            "train.kernels.cross_entropy": "plain",
        }
        # T5's cross attention seeds its dropout between two graphs.
        | ({"model.attention_dropout": 0.0} if conf == "t5-220m" else {}),
        vocab_size=_vocab_size(conf),
        iterations_only=True,
        compiled=True,
    )
    for conf, (rank, ranks, _) in _COMPILED.items()
}


_ALIBI = {"model.position_embedding_type": "alibi", "model.attention_dropout": 0.0}
_CAPPED = {
    "model.attn_logit_softcapping": 50.0,
    "model.sliding_window": 256,
    "model.window_attn_skip_freq": 2,
}
MASKED = {
    f"{name}, masked": Case(
        conf,
        overrides=COMPILED[f"{conf} compiled"].overrides
        | _SERIAL
        | {"data.seq_length": length, "data.reset_attention_mask": True}
        | values,
        vocab_size=_vocab_size(conf),
        iterations_only=name != "llama",
        compiled=True,
    )
    for name, conf, length, values in (
        ("llama", "llama-1b", 1536, {}),
        ("soft caps and windows", "llama-1b", 1536, _CAPPED),
        ("alibi", "gpt2-345m", 768, _ALIBI),
        ("dropout", "gpt2-345m", 768, {}),
        ("uncompiled", "llama-1b", 1536, {"train.compile": "off"}),
    )
}
"""Decoders whose documents do not see each other. No width is the length of a sequence. The first
one also evaluates, with a smaller last micro batch."""
GRAPHS["llama-1b, masked and compiled, with a graph"] = replace(
    MASKED["llama, masked"],
    overrides=MASKED["llama, masked"].overrides | {"train.cuda_graphs": True},
    iterations_only=True,
)
_DENSE = {
    "dropout, masked": "it drops no weights (model.attention_dropout is 0.1)",
    "uncompiled, masked": "the layers are not compiled (train.compile)",
}
"""Cases with a dense mask, and the reason in the run's record."""


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest) -> dict[str, Record]:
    """Return the record of each case of the selected tests, fast or slow ones."""
    slow = {
        item.get_closest_marker("slow") is not None
        for item in request.session.items
        if item.nodeid.split("::")[0] == request.node.nodeid
    }
    cases = {name: case for name, case in CASES.items() if (case.conf not in FAST) in slow}
    cases |= {name: case for name, case in GRAPHS.items() if (name not in FAST_GRAPHS) in slow}
    if False in slow:
        cases |= LAYOUT | PARTS | SCALED | DIVIDED
    return run_cases(cases | DEPTHS | COMPILED | MASKED | LARGE if True in slow else cases)


def run_cases(cases: dict[str, Case]) -> dict[str, Record]:
    """Run cases. An iteration that fails has its traceback in the error."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_emulated.step"],
        env={name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"},
        input="".join(json.dumps(asdict(case)) + "\n" for case in cases.values()),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert not errors, errors[0]
    return {name: Record.of(answer["record"]) for name, answer in zip(cases, answers, strict=True)}


@pytest.mark.parametrize("name", [*_marked(NATIVE), *LAYOUT, *PARTS, *SCALED, *DIVIDED])
def test_an_iteration_waits_once_for_the_gpu(records: dict[str, Record], name: str) -> None:
    record = records[name]
    assert len(record.synchronizations) == 1, record.synchronizations
    assert record.copies == []  # from the host, for which it would wait; also in an evaluation
    assert record.events == 0  # those of the iteration before are used again


@pytest.mark.parametrize("name", [*_marked(NATIVE), *LAYOUT])
def test_an_evaluation_and_a_save_wait_once_for_the_gpu(
    records: dict[str, Record], name: str
) -> None:
    (evaluation,), (save,) = records[name].evaluation, records[name].save
    assert evaluation.startswith("tolist at megacore/train/evaluate.py")  # its result
    assert save.startswith("stream.synchronize at megacore/checkpoint/background.py")  # all copies


@pytest.mark.parametrize("name", _marked(DEEPSPEED))
def test_deepspeed_waits_twice_more_in_an_iteration(records: dict[str, Record], name: str) -> None:
    """It reads the overflow and compares the norm, and with ZeRO-2 also waits for its stream."""
    record = records[name]
    packages = [wait.split(" at ")[1].split("/")[0] for wait in record.synchronizations]
    more = int("zero2" in name)
    assert packages == ["deepspeed"] * (2 + more) + ["megacore"], record.synchronizations
    assert all(" at deepspeed/" in copy for copy in record.copies)
    assert record.events == 0


@pytest.mark.slow
@pytest.mark.parametrize("conf", _COMPILED)
def test_a_kind_of_layer_is_one_graph(records: dict[str, Record], conf: str) -> None:
    record = records[f"{conf} compiled"]
    assert record.graph_breaks == []
    assert record.graphs == _COMPILED[conf][2]
    assert len(record.synchronizations) == 1, record.synchronizations
    assert record.copies == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_documents_is_no_matrix(records: dict[str, Record], name: str) -> None:
    record = records[name]
    assert len(record.synchronizations) == 1, record.synchronizations
    assert record.copies == []
    assert record.graph_breaks == []
    if name in _DENSE:
        assert record.squares
        assert _DENSE[name] in record.kernels["masks"]
    else:
        assert record.squares == []
        assert set(record.attention) == {"flex_attention", "flex_attention_backward"}
        assert record.kernels["masks"] == "spans in blocks"
        assert record.kernels["attention"] == "torch FlexAttention for masks"


@pytest.mark.slow
@pytest.mark.parametrize("conf", _kinds_of_layers())
def test_a_layer_starts_a_fixed_number_of_operations(records: dict[str, Record], conf: str) -> None:
    three, two = (records[f"{conf} {layers} layers"].operations for layers in (3, 2))
    assert three - two == OPERATIONS[conf]


@pytest.mark.parametrize(
    "name", ["gpt2-tiny rank 1", "gpt2-345m rank 0", "llama-1b rank 7", "rank 0"]
)
def test_attention_is_fused(records: dict[str, Record], name: str) -> None:
    assert set(records[name].attention) == {
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_backward.default",
    }


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST_GRAPHS else pytest.param(name, marks=pytest.mark.slow)
        for name in GRAPHS
    ],
)
def test_a_graph_contains_only_computation(records: dict[str, Record], name: str) -> None:
    """No wait, no timer event, no copy from the host, no communication, no seed of a generator."""
    record, case = records[name], GRAPHS[name]
    config = load_config(case.conf, case.overrides)
    micro_batches = config.train.global_batch_size // config.train.micro_batch_size
    assert record.captured == []
    assert record.captures == 1
    assert record.replays == micro_batches // case.world_size
    # Of each replay: ids to the GPU and into the graph, losses out of it.
    assert record.operations <= 4 * record.replays + 2
    assert len(record.synchronizations) == 1, record.synchronizations
    assert record.copies == []
    assert record.events == 0
    assert bool(record.generators) == bool(config.model.hidden_dropout)


@pytest.mark.slow
def test_the_planner_counts_the_memory_of_a_stage() -> None:
    """Within 5 % of what torch counts, without the CUDA context."""
    ratios = {}
    for name, record in run_cases(MEMORY).items():
        case = MEMORY[name]
        config = load_config(case.conf, case.overrides)
        stages = config.parallel.pipeline_model_parallel_size
        replicas = case.world_size // (stages * config.parallel.tensor_model_parallel_size)
        estimates = estimate_stages(
            config, case.vocab_size, config.train.precision, "cuda", replicas
        )
        stage = estimates[case.rank * stages // case.world_size]
        ratios[name] = (stage.total - stage.process) / record.peak_bytes
    assert ratios == {name: pytest.approx(1.0, abs=0.05) for name in MEMORY}


def test_ranks_of_a_group_communicate_in_the_same_order(records: dict[str, Record]) -> None:
    """NCCL would hang otherwise."""
    assert _compared_groups({rank: records[f"rank {rank}"] for rank in range(8)}) >= 4
    parts = {rank: records[f"context parallel rank {rank}"] for rank in range(4)}
    assert _compared_groups(parts) >= 5  # tensor, context and both together
    replicas = {rank: records[f"divided parameters, rank {rank}"] for rank in range(2)}
    assert _compared_groups(replicas) >= 1
    (started,) = {len(record.communication) for record in replicas.values()}
    assert started > 2 * (3 + 3 + 1)  # each micro batch gathers three layers twice, less one


@pytest.mark.slow
def test_ranks_of_a_large_world_communicate_in_the_same_order(records: dict[str, Record]) -> None:
    ranks = {rank: records[f"64 ranks, rank {rank}"] for rank in _LARGE_RANKS}
    # at least tensor 0-7, 16-23 and 56-63, data 0 and 8, and 48 and 56, embeddings 0 and 48
    assert _compared_groups(ranks) >= 6
    column = (0, 16, 32, 48)
    sent, received = _sent_and_received({rank: ranks[rank] for rank in column})
    assert sent
    assert sent == received


def _compared_groups(records: dict[int, Record]) -> int:
    """Assert that each group's ranks start the same collectives; return the groups with several."""
    by_group: dict[str, dict[int, list[Any]]] = defaultdict(dict)
    for rank, record in records.items():
        for call in record.communication:
            if call.peer is None:
                calls = by_group[f"{call.group} {call.ranks}"].setdefault(rank, [])
                calls.append((call.operation, call.tensors))
    for group, calls_of_rank in by_group.items():
        assert len({json.dumps(calls) for calls in calls_of_rank.values()}) == 1, group
    return sum(len(calls_of_rank) > 1 for calls_of_rank in by_group.values())


def test_messages_are_received_in_the_order_in_which_they_are_sent(
    records: dict[str, Record],
) -> None:
    sent, received = _sent_and_received({rank: records[f"rank {rank}"] for rank in range(8)})
    assert sent
    assert sent == received


def _sent_and_received(records: dict[int, Record]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the messages of each channel, source and destination, as both sides have them."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, record in records.items():
        for call in _messages(record.communication):
            if call.operation == "send":
                sent[call.group, rank, call.peer].append(call.tensors)
            else:
                received[call.group, call.peer, rank].append(call.tensors)
    return sent, received


def _messages(calls: Iterable[Communication]) -> Iterable[Communication]:
    return (call for call in calls if call.peer is not None)
