"""Comparison of runs: the first difference, its reason, and the first sample with other tokens."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megacore.compare import compare_paths, runs
from megacore.compare.report import Finding, Report
from megacore.compare.run_record import RunRecord, Step
from megacore.compare.runs import _first_difference, _iterations, compare_runs
from megacore.errors import ConfigError, DataFormatError
from tests.compare._runs import PLANTED, Planted, Written, since, write
from tests.train._runs import config, write_data


def compared(planted: Planted, root: Path) -> Any:
    return compare_runs(
        write(root / "a", planted.a, root / "data"), write(root / "b", planted.b, root / "data")
    )


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name.replace(" ", "-"))
def test_a_planted_difference_is_named(planted: Planted, tmp_path: Path) -> None:
    report = compared(planted, tmp_path)
    assert not report.equal
    if planted.reason is None:
        assert "first_step" not in report.facts
        assert planted.cause in report.causes
        return
    assert report.findings[0].cause == planted.reason, [
        (finding.cause, finding.sentence) for finding in report.findings
    ]
    assert report.facts["first_step"] == planted.step
    assert planted.reason.replace("_", " ") in report.verdict()


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    report = compared(Planted("equal", Written(), None), tmp_path)
    assert report.equal
    assert report.facts["common_steps"] == 20


def test_differences_without_effect_leave_runs_equal(tmp_path: Path) -> None:
    other = Written(
        {
            "tracking": {"tensorboard": True},
            "checkpoint": {"save_interval": 7},
            "resume": {"override": ["optim.lr"]},
        }
    )
    report = compared(Planted("free", other, None), tmp_path)
    assert report.equal
    assert {name for finding in report.remarks for name in finding.where} >= {
        "tracking.tensorboard",
        "checkpoint.save_interval",
    }


def test_keys_of_unknown_stages_are_not_guessed(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, Written(), tmp_path / "data") for name in "ab"]
    path = runs[1] / "run.json"
    job = json.loads(path.read_text())
    job["config"]["optim"]["lr"] = 0.5
    job["config"]["of_another_version"] = 1
    path.write_text(json.dumps(job))
    report = compare_runs(*runs)
    (finding,) = (each for each in report.findings if each.where == ("optim.lr",))
    assert finding.sentence == "optim.lr: 0.01 in A, 0.5 in B"


@pytest.mark.parametrize("intervals", [(4, 6), (3, 20), (1, 10), (7, 5)])
def test_log_intervals_leave_runs_equal(intervals: tuple[int, int], tmp_path: Path) -> None:
    first, second = (Written({"train": {"log_interval": interval}}) for interval in intervals)
    report = compared(Planted("intervals", second, None, a=first), tmp_path)
    assert report.equal, report.findings
    assert report.facts["common_steps"] >= 1


def logged(name: str, interval: int, losses: list[float]) -> RunRecord:
    """Return a record of means over `interval` steps, in which a NaN stands for a skipped step."""
    steps = {}
    for end in range(interval, len(losses) + 1, interval):
        applied = [loss for loss in losses[end - interval : end] if not math.isnan(loss)]
        skipped = interval - len(applied)
        values = {name: sum(applied) / len(applied) if applied else None}
        steps[end] = Step(**values, skipped_iterations=skipped if name == "lm_loss" else None)
    config = {"train": {"log_interval": interval}}
    return RunRecord(Path("run"), {"config": config}, None, steps=steps)


def test_losses_of_a_pretraining_are_compared_over_applied_iterations() -> None:
    losses = [3.0, 2.5, 2.0, math.nan, 1.5, 1.25, 1.0, 0.5]
    whole = logged("lm_loss", 8, losses)
    for interval in (1, 2, 4):  # with an interval of 1, the fourth has no mean
        record = logged("lm_loss", interval, losses)
        for name in ("lm_loss", "skipped_iterations"):
            assert _first_difference(record, whole, name) is None
    other = logged("lm_loss", 8, [*losses[:-1], 0.75])
    first = _first_difference(logged("lm_loss", 2, losses), other, "lm_loss")
    assert first is not None
    assert (first.step, first.a, first.b) == (8, pytest.approx(11.75 / 7), pytest.approx(12 / 7))


def test_log_intervals_that_a_resume_changed_are_compared_over_their_own_iterations() -> None:
    losses = [4.0, 3.0, 2.5, 2.0, 1.5, 1.25, 1.0, 0.5]
    whole = logged("lm_loss", 8, losses)
    # Stopped after iteration 3 with an interval of 2, and resumed with an interval of 5.
    ends = {2: 2, 5: 3, 8: 3}
    steps = {
        end: Step(
            lm_loss=sum(losses[end - count : end]) / count,
            skipped_iterations=0,
            interval_iterations=count,
        )
        for end, count in ends.items()
    }
    changed = RunRecord(Path("run"), {"config": {"train": {"log_interval": 5}}}, None, steps=steps)
    assert _first_difference(changed, whole, "lm_loss") is None
    steps[5] = steps[5]._replace(lm_loss=2.5)
    first = _first_difference(changed, whole, "lm_loss")
    assert first is not None
    assert (first.step, first.a, first.b) == (8, pytest.approx(17.25 / 8), pytest.approx(15.75 / 8))


def test_log_intervals_without_a_common_begin_are_not_compared() -> None:
    record, other = (logged("lm_loss", 8, [3.0] * 7 + [last]) for last in (3.0, 2.0))
    other.steps[8] = other.steps[8]._replace(interval_iterations=5)
    assert _first_difference(record, other, "lm_loss") is None


def test_a_step_is_compared_without_all_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = logged("lm_loss", 1, [4.0] * 1000), logged("lm_loss", 1, [4.0] * 1000)
    read: list[int] = []
    monkeypatch.setattr(
        runs, "_iterations", lambda record, end: read.append(end) or _iterations(record, end)
    )
    assert _first_difference(first, second, "lm_loss") is None
    assert len(read) == 2000


def test_losses_of_fine_tunings_are_compared() -> None:
    losses = [3.0, 2.5, 2.0, 1.5]
    often, seldom = logged("loss", 1, losses), logged("loss", 4, losses)
    assert _first_difference(often, seldom, "loss") is None
    first = _first_difference(often, logged("loss", 4, [*losses[:-1], 1.0]), "loss")
    assert first is not None
    assert (first.step, first.a, first.b) == (4, 2.25, 2.125)


def test_a_field_is_named_with_the_keys_that_it_enters(tmp_path: Path) -> None:
    report = compared(Planted("", Written({"train": {"global_batch_size": 16}}), None), tmp_path)
    [finding] = [each for each in report.findings if each.where == ("train.global_batch_size",)]
    assert finding.sentence.startswith("train.global_batch_size: 8 in A, 16 in B (enters the key")
    assert "run" in finding.sentence


def test_runs_are_found_by_key_and_name(tmp_path: Path) -> None:
    for key in ("0123456789abcdef", "fedcba9876543210"):
        write(
            tmp_path / "runs" / key,
            Written(noise=since(1) if key[0] == "f" else lambda _: 0.0),
            tmp_path / "data",
        )
    report = compare_paths("0123", "fedcba9876543210", workspace=tmp_path)
    assert report.kind == "runs"
    assert report.facts["first_step"] == 1
    with pytest.raises(ConfigError, match=r"2 runs or artifacts in .* are called tiny"):
        compare_paths("0123", "tiny", workspace=tmp_path)


def test_a_missing_loss_is_named_without_a_relative_difference(tmp_path: Path) -> None:
    lost = Written(values=lambda step: {"lm_loss": math.nan} if step >= 5 else {})
    report = compared(Planted("lost", lost, None), tmp_path)
    assert "at step 5: 3.42612264 in A, none in B; nothing" in report.findings[0].sentence
    json.dumps(report.to_json()["findings"], allow_nan=False)


def test_a_report_of_weights_that_are_no_numbers_is_standard_json() -> None:
    report = Report("models", {}, {}, facts={"logits": {"max_abs_difference": math.nan}})
    report.findings.append(Finding("logits", "x", "y", ("z",), numbers={"max_abs": math.inf}))
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert values["facts"] == {"logits": {"max_abs_difference": None}}
    assert values["findings"][0]["where"] == ["z"]


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", Written(), tmp_path / "data")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataFormatError, match=r"run\.json cannot be read"):
        compare_runs(tmp_path / "a", tmp_path / "b")


def test_another_order_of_samples_is_named_with_its_first_sample(tmp_path: Path) -> None:
    for name, seed in (("first", 1234), ("second", 4321)):
        write_data(tmp_path / name, config().model_copy(update={"seed": seed}))
    a = write(tmp_path / "a", Written(), tmp_path / "first")
    b = write(tmp_path / "b", Written(noise=since(1)), tmp_path / "second")
    report = compare_runs(a, b)
    [finding] = [each for each in report.findings if "sample" in each.numbers]
    assert report.facts["reasons"] == ["sample_order"]
    assert finding.where == ("0",)
    assert finding.sentence.endswith("with other tokens is 0 (iteration 1)")


def test_a_copy_of_the_data_has_the_same_order(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_data(tmp_path / name, config())
    a = write(tmp_path / "a", Written(), tmp_path / "first")
    b = write(tmp_path / "b", Written(), tmp_path / "second")
    assert compare_runs(a, b).equal
