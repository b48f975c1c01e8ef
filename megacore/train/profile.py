"""`train.profile`: a torch trace and a timeline of memory of some iterations, from every rank.

profile/rank_0.json.gz               Chrome trace: ui.perfetto.dev and chrome://tracing show it
profile/rank_0_memory.json, .svg     what was allocated, and on a CPU what was resident
profile/rank_0_memory_snapshot.pickle   of a GPU alone: each allocation with its stack, as torch's viewer reads it
"""

import gzip
import json
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megacore.artifact.files import write_json
from megacore.checkpoint.bring import bring_files, sees_first
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import FileRecord
from megacore.config.train import ProfileConfig
from megacore.errors import MegacoreError
from megacore.observe.memory_timeline import MemoryTimeline, ResidentSampler, read_allocations
from megacore.observe.recorder import Recorder

FOLDER = "profile"
"""In the run directory."""
_SNAPSHOT_ENTRIES = 200_000
"""Allocations and frees of a GPU that a snapshot keeps, the last ones."""


class IterationProfiler:
    """Profiles the iterations of `train.profile` on this rank; whatever goes wrong is a warning and no more.

    An interval that a resumed run has partly behind it is profiled from where it goes on.
    """

    def __init__(
        self, config: ProfileConfig | None, run_directory: Path, device: torch.device, recorder: Recorder
    ) -> None:
        """Nothing is profiled yet.

        Args:
            config: the interval; None profiles nothing, and then no call does anything.
            run_directory: gets the folder `profile`.
            device: that this rank trains on.
            recorder: gets the event `profile` with every rank's files, or a warning.
        """
        self._config = config
        self._directory = run_directory / FOLDER
        self._device = device
        self._recorder = recorder
        self._recording: _Recording | None = None
        self._problem = ""

    def before(self, iteration: int) -> None:
        """Begin where the interval does."""
        config = self._config
        if config is None or not config.first <= iteration <= config.last:
            return
        if self._recording is None and not self._problem:
            try:
                self._recording = _Recording(self._device, iteration)
            except Exception as error:  # a profile must never end a training
                self._problem = f"{type(error).__name__}: {error}"
        if self._recording is not None:
            self._recording.begin(iteration)

    def after(self, iteration: int) -> None:
        """End where the interval does; all ranks wait for each other's files."""
        config = self._config
        if config is None or not config.first <= iteration <= config.last:
            return
        if self._recording is not None:
            self._recording.end()
        if iteration < config.last:
            return
        group = RankGroup(None)
        written = group.everywhere(lambda: self._write(f"rank_{group.rank}", iteration))
        try:
            self._bring(written[group.rank][0], group)
        except (MegacoreError, OSError) as error:  # on every rank
            self._recorder.warning(f"profiles of ranks on other machines stay there: {error}; training goes on")
        for rank, (_, problem) in enumerate(written):
            if problem:
                self._recorder.warning(f"rank {rank} has no profile: {problem}; training goes on")
        files = [f"{FOLDER}/{name}" for names, _ in written for name in names]
        if files:
            self._recorder.event("profile", iteration=iteration, first=config.first, last=config.last, files=files)

    def _bring(self, names: list[str], group: RankGroup) -> None:
        """Bring the files of ranks whose machines do not share the directory to the first rank. Collective."""
        if not any(group.everywhere(lambda: names)):
            return
        seen = sees_first(self._directory, group)
        records = group.everywhere(
            lambda: {} if seen else {name: FileRecord.of(self._directory / name) for name in names}
        )
        bring_files(self._directory, None if seen else self._directory, records[group.rank], group)

    def close(self) -> None:
        """Give up a profile that the run's end cut short."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with suppress(Exception):  # what ended the run matters more
                recording.stop()
            self._recorder.warning("the run ended before train.profile.to: there is no profile of this attempt")

    def _write(self, stem: str, last: int) -> tuple[list[str], str]:
        """Names of this rank's files, or why there are none."""
        recording, self._recording = self._recording, None
        if recording is None:
            return [], self._problem or "it began after the interval"
        try:
            recording.stop()
            self._directory.mkdir(parents=True, exist_ok=True)
            return recording.write(self._directory, stem, last), ""
        except Exception as error:  # a profile must never end a training
            return [], f"{type(error).__name__}: {error}"


class _Recording:
    """A profile under way."""

    def __init__(self, device: torch.device, first: int) -> None:
        self._device, self._first = device, first
        self._cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._snapshot: Any = None
        self._range: Any = None
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
        self._profile.start()
        self._resident = ResidentSampler()

    def begin(self, iteration: int) -> None:
        """A range of its own in the trace for each iteration."""
        self._resident.mark(iteration)
        self._range = record_function(f"iteration {iteration}")
        self._range.__enter__()

    def end(self) -> None:
        """Of that range."""
        if self._range is not None:
            if self._cuda:
                torch.cuda.synchronize(self._device)
            self._range.__exit__(None, None, None)
            self._range = None

    def stop(self) -> None:
        """Record nothing more."""
        self.end()
        self._profile.stop()
        self._resident.stop()
        if self._cuda:
            self._snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, directory: Path, stem: str, last: int) -> list[str]:
        """Write all files, each atomically, and return their names."""
        trace = directory / f"{stem}.json.gz"
        temporary = directory / f".{stem}.tmp-{os.getpid()}.json.gz"
        try:
            self._profile.export_chrome_trace(str(temporary))
            with gzip.open(temporary) as file:
                events = json.load(file)
            _replace(temporary, trace)
        finally:
            temporary.unlink(missing_ok=True)
        timeline = MemoryTimeline.of(read_allocations(events), self._resident)
        numbers, picture = directory / f"{stem}_memory.json", directory / f"{stem}_memory.svg"
        write_json(numbers, {"from": self._first, "to": last, **timeline.values()})
        _write_bytes(picture, timeline.picture(f"{stem}, iterations {self._first} to {last}").encode())
        names = [trace.name, numbers.name, picture.name]
        if self._snapshot is not None:
            snapshot = directory / f"{stem}_memory_snapshot.pickle"
            _write_bytes(snapshot, pickle.dumps(self._snapshot))
            names.append(snapshot.name)
        return names


def _write_bytes(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        _replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _replace(temporary: Path, path: Path) -> None:
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
