"""Benchmark of one GPU: figures so far are kept, and only missing parts are measured."""

import argparse
from functools import partial
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks._entrants import CASES, Work
from benchmarks._verdict import Check

SMOKE = argparse.Namespace(
    smoke=True, micro_batches=[8], contest_micro_batch=16, nanogpt=None, parts=list(gpu.PARTS)
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace all parts by ones that only note their names, which are returned."""
    names: list[str] = []

    def part(name: str, bench: gpu.Bench) -> gpu.Part:
        names.append(name)
        row = gpu.Row.of(f"row of {name}", CASES["smoke-bf16"], 0.5, 12.0)
        return gpu.Part([row], [Check(name, 1.0, 0.5)])

    for name in gpu.PARTS:
        monkeypatch.setitem(gpu.PARTS, name, partial(part, name))
    return names


def test_a_part_is_measured_once_in_a_setting(tmp_path: Path, measured: list[str]) -> None:
    path, bench = tmp_path / "gpu.json", gpu.Bench(SMOKE)
    results = gpu.load(path, "one GPU", lambda: 2.0)
    assert gpu.run(bench, results, ["llama", "fp16"], path) == []
    again = gpu.load(path, "one GPU", lambda: 3.0)
    assert again == results
    gpu.run(bench, again, ["llama", "sweep", "fp16"], path)
    assert measured == ["llama", "fp16", "sweep"]
    assert gpu.load(path, "another GPU", lambda: 3.0) == gpu.Results("another GPU", 3.0)


def test_parts_for_which_time_is_short_are_left(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: float(next(clock)))
    path = tmp_path / "gpu.json"
    left = gpu.run(gpu.Bench(SMOKE), gpu.Results("one GPU", 1.0), list(gpu.PARTS), path)
    assert measured
    assert left == list(gpu.PARTS)[len(measured) :]
    assert left
    assert list(gpu.load(path, "one GPU", lambda: 0.0).parts) == sorted(measured)


def test_all_figures_are_in_one_table(tmp_path: Path, measured: list[str]) -> None:
    results = gpu.Results("one GPU", 2.0)
    gpu.run(gpu.Bench(SMOKE), results, list(gpu.PARTS), tmp_path / "gpu.json")
    text = gpu.report(results)
    assert text.count("| row of ") == len(gpu.PARTS)
    assert "| 500.00 | 128 | - |" in text


def test_the_largest_micro_batch_is_between_the_last_that_fits_and_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(name: str, work: object) -> gpu.Row:
        size = int(name.split()[-1])
        return gpu.Row(name, tokens=1.0 if size <= 21 else None, teraflops=float(size))

    bench = gpu.Bench(SMOKE)
    bench.micro_batches = [8, 16, 32, 64]
    monkeypatch.setattr(bench, "measured", measured)
    rows = {int(row.name.split()[-1]): row.tokens for row in gpu.sweep(bench).rows}
    assert rows == {8: 1.0, 16: 1.0, 32: None, 24: None, 20: 1.0, 22: None}


def test_cuda_graphs_are_measured_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def measured(name: str, work: Work, **_: int) -> gpu.Row:
        graphs.append(work.config().train.cuda_graphs)
        return gpu.Row(name, milliseconds=2.0 if graphs[-1] else 3.0)

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
