"""Losses and gradient norms of DeepSpeed's engines, compared with the native serial run."""

import json
from typing import Any

import pytest

from tests._dist import run_distributed
from tests.architecture._source import ROOT
from tests.parity._training import STEPS, Case, Result, train_all
from tests.parity.test_layouts import (
    BF16,
    DOCUMENTS,
    DROPOUT,
    LLAMA,
    M4,
    M8,
    PP2,
    SMALL,
    SP,
    T5,
    T5_V11,
    TP2,
    compare,
    selected,
    slow_unless,
)

ZERO_1, ZERO_2, ZERO_3 = ({"zero_stage": stage} for stage in (1, 2, 3))
DIVIDE_ALL = ZERO_3 | {"stage3_param_persistence_threshold": 0}
"""Stage 3 that divides small parameters too."""
OFFLOAD = {"offload_optimizer": "cpu"}
FULL = {"recompute": "full"}


def zero(
    deepspeed: dict[str, Any],
    parallel: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **values: Any,
) -> Case:
    return Case(parallel or {}, train or {}, engine="deepspeed", deepspeed=deepspeed, **values)


def other(
    family: str, model: dict[str, Any], deepspeed: dict[str, Any], *layout: dict[str, Any]
) -> Case:
    optim = {} if family == "gpt" else {"lr": 3e-3}
    return zero(deepspeed, *layout, model=model, optim=optim, family=family)


FILES = {
    name: json.loads((ROOT / f"conf/ds/{name}.json").read_text())
    for name in ("zero2", "zero3-offload")
}
"""Contents of DeepSpeed's JSON files, with "auto" for values that megacore sets."""

TWO_RANKS = {
    "stage 0": zero({"zero_stage": 0}, steps=STEPS),
    "the native distributed optimizer is stage 1": zero(
        {}, {"data_parallel_sharding": "optimizer"}, M4
    ),
    "stage 1": zero(ZERO_1, steps=STEPS),
    "stage 1, small buckets that overlap": zero(
        ZERO_1 | {"reduce_bucket_size": 5000, "allgather_bucket_size": 5000, "overlap_comm": True}
    ),
    "stage 1, separate documents": zero(ZERO_1, data=DOCUMENTS),
    "stage 2": zero(ZERO_2, train=M4, steps=STEPS),
    "stage 2, separate documents": zero(ZERO_2, data=DOCUMENTS),
    "stage 2, full recomputation in host memory": zero(
        ZERO_2 | {"cpu_checkpointing": True}, train=M4 | FULL
    ),
    "stage 2, optimizer on the CPU": zero(ZERO_2 | OFFLOAD, train=M4, steps=STEPS),
    "stage 3": zero(DIVIDE_ALL, train=M4, steps=STEPS),
    "stage 3, small parameters whole": zero(ZERO_3),
    "stage 3, full recomputation": zero(DIVIDE_ALL, train=M4 | FULL),
    "stage 3, everything on the CPU": zero(
        DIVIDE_ALL | OFFLOAD | {"offload_param": "cpu"}, train=M4
    ),
    "stage 2 by a file": zero({"config": FILES["zero2"]}, train=M4),
    "stage 3 on the CPU by a file": zero({"config": FILES["zero3-offload"]}, train=M4),
    "tp2 stage 1": zero(ZERO_1, TP2),
    "tp2 stage 1, activations divided": zero(ZERO_1 | {"partition_activations": True}, TP2, FULL),
    "tp2 sp stage 2": zero(ZERO_2, TP2 | SP),
    "tp2 sp stage 3": zero(DIVIDE_ALL, TP2 | SP),
    "pp2 stage 0": zero({"zero_stage": 0}, PP2, M4),
    "pp2 stage 1": zero(ZERO_1, PP2, M4, steps=STEPS),
    "pp2 stage 1 uneven": zero(ZERO_1, PP2 | {"pipeline_partition": [3, 1]}, M4),
    "pp2 stage 1, separate documents, full recomputation": zero(ZERO_1, PP2, FULL, data=DOCUMENTS),
    "stage 2, dropout": zero(ZERO_2, model=DROPOUT),
    "stage 1 bf16": zero(ZERO_1, train=BF16, model=SMALL, steps=STEPS),
    "stage 0 bf16": zero({"zero_stage": 0}, train=BF16, model=SMALL, steps=STEPS),
    "tp2 stage 0 bf16": zero({"zero_stage": 0}, TP2, BF16, model=SMALL),
    "pp2 stage 0 bf16": zero({"zero_stage": 0}, PP2, BF16, model=SMALL),
    "stage 2 bf16": zero(ZERO_2, train=BF16, model=SMALL),
    "stage 3 bf16": zero(DIVIDE_ALL, train=BF16, model=SMALL, steps=STEPS),
    "pp2 stage 1 bf16": zero(ZERO_1, PP2, BF16, model=SMALL),
    "pp2 stage 1 bf16, optimizer on the CPU": zero(ZERO_1 | OFFLOAD, PP2, BF16, model=SMALL),
    "llama stage 3": other("gpt", LLAMA, DIVIDE_ALL),
    "llama tp2 stage 3": other("gpt", LLAMA, DIVIDE_ALL, TP2),
    "bert stage 3": other("bert", SMALL, DIVIDE_ALL),
    "bert pp2 stage 1, norms after sums": other(
        "bert", SMALL | {"norm_position": "post"}, ZERO_1, PP2
    ),
    "t5 stage 3, full recomputation": other("t5", T5_V11, DIVIDE_ALL, {}, FULL),
    "t5 pp2 stage 1": other("t5", T5, ZERO_1, PP2),
}
FOUR_RANKS = {
    "dp4 stage 3": zero(DIVIDE_ALL, train=M8),
    "dp2 tp2 sp stage 3": zero(DIVIDE_ALL, TP2 | SP, M4),
    "dp2 pp2 stage 1": zero(ZERO_1, PP2, M8),
    "tp2 pp2 stage 1": zero(ZERO_1, TP2 | PP2, M4),
    "tp2 pp2 sp stage 1": zero(ZERO_1, TP2 | PP2 | SP, M4),
}


