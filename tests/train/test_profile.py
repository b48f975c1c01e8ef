"""Profiles of `train.profile`: their files, their content, and that no failure ends a run."""

import gzip
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.errors import ConfigError, TrainingError
from megacore.train import profile as profiles
from megacore.train.profile import MemoryTimeline, ResidentSampler, read_allocations, thin_out
from tests._dist import run_distributed
from tests.train import _runs

FILES = ["profile/rank_0.json.gz", "profile/rank_0_memory.json", "profile/rank_0_memory.svg"]


def profiled(first: int, last: int, train_iters: int = 6) -> RunConfig:
    """Return a small run's configuration with profiling and a checkpoint every third iteration."""
    values = {"train_iters": train_iters, "profile": {"from": first, "to": last}}
    return _runs.config(train=_runs.config().train.model_dump() | values)


def trace_of(directory: Path, rank: int = 0) -> dict[str, Any]:
    with gzip.open(directory / f"profile/rank_{rank}.json.gz") as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def iterations_in(directory: Path) -> list[str]:
    names = {event["name"] for event in trace_of(directory)["traceEvents"]}
    return sorted(name for name in names if name.startswith("iteration "))


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a run that profiles iterations 2 and 3 of 6."""
    directory = tmp_path_factory.mktemp("run")
    _runs.train(profiled(2, 3), data, directory)
    return directory


def test_trace_contains_operations_of_the_requested_iterations(
    run: Path,
) -> None:
    events = trace_of(run)["traceEvents"]
    names = [event["name"] for event in events]
    assert iterations_in(run) == ["iteration 2", "iteration 3"]
    assert "aten::mm" in names
    assert any(name.startswith("autograd::engine") for name in names)
    spans = {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if "dur" in event
    }
    first, second = spans["iteration 2"], spans["iteration 3"]
    assert first[1] <= second[0]
    products = [event["ts"] for event in events if event["name"] == "aten::mm" and "dur" in event]
    assert all(any(start <= at <= end for start, end in (first, second)) for at in products)


def test_memory_timeline_contains_allocated_and_resident_memory(run: Path) -> None:
    timeline = json.loads((run / FILES[1]).read_text(encoding="utf-8"))
    assert (timeline["from"], timeline["to"]) == (2, 3)
    assert [iteration for _, iteration in timeline["iterations"]] == [2, 3]
    assert set(timeline["curves"]) == {"cpu allocated", "resident"}
    assert timeline["peaks"]["resident"] > 50e6  # torch itself
    logits = 2 * 16 * 64 * 4  # fp32 of one micro batch
    assert timeline["peaks"]["cpu allocated"] >= logits
    picture = (run / FILES[2]).read_text(encoding="utf-8")
    assert picture.startswith("<svg")
    assert picture.count("<polyline") == 2


def test_profile_event_names_the_files(run: Path) -> None:
    (event,) = _runs.events(run, "profile")
    assert (event["first"], event["last"], event["iteration"]) == (2, 3, 3)
    assert event["files"] == FILES
    assert sorted(path.relative_to(run).as_posix() for path in (run / "profile").iterdir()) == FILES


def test_run_without_profile_writes_no_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_Recording", None)
    _runs.train(_runs.config(), data, tmp_path)
    assert not (tmp_path / "profile").exists()
    assert _runs.events(tmp_path, "profile") == []


def test_profile_leaves_the_losses_unchanged(run: Path, data: Path, tmp_path: Path) -> None:
    _runs.train(_runs.config(), data, tmp_path)
    assert _runs.losses(tmp_path) == _runs.losses(run)


@pytest.mark.parametrize(
    ("interval", "expected"), [((1, 3), []), ((3, 5), ["iteration 4", "iteration 5"])]
)
def test_resumed_run_profiles_the_remaining_iterations(
    interval: tuple[int, int], expected: list[str], data: Path, tmp_path: Path
) -> None:
    train = _runs.config().train.model_dump() | {"train_iters": 3}
    _runs.train(_runs.config(train=train), data, tmp_path)
    _runs.train(profiled(*interval), data, tmp_path, attempt=2)
    if expected:
        assert iterations_in(tmp_path) == expected
    else:
        assert not (tmp_path / "profile").exists()
    assert _runs.events(tmp_path, "warning") == []


def test_unwritable_profile_is_a_warning(data: Path, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    _runs.train(profiled(1, 2), data, tmp_path)
    assert len(_runs.losses(tmp_path)) == 6
    (warning,) = _runs.events(tmp_path, "warning")
    assert "rank 0 has no profile: FileExistsError" in warning["message"]
    assert _runs.events(tmp_path, "profile") == []


def test_failed_trace_export_leaves_no_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_part(self: Any, path: str) -> None:
        Path(path).write_bytes(b"\x1f\x8b")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiles.profile, "export_chrome_trace", write_part)
    _runs.train(profiled(1, 2), data, tmp_path)
    assert "No space left on device" in _runs.events(tmp_path, "warning")[0]["message"]
    assert list((tmp_path / "profile").iterdir()) == []


@pytest.mark.parametrize("part", ["start", "stop"])
def test_a_profiler_that_fails_leaves_nothing_that_records(
    part: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("CUPTI is not available")

    monkeypatch.setattr(profiles.profile, part, fail)
    _runs.train(profiled(1, 2), data, tmp_path)
    assert "CUPTI is not available" in _runs.events(tmp_path, "warning")[0]["message"]
    assert "resident-memory" not in {thread.name for thread in threading.enumerate()}


def test_failure_within_the_interval_raises_the_original_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **values: Any) -> None:
        raise TrainingError("broken")

    monkeypatch.setattr("megacore.train.step.Stepper.step", fail)
    with pytest.raises(TrainingError, match="broken"):
        _runs.train(profiled(1, 2), data, tmp_path)
    (warning,) = _runs.events(tmp_path, "warning")
    assert "the run ended before train.profile.to" in warning["message"]


def train_two_ranks(data: Path, directory: Path) -> None:
    _runs.train(profiled(2, 2, 3), data, directory)


def test_every_rank_writes_its_files_and_one_event_names_them(data: Path, tmp_path: Path) -> None:
    run_distributed(2, train_two_ranks, data, tmp_path)
    (event,) = _runs.events(tmp_path, "profile")
    assert event["files"] == FILES + [name.replace("rank_0", "rank_1") for name in FILES]
    for rank in range(2):
        assert "aten::mm" in {each["name"] for each in trace_of(tmp_path, rank)["traceEvents"]}


@pytest.mark.parametrize(("first", "last"), [(3, 2), (5, 7)])
def test_interval_outside_the_run_is_refused(first: int, last: int) -> None:
    with pytest.raises(
        ValueError, match=f"train.profile is from {first} to {last} with train.train_iters 6: give"
    ):
        profiled(first, last)


def test_configuration_keys_are_from_and_to() -> None:
    config = profiled(2, 3)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert config.model_dump(mode="json")["train"]["profile"] == {"from": 2, "to": 3}
    values = config.model_dump(mode="json")
    values["train"]["profile"] = {"from": True, "until": 3}
    with pytest.raises(ConfigError) as error:
        parse_config(values, origin="conf.yaml")
    assert "from is true" in str(
        error.value
    ) or "train.profile.from is True: give an integer" in str(error.value)
    assert "unknown key train.profile.until (known: from, to)" in str(error.value)


def test_gpu_and_cpu_allocations_are_read_separately() -> None:
    def event(at: float, allocated: int, reserved: int, kind: int) -> dict[str, Any]:
        values = {
            "Total Allocated": allocated,
            "Total Reserved": reserved,
            "Device Type": kind,
            "Device Id": 0,
        }
        return {"name": "[memory]", "ts": at, "args": values}

    events = [
        event(2.0, 30, 64, 1),
        event(1.0, 20, 64, 1),
        event(1.5, 7, 0, 0),
        {"name": "aten::mm", "ts": 1.0},
    ]
    allocations = read_allocations({"baseTimeNanoseconds": 10**9, "traceEvents": events})
    assert allocations == {
        "cuda:0 allocated": [(10**9 + 1000, 20), (10**9 + 2000, 30)],
        "cuda:0 reserved": [(10**9 + 1000, 64), (10**9 + 2000, 64)],
        "cpu allocated": [(10**9 + 1500, 7)],
    }
    sampler = ResidentSampler()
    sampler.stop()
    values = MemoryTimeline.of(allocations, sampler).values()
    assert values["peaks"]["cuda:0 allocated"] == 30


def test_thinned_curve_keeps_the_peak() -> None:
    points = [(at, at % 997) for at in range(10_000)]
    few = thin_out(points, 100)
    assert len(few) == 100
    assert max(value for _, value in few) == 996
    assert thin_out(points[:7], 100) == points[:7]
    assert thin_out([], 100) == []


def test_profile_of_an_earlier_attempt_is_replaced(run: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "profile", tmp_path / "profile")
    _runs.train(profiled(4, 4), data, tmp_path)
    assert iterations_in(tmp_path) == ["iteration 4"]
