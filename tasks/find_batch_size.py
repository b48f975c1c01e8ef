"""Stage `find-batch-size`: the largest micro batch of each distribution.

One epoch is run at that size for each distribution, and a table compares them.
"""

import os
import shutil
from pathlib import Path
from typing import Any, Final

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from megacore.artifact import Artifact, StageKey, Workspace
from megacore.artifact.files import read_object, workspace_errors, write_json
from megacore.cluster.hosts.hardware import hardware_of
from megacore.config.finetune import Distribution, FinetuneConfig
from megacore.config.hostfile import hosts_of
from megacore.config.keys import key_parameters
from megacore.finetune.resolve import resolve_ranks
from megacore.hardware import Hardware, installed_version
from megacore.ranks.batch_size_search import (
    FIND_BATCH_SIZE_VERSION,
    Answer,
    Fits,
    Watch,
    as_markdown,
    check_methods,
    compare,
    gigabytes,
    method_config,
    notes,
    table_rows,
    train_seconds,
)
from tasks._cache import StageResult, artifact_directory, build, stage_task
from tasks._devices import devices
from tasks._logging import shown_in_prefect
from tasks._monitor import LogTail
from tasks._stage_runner import StageRunner

STAGE: Final = "find-batch-size"
REPORT = "report.json"
RUNS = "runs"
"""Name of the artifact's folder with the logs of each probe and the events of the epoch."""
_PACKAGES = ("torch", "accelerate", "transformers", "deepspeed")
"""Packages whose versions affect memory and time."""
_FIXED = {"train.micro_batch_size": 1, "train.num_epochs": 1, "train.max_steps": None}
"""Values that the search sets itself, so that the key does not depend on the configured micro
batch."""


def check_find_batch_size(config: FinetuneConfig) -> None:
    """Refuse, before anything runs, a method or a limit that this host does not support.

    Raises ConfigError.
    """
    check_methods(config, hardware_of(config.launch))


def find_batch_size_key(
    config: FinetuneConfig, method: Distribution, pretrained: Artifact, examples: Artifact
) -> StageKey:
    """Return the key of one method's row.

    It covers the host and all values that affect memory, time and metrics.
    """
    hardware = hardware_of(config.launch)
    ranks, threads = resolve_ranks(config, hardware)
    searched = method_config(config, method, 1)
    resolved: dict[str, Any] = {
        "method": method,
        **_FIXED,
        "precision": hardware.resolve_precision(config.train.precision),
        "ranks": [ranks, threads, *hosts_of(config.launch).values()],
        "machine": [*(gpu.name for gpu in hardware.gpus), hardware.cores, *_gigabytes(hardware)],
        "versions": {
            name: installed_version(name)
            for name in _PACKAGES
            if name != "deepspeed" or method.startswith("zero")
        },
    }
    parameters = key_parameters(searched, STAGE, resolved)
    parameters["search"] = list(parameters["search"].values())
    return StageKey.of(
        STAGE, FIND_BATCH_SIZE_VERSION, parameters, pretrained=pretrained, examples=examples
    )


def _gigabytes(hardware: Hardware) -> list[int]:
    """Return host memory and memory of each GPU in GB.

    They are rounded because the kernel's own share differs between boots.
    """
    return [
        round(count / 1e9) for count in (hardware.memory, *(gpu.memory for gpu in hardware.gpus))
    ]


@stage_task(STAGE, find_batch_size_key)
def find_batch_size(
    config: FinetuneConfig, method: Distribution, pretrained: Artifact, examples: Artifact
) -> StageResult:
    """Find one method's largest micro batch, and fine-tune for an epoch with it."""
    key = find_batch_size_key(config, method, pretrained, examples)

    def fill(directory: Path) -> dict[str, Any]:
        # After a failure, whose message names a log in this directory, it stays until the next
        # build or `megacore clean`.
        scratch = Workspace.of().folder(STAGE) / f"{key.key}.tmp-runs"
        with workspace_errors(scratch):
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        samples = examples.counts["train"]
        watch = _Watcher(method).watch
        with devices(config.launch, trains=True):
            report = compare(
                config,
                method,
                pretrained.path,
                examples.path,
                samples=samples,
                scratch=scratch,
                watch=watch,
            )
        os.rename(scratch, directory / RUNS)
        report = _moved(report, str(scratch), str(artifact_directory(key) / RUNS))
        write_json(directory / REPORT, report)
        return counts_of(report)

    return build(config, key, fill)


def _moved(value: Any, old: str, new: str) -> Any:
    """Return the values of a report with another directory in the paths of its messages."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {name: _moved(item, old, new) for name, item in value.items()}
    return [_moved(item, old, new) for item in value] if isinstance(value, list) else value


class _Watcher:
    """Logger of each probe's outcome and of the ranks' output."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._tail: LogTail | None = None
        self.watch = Watch(on_poll=self._poll, on_start=self._begin, on_answer=self._say)

    def _begin(self, log: Path) -> None:
        self._tail = LogTail(log, get_run_logger().debug)

    def _poll(self) -> None:
        if self._tail is not None:
            self._tail.poll()

    def _say(self, batch: int, answer: Answer) -> None:
        outcome = (
            f"fits, {gigabytes(answer.peak_memory)} GB"
            if isinstance(answer, Fits)
            else "is too large"
        )
        get_run_logger().info("%s: a micro batch of %d %s", self._method, batch, outcome)


def counts_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of the artifact."""
    epoch = report["epoch"]
    times = (
        {}
        if epoch is None
        else {"epoch_seconds": train_seconds(epoch), epoch["metric"]: epoch["value"]}
    )
    return {"method": report["method"], "batch": report["batch"], **times}


def find_batch_sizes(
    pipeline: StageRunner[FinetuneConfig], pretrained: Artifact, examples: Artifact
) -> None:
    """Compare the methods of `find_batch_size.methods`, one stage for each."""
    methods = pipeline.config.find_batch_size.methods
    found = [pipeline.stage(find_batch_size, method, pretrained, examples) for method in methods]
    pipeline.report(_show_comparison, *found)


def _show_comparison(config: FinetuneConfig, *found: Artifact) -> str:
    """Show the rows of all methods with the flow run; return the table and its notes."""
    reports = [read_object(artifact.directory / REPORT) for artifact in found]
    rows = table_rows(reports)
    summary = as_markdown(rows) + notes(reports)
    with shown_in_prefect("the table of batch sizes"):
        create_table_artifact(
            rows, key="batch-sizes", description=f"largest micro batches of {config.name}"
        )
        create_markdown_artifact(summary, key="batch-sizes-table", description=f"of {config.name}")
    return summary
