"""Memory over the time of a profile: what torch allocated on each device, and what of the process was resident."""

import html
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

Points = list[tuple[int, int]]
"""Unix time in nanoseconds, bytes."""

_STATM = Path("/proc/self/statm")
_PERIOD = 0.005
"""Seconds between two looks at the resident memory."""
_DEVICES = {0: "cpu", 1: "cuda"}
"""By torch's number of a type of device."""
_KEPT_POINTS = 20_000
_DRAWN_POINTS = 1500
_WIDTH, _HEIGHT, _MARGIN = 900, 320, 60
_COLORS = ("#1f4e79", "#c8501e", "#4f8f5f", "#7a5fa0", "#7f9fbf")
_MB = 1e6


class ResidentSampler:
    """Looks at the process's resident memory in a thread of its own, from its making until it is stopped."""

    def __init__(self) -> None:
        self.points: Points = []
        self.marks: list[tuple[int, int]] = []
        """Unix time in nanoseconds and number of each iteration's beginning."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resident-memory", daemon=True)
        if _STATM.exists():  # elsewhere than on Linux nothing tells
            self._thread.start()

    def mark(self, iteration: int) -> None:
        """Note that an iteration begins."""
        self.marks.append((time.time_ns(), iteration))

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._ended.is_set():
            self.points.append((time.time_ns(), int(_STATM.read_text().split()[1]) * page))
            self._ended.wait(_PERIOD)


def read_allocations(trace: Mapping[str, Any]) -> dict[str, Points]:
    """Bytes allocated over time by device, from a Chrome trace of torch's profiler with memory.

    On a CPU they count from where the profile began, on a GPU all of the process. What a GPU's caching allocator
    reserves is `cuda:0 reserved`.
    """
    base = int(trace.get("baseTimeNanoseconds", 0))
    found: dict[str, Points] = {}
    for event in trace["traceEvents"]:
        if event.get("name") != "[memory]":
            continue
        values = event["args"]
        kind = _DEVICES.get(values["Device Type"], f"device type {values['Device Type']}")
        device = kind if kind == "cpu" else f"{kind}:{values['Device Id']}"
        at = base + round(event["ts"] * 1000)
        found.setdefault(f"{device} allocated", []).append((at, int(values["Total Allocated"])))
        if values["Total Reserved"]:
            found.setdefault(f"{device} reserved", []).append((at, int(values["Total Reserved"])))
    return {name: sorted(points) for name, points in found.items()}


@dataclass(frozen=True)
class MemoryTimeline:
    """Curves on one axis of time."""

    start: int
    """Unix time in nanoseconds of the first point."""
    curves: Mapping[str, Points]
    marks: Sequence[tuple[int, int]]
    """Time and number of each iteration's beginning."""

    @classmethod
    def of(cls, allocations: Mapping[str, Points], resident: ResidentSampler) -> Self:
        """Both accounts of a profile."""
        curves = {**allocations, **({"resident": resident.points} if resident.points else {})}
        times = [points[0][0] for points in curves.values()] + [at for at, _ in resident.marks]
        return cls(min(times, default=0), curves, resident.marks)

    def values(self) -> dict[str, Any]:
        """As JSON: seconds since the start and bytes of each curve, and where the iterations begin."""
        curves = {
            name: [[self._seconds(at), value] for at, value in thinned(points, _KEPT_POINTS)]
            for name, points in self.curves.items()
        }
        return {
            "start": self.start / 1e9,
            "curves": curves,
            "peaks": {name: max(value for _, value in points) for name, points in self.curves.items()},
            "iterations": [[self._seconds(at), iteration] for at, iteration in self.marks],
        }

    def picture(self, title: str) -> str:
        """As SVG: a line for each curve, a mark at each iteration's beginning."""
        end = max([self.start + 1, *(points[-1][0] for points in self.curves.values())])
        top = max([1, *(value for points in self.curves.values() for _, value in points)])

        def x(at: int) -> float:
            return _MARGIN + (_WIDTH - 2 * _MARGIN) * (at - self.start) / (end - self.start)

        def y(value: int) -> float:
            return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * max(value, 0) / top

        rows = [_text(_MARGIN, 20, title), _text(_MARGIN, 38, f"MB, at most {top / _MB:,.1f}")]
        rows += [_text(_WIDTH - _MARGIN, _HEIGHT - 40, f"{self._seconds(end):.3f} s", anchor="end")]
        rows.append(f'<path d="M{_MARGIN} {_MARGIN}V{_HEIGHT - _MARGIN}H{_WIDTH - _MARGIN}" class="axis"/>')
        for at, iteration in self.marks:
            rows.append(f'<path d="M{x(at):.1f} {_MARGIN}V{_HEIGHT - _MARGIN}" class="mark"/>')
            rows.append(_text(x(at) + 3, _HEIGHT - _MARGIN + 14, str(iteration)))
        for number, (name, points) in enumerate(self.curves.items()):
            color = _COLORS[number % len(_COLORS)]
            line = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in thinned(points, _DRAWN_POINTS))
            rows.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.4"/>')
            rows.append(_text(_MARGIN + 150 * number, _HEIGHT - 12, name, color=color))
        style = "text{font:12px sans-serif}.axis{fill:none;stroke:#444}.mark{stroke:#bbb;stroke-dasharray:3}"
        size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(rows)}</svg>\n'

    def _seconds(self, at: int) -> float:
        return round((at - self.start) / 1e9, 6)


def thinned(points: Points, most: int) -> Points:
    """At most about `most` of the points: of each stretch the highest, so that peaks stay."""
    stride = -(-len(points) // most)
    return [max(points[at : at + stride], key=lambda point: point[1]) for at in range(0, len(points), max(stride, 1))]


def _text(x: float, y: float, content: str, *, color: str = "#222", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{html.escape(content)}</text>'
