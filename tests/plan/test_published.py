"""Predictions against Megatron-LM's published tables, of which no run was used for a fit."""

import statistics

import pytest

from megacore.plan.table import iteration_of, predict_row

TABLE_1 = (
    (24, 2304, 24, 1, 1, 1, 32, 16, 512, 137),
    (30, 3072, 32, 2, 1, 1, 64, 16, 512, 138),
    (36, 4096, 32, 4, 1, 1, 128, 16, 512, 142),
    (40, 6144, 48, 8, 1, 1, 256, 8, 1024, 135),
    (48, 8192, 64, 8, 2, 1, 512, 4, 1536, 138),
    (60, 10240, 80, 8, 4, 3, 1024, 2, 1792, 140),
    (80, 12288, 96, 8, 8, 2, 1536, 2, 2304, 148),
    (96, 16384, 128, 8, 16, 2, 1920, 1, 2160, 155),
    (105, 20480, 128, 8, 35, 3, 2520, 1, 2520, 163),
    (128, 25600, 160, 8, 64, 1, 3072, 1, 3072, 163),
)
"""Narayanan et al. 2021 (arXiv:2104.04473), table 1: layers, hidden size, heads, tensor, pipeline
and virtual pipeline size, GPUs, micro batch, batch, TFLOP/s of a GPU. Micro batches and virtual
stages are those of examples/academic_paper_scripts/sc21/run_table_1.sh in NVIDIA/Megatron-LM."""
TABLE_5 = (
    (48, 6144, 64, 8, 1, 1, 8, 4, 4, 1.42, 1.10),
    (96, 12288, 96, 8, 8, 3, 64, 1, 64, 18.13, 13.75),
    (105, 20480, 128, 8, 35, 3, 280, 1, 280, 49.05, 37.83),
    (128, 25600, 160, 8, 64, 1, 512, 1, 512, 94.42, 71.49),
)
"""Korthikanti et al. 2022 (arXiv:2205.05198), table 5: the same columns, then seconds with full
recomputation, and with selective recomputation and sequence parallelism."""
COLUMNS = (
    *("layers", "hidden", "heads", "tp", "pp", "vpp"),
    *("gpus", "micro_batch", "global_batch"),
)
LENGTH, VOCABULARY = 2048, 51_200


def row(values: tuple[int, ...], **more: str) -> dict[str, str]:
    named = {name: str(value) for name, value in zip(COLUMNS, values, strict=True)}
    common = {"gpu": "a100-80gb", "seq": str(LENGTH), "vocab": str(VOCABULARY)}
    return named | common | {"precision": "fp16", "recompute": "full"} | more


def published() -> list[tuple[dict[str, str], float]]:
    """Return rows with their seconds."""
    runs = []
    for *sizes, tflops in TABLE_1:
        layers, hidden, *_, gpus, _, batch = sizes
        # the paper's operations of an iteration, with recomputation
        operations = 96 * batch * LENGTH * layers * hidden**2
        operations *= 1 + LENGTH / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
        runs.append((row(tuple(sizes)), operations / (tflops * 1e12 * gpus)))
    for *sizes, full, selective in TABLE_5:
        runs.append((row(tuple(map(int, sizes))), full))
        lighter = row(tuple(map(int, sizes)), recompute="selective", seq_parallel="1")
        runs.append((lighter, selective))
    return runs


def test_the_mean_error_of_megatrons_tables_is_small() -> None:
    errors = [iteration_of(run).predict().seconds / seconds - 1 for run, seconds in published()]
    assert statistics.mean(map(abs, errors)) < 0.05
    assert max(map(abs, errors)) < 0.12


def test_all_runs_of_megatrons_tables_fit_in_memory() -> None:
    assert {predict_row(run)["predicted_fits"] for run, _ in published()} == {"yes"}


@pytest.mark.parametrize("index", range(len(TABLE_5)))
def test_selective_recomputation_is_as_much_faster_as_published(index: int) -> None:
    *sizes, full, selective = TABLE_5[index]
    runs = row(tuple(map(int, sizes))), row(tuple(map(int, sizes)), recompute="selective")
    before, after = (
        iteration_of(run).predict().seconds for run in (runs[0], runs[1] | {"seq_parallel": "1"})
    )
    assert after / before == pytest.approx(selective / full, rel=0.06)
