"""Tests of the log lines in Megatron-LM's format."""

import dataclasses
import logging
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from megacore.observe.logging import (
    MemoryUse,
    StepReport,
    configure_logging,
    counted,
    memory_line,
    memory_logger,
    perplexity,
    perplexity_line,
    setup_lines,
    short_number,
    step_line,
    time_line,
    validation_line,
)

ROOT = Path(__file__).parents[2]
REPORT = StepReport(
    iteration=100,
    train_iters=500000,
    consumed_samples=6400,
    consumed_tokens=6553600,
    ms_per_iteration=343.21,
    lr=3.984375e-6,
    global_batch_size=64,
    seq_length=1024,
    lm_loss=9.44,
    loss_scale=262144.0,
    grad_norm=2.5,
    skipped_iterations=15,
    nan_iterations=0,
    interval_iterations=1,
    samples_per_second=186.5,
    tokens_per_second=190955.1,
    tokens_per_second_per_rank=47738.775,
    tflops=70.0,
    model_tflops=52.5,
    mfu=0.1683,
    mfu_measured=0.21,
    exposed_communication_ms=12.34,
    memory_mb=31000.0,
)


def test_step_line_has_megatrons_format() -> None:
    assert step_line(REPORT, datetime(2026, 1, 2, 3, 4, 5)) == (
        " [2026-01-02 03:04:05] iteration      100/  500000 | consumed samples:         6400 | "
        "elapsed time per iteration (ms): 343.2 | throughput per GPU (TFLOP/s/GPU): 52.500 | "
        "learning rate: 3.984375E-06 | global batch size:    64 | lm loss: 9.440000E+00 | "
        "loss scale: 262144.0 | grad norm: 2.500 | number of skipped iterations:  15 | "
        "number of nan iterations:   0 | consumed tokens:      6553600 | actual seqlen:  1024 | "
        "samples per second: 186.500 | tokens per gpu per second (tgs): 47738.775 | "
        "TFLOPs: 70.000 | tokens/s: 190955 | MFU: 16.8% of the vendor's peak, 21.0% of measured "
        "matmuls | exposed communication (ms): 12.3 | memory (MB): 31000 |"
    )


def test_step_line_shows_only_known_mfus() -> None:
    measured = dataclasses.replace(REPORT, mfu=None)
    assert "| MFU: 21.0% of measured matmuls |" in step_line(measured)
    unknown = dataclasses.replace(measured, mfu_measured=None)
    assert "| MFU: unknown |" in step_line(unknown)


def test_validation_line_has_the_value_of_each_loss() -> None:
    line = (
        " validation loss at iteration 1000 | lm loss value: 5.298317E+00 | lm loss PPL: "
        "2.000000E+02 | "
    )
    assert validation_line(1000, {"lm_loss": math.log(200.0)}) == line
    both = {"lm_loss": math.log(200.0), "sop_loss": 0.5}
    assert validation_line(1000, both) == f"{line}sop loss value: 5.000000E-01 | "


def test_further_losses_follow_the_first_in_line_and_event() -> None:
    report = dataclasses.replace(REPORT, further_losses={"nsp_loss": 0.25})
    assert (
        " | lm loss: 9.440000E+00 | nsp loss: 2.500000E-01 | loss scale: 262144.0 | "
        in step_line(report)
    )
    assert report.event == {**REPORT.event, "nsp_loss": 0.25}
    assert set(REPORT.event) == {field.name for field in dataclasses.fields(StepReport)} - {
        "further_losses",
        "by_source",
    }


def test_perplexity_of_a_huge_loss_is_infinite() -> None:
    assert perplexity(1e4) == math.inf


def test_time_line_lists_the_phases_in_milliseconds() -> None:
    assert time_line({"data": 1.0, "update": 2.25}) == "time (ms) | data: 1.0 | update: 2.2"


def test_memory_line_says_if_the_memory_is_that_of_the_process() -> None:
    line = "[Rank 3] (after 10 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.50 | "
    line += "reserved: 3.00 | max reserved: 4.00"
    assert memory_line(3, 10, MemoryUse(1.0, 2.5, 3.0, 4.0)) == line
    resident = memory_line(3, 10, MemoryUse(1.0, 2.5, 3.0, 4.0, resident=True))
    assert resident == f"{line} | all: resident memory of the process"


def test_setup_lines_have_the_shortest_and_longest_time_of_the_ranks() -> None:
    assert setup_lines([{"model": 2.0, "data": 30.0}, {"model": 1.25, "data": 40.0}]) == (
        "(min, max) time across ranks (ms):\n"
        f"    model {42 * '.'}: (1.25, 2.00)\n"
        f"    data {43 * '.'}: (30.00, 40.00)"
    )


@pytest.fixture
def library_logger() -> Iterator[logging.Logger]:
    """Provide megacore's logger and restore its settings after the test."""
    logger = logging.getLogger("megacore")
    settings = (logger.handlers, logger.level, logger.propagate)
    memory_level = memory_logger.level
    yield logger
    logger.handlers, logger.level, logger.propagate = settings
    memory_logger.setLevel(memory_level)


def test_rank_0_logs_information_and_other_ranks_only_warnings(
    library_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        configure_logging(rank)
        logging.getLogger("megacore.train.loop").info("info of %d", rank)
        logging.getLogger("megacore.checkpoint.format").warning("warning of %d", rank)
        memory_logger.info("memory of %d", rank)
    assert capsys.readouterr().out == (
        "info of 0\nwarning of 0\nmemory of 0\nrank 1: warning of 1\nrank 1: memory of 1\n"
    )


def test_characters_that_a_terminal_lacks_are_printed_as_escapes() -> None:
    program = (
        "from megacore.observe.logging import prepare_output; prepare_output(); print('a日本')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert result.stdout == "a\\u65e5\\u672c\n"


def test_closed_streams_are_opened_before_a_file_takes_their_number() -> None:
    program = (
        "from megacore.observe.logging import prepare_output; prepare_output(); import os, sys; "
        "print('lost'); sys.stderr.write('lost'); sys.exit(os.open('/dev/null', os.O_RDONLY))"
    )
    command = f'exec {shlex.quote(sys.executable)} -c "$PROGRAM" <&- >&- 2>&-'
    result = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"PROGRAM": program, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode > 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_one_sentence(unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", "from megacore.cli import main; main()", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert result.stderr == (
        "error: standard output cannot be written (No space left on device): direct it to another "
        "place\n"
    )
    assert result.returncode == 1


def test_digits_of_a_diverged_measure_are_not_shown() -> None:
    assert [short_number(value) for value in (99.875, 999_999.0)] == ["99.88", "999999.00"]
    assert short_number(12_345.678, ",.4f") == "12,345.6780"
    assert short_number(3.05e51) == "3.05e+51"
    assert short_number(3.05e51, ",.4f") == "3.0500e+51"
    assert [short_number(value) for value in (math.inf, math.nan)] == ["inf", "nan"]
    line = perplexity_line(10, 118.0, samples=1, seconds=1.0)
    assert "valid_ppl at iteration 10: 1.7650e+51 | valid_loss: 1.180000E+02" in line


def test_one_is_counted_in_the_singular() -> None:
    assert [counted(n, "token") for n in (0, 1, 1204)] == ["0 tokens", "1 token", "1,204 tokens"]