FAST = {
    "stage 1, separate documents",
    "stage 2, separate documents",
    "stage 3, everything on the CPU",
    "pp2 stage 1, separate documents, full recomputation",
    "stage 1 bf16",
}
"""Cases of two ranks that `make test` runs."""
LONG = {
    "stage 1, small buckets that overlap",
    "stage 2, full recomputation in host memory",
    "stage 3, small parameters whole",
    "stage 3, full recomputation",
    "stage 2 by a file",
    "tp2 stage 1",
    "tp2 sp stage 2",
    "pp2 stage 0",
    "pp2 stage 1 uneven",
    "tp2 stage 0 bf16",
    "pp2 stage 0 bf16",
    "stage 2 bf16",
    "pp2 stage 1 bf16",
    "llama tp2 stage 3",
    "bert stage 3",
    "t5 pp2 stage 1",
    "tp2 pp2 stage 1",
}
"""Cases that combine what others contain, which `make test-long` runs."""


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> list[dict[str, Result]]:
    return run_distributed(2, train_all, selected(TWO_RANKS, request))


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest) -> list[dict[str, Result]]:
    return run_distributed(4, train_all, selected(FOUR_RANKS, request))


@pytest.fixture(scope="module")
def serial() -> dict[str, Result]:
    return {}


@pytest.mark.parametrize("name", slow_unless(TWO_RANKS, FAST, LONG))
def test_two_deepspeed_ranks_match_the_native_serial_run(
    name: str, two_ranks: list[dict[str, Result]], serial: dict[str, Result]
) -> None:
    compare(TWO_RANKS[name], name, two_ranks, serial)


@pytest.mark.parametrize("name", slow_unless(FOUR_RANKS, set(), LONG))
def test_four_deepspeed_ranks_match_the_native_serial_run(
    name: str, four_ranks: list[dict[str, Result]], serial: dict[str, Result]
) -> None:
    compare(FOUR_RANKS[name], name, four_ranks, serial)
