"""Torch trace and memory timeline of some iterations, from every rank (`train.profile`).

profile/rank_0.json.gz               Chrome trace for ui.perfetto.dev and chrome://tracing
profile/rank_0_memory.json, .svg     allocated bytes over time, and resident bytes on a CPU
profile/rank_0_memory_snapshot.pickle   on a GPU only: each allocation with its stack, for torch's
                                        memory viewer

The timeline has the bytes that torch allocated on each device and the process's resident bytes.
"""

import gzip
import html
import json
import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megacore.artifact.files import replace_file, write_json
from megacore.checkpoint.collective import RankGroup, sees_first_directory, transfer_files
from megacore.checkpoint.format import FileRecord
from megacore.config.train import ProfileConfig
from megacore.errors import MegacoreError
from megacore.hardware import resident_memory
from megacore.observe.recorder import Recorder

FOLDER = "profile"
"""Name of the folder in the run directory."""
_SNAPSHOT_ENTRIES = 200_000
"""Number of the most recent GPU allocations and frees that a snapshot keeps."""
Points = list[tuple[int, int]]
"""Pairs of Unix time in nanoseconds and bytes."""
_PERIOD = 0.005
"""Seconds between two samples of the resident memory."""
_DEVICES = {0: "cpu", 1: "cuda"}
"""Names of device types, by torch's numbers of them."""
_KEPT_POINTS = 20_000
_DRAWN_POINTS = 1500
_WIDTH, _HEIGHT, _MARGIN = 900, 320, 60
_COLORS = ("#1f4e79", "#c8501e", "#4f8f5f", "#7a5fa0", "#7f9fbf")
_MB = 1e6


