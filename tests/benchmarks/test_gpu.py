"""Benchmark of one GPU: figures so far are kept, and only missing parts are measured."""

import argparse
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import gpu
from benchmarks._entrants import CASES, OUT_OF_MEMORY, Work
from benchmarks._gpu_figures import Part, Results, Row, load, report
from benchmarks._turns import Contestant
from benchmarks._verdict import Check
from tests._limits import HANG

SMOKE = argparse.Namespace(
    smoke=True, micro_batches=[8], contest_micro_batch=None, nanogpt=None, parts=list(gpu.PARTS)
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace all parts by ones that only note their names, which are returned."""
    names: list[str] = []

    def part(name: str, bench: gpu.Bench) -> Part:
        names.append(name)
        row = Row.of(f"row of {name}", CASES["smoke-bf16"], 0.5, 12.0)
        return Part([row], [Check(name, 1.0, 0.5)])

    for name in gpu.PARTS:
        monkeypatch.setitem(gpu.PARTS, name, partial(part, name))
    return names


def test_a_part_is_measured_once_in_a_setting(tmp_path: Path, measured: list[str]) -> None:
    path, bench = tmp_path / "gpu.json", gpu.Bench(SMOKE)
    results = load(path, "one GPU", lambda: 2.0)
    assert gpu.run(bench, results, ["llama", "fp16"], path) == {}
    again = load(path, "one GPU", lambda: 3.0)
    assert again == results
    gpu.run(bench, again, ["llama", "sweep", "fp16"], path)
    assert measured == ["llama", "fp16", "sweep"]
    assert load(path, "another GPU", lambda: 3.0) == Results("another GPU", 3.0)


def test_a_rate_that_was_not_measured_is_measured_again(
    tmp_path: Path, measured: list[str]
) -> None:
    path = tmp_path / "gpu.json"
    results = load(path, "one GPU", lambda: float("nan"))
    gpu.run(gpu.Bench(SMOKE), results, ["llama"], path)
    assert "| nan% |" in report(results, gpu.PARTS, None)
    again = load(path, "one GPU", lambda: 2.0)
    assert (again.matmul, list(again.parts)) == (2.0, ["llama"])


def test_parts_for_which_time_is_short_are_left(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    path = tmp_path / "gpu.json"
    missing = gpu.run(gpu.Bench(SMOKE), Results("one GPU", 1.0), list(gpu.PARTS), path)
    assert measured
    assert list(missing) == list(gpu.PARTS)[len(measured) :]
    assert set(missing.values()) == {"the time did not suffice"}
    assert list(load(path, "one GPU", lambda: 0.0).parts) == sorted(measured)


def test_all_figures_are_in_one_table(tmp_path: Path, measured: list[str]) -> None:
    results = Results("one GPU", 2.0)
    gpu.run(gpu.Bench(SMOKE), results, list(gpu.PARTS), tmp_path / "gpu.json")
    text = report(results, gpu.PARTS, None)
    assert text.count("| row of ") == len(gpu.PARTS)
    assert "| 500.00 | 128 | - |" in text


def test_the_largest_micro_batch_is_between_the_last_that_fits_and_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(name: str, work: object) -> Row:
        size = int(name.split()[-1])
        return Row(name, tokens=1.0 if size <= 21 else None, teraflops=float(size))

    bench = gpu.Bench(SMOKE)
    bench.micro_batches = [8, 16, 32, 64]
    monkeypatch.setattr(bench, "measured", measured)
    rows = {int(row.name.split()[-1]): row.tokens for row in gpu.sweep(bench).rows}
    assert rows == {8: 1.0, 16: 1.0, 32: None, 24: None, 20: 1.0, 22: None}


def test_cuda_graphs_are_measured_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def measured(name: str, work: Work, **_: int) -> Row:
        graphs.append(work.config().train.cuda_graphs)
        return Row(name, milliseconds=2.0 if graphs[-1] else 3.0)

    bench = gpu.Bench(SMOKE)
    monkeypatch.setattr(bench, "measured", measured)
    assert {row.note for row in gpu.graphs(bench).rows[1::2]} == {"needs a GPU"}
    assert not any(graphs)
    graphs.clear()
    bench.smoke = False
    part = gpu.graphs(bench)
    assert graphs == [False, True] * 3
    assert [row.ratio for row in part.rows] == [None, 1.5] * 3
    assert [check.value for check in part.checks] == [1.5] * 3


def test_a_part_that_fails_or_waits_too_long_loses_only_its_own_figures(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: gpu.Bench) -> Part:
        raise SystemExit("contestant 'megacore' ended: its error is above")

    def waits(_: gpu.Bench) -> Part:
        reader, _ = os.pipe()
        os.read(reader, 1)
        raise AssertionError("nothing was written")

    monkeypatch.setitem(gpu.PARTS, "contest", fails)
    monkeypatch.setitem(gpu.PARTS, "llama", waits)
    monkeypatch.setattr(gpu, "LONGEST", 0.5)
    path = tmp_path / "gpu.json"
    results = Results("one GPU", 1.0)
    missing = gpu.run(gpu.Bench(SMOKE), results, ["contest", "llama", "sweep"], path)
    assert missing == {
        "contest": "contestant 'megacore' ended: its error is above",
        "llama": "it was ended after 0.5 s",
    }
    assert measured == ["sweep"]
    assert list(load(path, "one GPU", lambda: 0.0).parts) == ["sweep"]


class Scripted(Contestant):
    """A contestant whose steps take 2 s and whose losses are given."""

    started: ClassVar[list[str]] = []
    losses: ClassVar[dict[str, list[float]]] = {}

    def send(self, command: str) -> None:
        self.command = command.split()[0]

    def answer(self) -> list[dict[str, Any]]:
        first = CASES["smoke-bf16"].first_loss
        self.last = [
            {
                "seconds": 2.0,
                "memory_mb": 5.0,
                "kernels": {},
                "losses": self.losses.get(self.name, [first, 6.0, 5.9]),
            }
        ]
        return self.last


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """Start scripted contestants, whose names are noted, instead of processes."""
    monkeypatch.setattr(Scripted, "started", [])
    monkeypatch.setattr(Scripted, "losses", {})

    def start(name: str, _: Work) -> Contestant:
        Scripted.started.append(name)
        return Scripted(name, [])

    monkeypatch.setattr(gpu, "start", start)
    return Scripted


def test_other_losses_are_a_missed_goal_beside_the_figures(scripted: type[Scripted]) -> None:
    assert [check.met for check in gpu.contest(gpu.Bench(SMOKE)).checks] == [True] * 4
    for others in ([6.3, 6.0, 5.8], [9.0, 6.0, 5.9], [float("nan")] * 3):
        scripted.losses = {gpu.FSDP2: others}
        part = gpu.contest(gpu.Bench(SMOKE))
        assert [row.milliseconds for row in part.rows] == [2000.0] * 4
        assert [check.met for check in part.checks] == [False, True, True, True]


def test_a_task_is_measured_once_for_all_parts_and_kept_if_its_part_fails(
    tmp_path: Path, scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: gpu.Bench) -> Part:
        bench.measured("345M, micro batch 2", bench.work())
        raise gpu.ProcessEndedError("it ended")

    monkeypatch.setitem(gpu.PARTS, "sweep", fails)
    path, results = tmp_path / "gpu.json", Results("one GPU", 1.0)
    assert gpu.run(gpu.Bench(SMOKE), results, ["sweep"], path) == {"sweep": "it ended"}
    assert len(scripted.started) == 1
    again = load(path, "one GPU", lambda: 0.0)
    assert "| 345M, micro batch 2 | 2,000.00 |" in report(again, gpu.PARTS, None)
    assert gpu.run(gpu.Bench(SMOKE), again, ["recompute"], path) == {}
    assert len(scripted.started) == 3  # only selective and full
    assert "| 345M, recompute none | 2,000.00 |" in report(again, gpu.PARTS, None)


def test_contestants_that_do_not_fit_together_are_reported_as_such(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str, _: Work) -> Contestant:
        command = [sys.executable, "-c", f"raise SystemExit({OUT_OF_MEMORY})"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return Contestant(name, [subprocess.Popen(command, **pipes)])

    monkeypatch.setattr(gpu, "start", full)
    with pytest.raises(gpu.DeviceFullError, match="smaller --contest-micro-batch"):
        gpu.llama(gpu.Bench(SMOKE))
    assert gpu.Bench(SMOKE).measured("345M", gpu.Bench(SMOKE).work()).note == "does not fit"


@pytest.mark.parametrize(("gigabytes", "expected"), [(150, 8), (85, 4)])
def test_contestants_in_turns_have_micro_batches_that_fit_together(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, expected: int
) -> None:
    properties = SimpleNamespace(total_memory=gigabytes * 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    options = argparse.Namespace(**(vars(SMOKE) | {"smoke": False}))
    assert gpu.Bench(options).contest_batch == expected


def test_the_result_of_a_process_of_its_own_is_returned() -> None:
    assert gpu._isolated(os.path.join, "a", "b") == "a/b"
    with pytest.raises(gpu.ProcessEndedError, match="_exit ended"):
        gpu._isolated(os._exit, 1)


@pytest.mark.parametrize("fails", ["pytest", "benchmarks.gpu"])
def test_make_runs_the_tests_that_need_a_gpu_and_then_the_benchmark(
    tmp_path: Path, fails: str
) -> None:
    """Failed tests do not keep the benchmark from running, and their status is that of make."""
    python, root = tmp_path / "bin" / "python", Path(__file__).parents[2]
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@"\n[ "$2" != {fails} ]\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    command = ["make", "-C", str(root), "gpu", f"VENV={tmp_path}", "ARGS=--parts sweep"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode != 0
    tests, benchmark = (line for line in done.stdout.splitlines() if line.startswith("-m"))
    assert "tests/kernels/test_flex.py" in tests
    assert all((root / word).exists() for word in tests.split() if word.endswith(".py"))
    assert benchmark == "-m benchmarks.gpu --parts sweep"
