"""Iterations on fake GPUs: waits, copies from the host, timer events and communication."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pytest

from tests.gpu_emulated.step import Case, Communication, Record

_SHORT = {"model.num_layers": 2, "train.compile": "off"}
_LAYOUT = {
    "parallel.tensor_model_parallel_size": 2,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.sequence_parallel": True,
    "launch.nproc_per_node": 8,
    "model.num_layers": 4,
    "train.compile": "off",
    "train.micro_batch_size": 1,
    "train.global_batch_size": 8,
}
CASES = {
    "gpt2-tiny": Case("gpt2-tiny", overrides=_SHORT),
    "gpt2-345m": Case("gpt2-345m", overrides={**_SHORT, "train.global_batch_size": 8}),
    "bert-345m": Case(
        "bert-345m",
        overrides={**_SHORT, "train.global_batch_size": 8, "train.micro_batch_size": 4},
    ),
    "t5-tiny": Case("t5-tiny", overrides=_SHORT),
    "llama-1b": Case(
        "llama-1b",
        rank=3,
        world_size=8,
        vocab_size=32000,
        overrides={**_SHORT, "train.micro_batch_size": 1, "train.global_batch_size": 16},
    ),
}
LAYOUT = {
    f"rank {rank}": Case("gpt2-345m", rank=rank, world_size=8, overrides=_LAYOUT)
    for rank in range(8)
}


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    """Return the record of each case. An iteration that fails has its traceback in the error."""
    cases = {**CASES, **LAYOUT}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_emulated.step"],
        input="".join(json.dumps(asdict(case)) + "\n" for case in cases.values()),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert not errors, errors[0]
    return {name: Record.of(answer["record"]) for name, answer in zip(cases, answers, strict=True)}


@pytest.mark.parametrize("name", [*CASES, *LAYOUT])
def test_an_iteration_waits_once_for_the_gpu(records: dict[str, Record], name: str) -> None:
    record = records[name]
    assert len(record.synchronizations) == 1, record.synchronizations
    assert record.copies == []  # from the host, for which it would wait
    assert record.events == 0  # those of the iteration before are used again


@pytest.mark.parametrize("name", ["gpt2-tiny", "gpt2-345m", "llama-1b", "rank 0"])
def test_attention_is_fused(records: dict[str, Record], name: str) -> None:
    assert set(records[name].attention) == {
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_backward.default",
    }


def test_ranks_of_a_group_communicate_in_the_same_order(records: dict[str, Record]) -> None:
    """NCCL would hang otherwise."""
    by_group: dict[str, dict[int, list[Any]]] = defaultdict(dict)
    for rank in range(8):
        for call in records[f"rank {rank}"].communication:
            if call.peer is None:
                calls = by_group[f"{call.group} {call.ranks}"].setdefault(rank, [])
                calls.append((call.operation, call.tensors))
    assert len(by_group) >= 4
    for group, calls_of_rank in by_group.items():
        assert len({json.dumps(calls) for calls in calls_of_rank.values()}) == 1, group


def test_messages_are_received_in_the_order_in_which_they_are_sent(
    records: dict[str, Record],
) -> None:
    sent, received = defaultdict(list), defaultdict(list)
    for rank in range(8):
        for call in _messages(records[f"rank {rank}"].communication):
            if call.operation == "send":
                sent[call.group, rank, call.peer].append(call.tensors)
            else:
                received[call.group, call.peer, rank].append(call.tensors)
    assert sent
    assert sent == received


def _messages(calls: Iterable[Communication]) -> Iterable[Communication]:
    return (call for call in calls if call.peer is not None)