class IterationProfiler:
    """Profiler of the iterations in `train.profile` on this rank.

    Any failure becomes a warning. If a run resumes within the interval, profiling starts at the
    first iteration after the resume.
    """

    def __init__(
        self,
        config: ProfileConfig | None,
        run_directory: Path,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        """Create a profiler without starting it.

        Args:
            config: interval to profile; with None, all methods do nothing.
            run_directory: parent of the folder `profile`.
            device: device that this rank trains on.
            recorder: receiver of the event `profile` with every rank's files, or of a warning.
        """
        self._config = config
        self._directory = run_directory / FOLDER
        self._device = device
        self._recorder = recorder
        self._recording: _Recording | None = None
        self._problem = ""

    def before(self, iteration: int) -> None:
        """Start profiling when the interval begins."""
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
        """Stop profiling when the interval ends, and collect the files of all ranks."""
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
        except (MegacoreError, OSError) as error:  # raised on every rank
            self._recorder.warning(
                f"profiles of ranks on other machines stay there: {error}; training continues"
            )
        for rank, (_, problem) in enumerate(written):
            if problem:
                self._recorder.warning(f"rank {rank} has no profile: {problem}; training continues")
        files = [f"{FOLDER}/{name}" for names, _ in written for name in names]
        if files:
            self._recorder.event(
                "profile", iteration=iteration, first=config.first, last=config.last, files=files
            )

    def _bring(self, names: list[str], group: RankGroup) -> None:
        """Copy the files to the first rank from hosts that do not share the directory.

        Collective.
        """
        if not any(group.everywhere(lambda: names)):
            return
        visible = sees_first_directory(self._directory, group)
        records = group.everywhere(
            lambda: (
                {} if visible else {name: FileRecord.of(self._directory / name) for name in names}
            )
        )
        transfer_files(
            self._directory, None if visible else self._directory, records[group.rank], group
        )

    def close(self) -> None:
        """Discard a profile that the end of the run cut short."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with suppress(Exception):  # the error that ended the run matters more
                recording.stop()
            self._recorder.warning(
                "the run ended before train.profile.to: there is no profile of this attempt"
            )

    def _write(self, stem: str, last: int) -> tuple[list[str], str]:
        """Return the names of this rank's files and, if there are none, the reason."""
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
    """Profile in progress."""

    def __init__(self, device: torch.device, first: int) -> None:
        self._device, self._first = device, first
        self._cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._snapshot: Any = None
        self._range: Any = None
        self._resident = ResidentSampler()
        try:
            if self._cuda:
                torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
            self._profile.start()
        except BaseException:
            self._release()
            raise

    def begin(self, iteration: int) -> None:
        """Open a separate range in the trace for an iteration."""
        self._resident.mark(iteration)
        self._range = record_function(f"iteration {iteration}")
        self._range.__enter__()

    def end(self) -> None:
        """Close the iteration's range."""
        if self._range is not None:
            if self._cuda:
                torch.cuda.synchronize(self._device)
            self._range.__exit__(None, None, None)
            self._range = None

    def stop(self) -> None:
        """Stop recording, also if a part of it fails."""
        try:
            self.end()
            self._profile.stop()
            if self._cuda:
                self._snapshot = torch.cuda.memory._snapshot()
        finally:
            self._release()

    def _release(self) -> None:
        """End what would record, and take memory, for the rest of the run."""
        self._resident.stop()
        if self._cuda:
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
        replace_file(
            picture, timeline.picture(f"{stem}, iterations {self._first} to {last}").encode()
        )
        names = [trace.name, numbers.name, picture.name]
        if self._snapshot is not None:
            snapshot = directory / f"{stem}_memory_snapshot.pickle"
            replace_file(snapshot, pickle.dumps(self._snapshot))
            names.append(snapshot.name)
        return names


def _replace(temporary: Path, path: Path) -> None:
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


class ResidentSampler:
    """Sampler of the process's resident memory in a separate thread."""

    def __init__(self) -> None:
        self.points: Points = []
        self.marks: list[tuple[int, int]] = []
        """Unix time in nanoseconds and number of each iteration at its beginning."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resident-memory", daemon=True)
        if resident_memory() is not None:
            self._thread.start()

    def mark(self, iteration: int) -> None:
        """Record the beginning of an iteration."""
        self.marks.append((time.time_ns(), iteration))

    def stop(self) -> None:
        """Stop sampling."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.points.append((time.time_ns(), resident_memory() or 0))
            self._ended.wait(_PERIOD)


def read_allocations(trace: Mapping[str, Any]) -> dict[str, Points]:
    """Return the allocated bytes over time by device, from a Chrome trace of torch's profiler.

    On a CPU the count starts at the beginning of the profile; on a GPU it includes the whole
    process. The bytes reserved by a GPU's caching allocator are named `cuda:0 reserved`.
    """
    base = int(trace.get("baseTimeNanoseconds", 0))
    curves: dict[str, Points] = {}
    for event in trace["traceEvents"]:
        if event.get("name") != "[memory]":
            continue
        values = event["args"]
        kind = _DEVICES.get(values["Device Type"], f"device type {values['Device Type']}")
        device = kind if kind == "cpu" else f"{kind}:{values['Device Id']}"
        at = base + round(event["ts"] * 1000)
        curves.setdefault(f"{device} allocated", []).append((at, int(values["Total Allocated"])))
        if values["Total Reserved"]:
            curves.setdefault(f"{device} reserved", []).append((at, int(values["Total Reserved"])))
    return {name: sorted(curve) for name, curve in curves.items()}


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory curves on a common time axis."""

    start: int
    """Unix time in nanoseconds of the first point."""
    curves: Mapping[str, Points]
    marks: Sequence[tuple[int, int]]
    """Unix time in nanoseconds and number of each iteration at its beginning."""

    @classmethod
    def of(cls, allocations: Mapping[str, Points], resident: ResidentSampler) -> Self:
        """Build the timeline from a profile's allocations and resident memory."""
        curves = {**allocations, **({"resident": resident.points} if resident.points else {})}
        times = [points[0][0] for points in curves.values()] + [at for at, _ in resident.marks]
        return cls(min(times, default=0), curves, resident.marks)

    def values(self) -> dict[str, Any]:
        """Return JSON values: seconds since the start, bytes of each curve, iteration starts."""
        curves = {
            name: [[self._seconds(at), value] for at, value in thin_out(points, _KEPT_POINTS)]
            for name, points in self.curves.items()
        }
        return {
            "start": self.start / 1e9,
            "curves": curves,
            "peaks": {
                name: max(value for _, value in points) for name, points in self.curves.items()
            },
            "iterations": [[self._seconds(at), iteration] for at, iteration in self.marks],
        }

    def picture(self, title: str) -> str:
        """Return an SVG image with a line for each curve and a mark at each iteration's start."""
        end = max([self.start + 1, *(points[-1][0] for points in self.curves.values())])
        top = max([1, *(value for points in self.curves.values() for _, value in points)])

        def x(at: int) -> float:
            return _MARGIN + (_WIDTH - 2 * _MARGIN) * (at - self.start) / (end - self.start)

        def y(value: int) -> float:
            return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * max(value, 0) / top

        rows = [_text(_MARGIN, 20, title), _text(_MARGIN, 38, f"MB, at most {top / _MB:,.1f}")]
        rows += [_text(_WIDTH - _MARGIN, _HEIGHT - 40, f"{self._seconds(end):.3f} s", anchor="end")]
        rows.append(
            f'<path d="M{_MARGIN} {_MARGIN}V{_HEIGHT - _MARGIN}H{_WIDTH - _MARGIN}" class="axis"/>'
        )
        for at, iteration in self.marks:
            rows.append(f'<path d="M{x(at):.1f} {_MARGIN}V{_HEIGHT - _MARGIN}" class="mark"/>')
            rows.append(_text(x(at) + 3, _HEIGHT - _MARGIN + 14, str(iteration)))
        for number, (name, points) in enumerate(self.curves.items()):
            color = _COLORS[number % len(_COLORS)]
            line = " ".join(
                f"{x(at):.1f},{y(value):.1f}" for at, value in thin_out(points, _DRAWN_POINTS)
            )
            rows.append(
                f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.4"/>'
            )
            rows.append(_text(_MARGIN + 150 * number, _HEIGHT - 12, name, color=color))
        style = (
            "text{font:12px "
            "sans-serif}.axis{fill:none;stroke:#444}.mark{stroke:#bbb;stroke-dasharray:3}"
        )
        size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f"{size}><style>{style}</style>{''.join(rows)}</svg>\n"
        )

    def _seconds(self, at: int) -> float:
        return round((at - self.start) / 1e9, 6)


def thin_out(points: Points, most: int) -> Points:
    """Keep about `most` points: the highest of each stretch, so that peaks remain."""
    stride = -(-len(points) // most)
    return [
        max(points[at : at + stride], key=lambda point: point[1])
        for at in range(0, len(points), max(stride, 1))
    ]


def _text(x: float, y: float, content: str, *, color: str = "#222", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" '
        f'text-anchor="{anchor}">{html.escape(content)}</text>'
    )
