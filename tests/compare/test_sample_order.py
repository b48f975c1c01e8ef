"""The first consumed sample with other tokens, from real index maps."""

from pathlib import Path

from megacore.compare.runs import compare_runs
from tests.compare._runs import Written, since, write
from tests.train._runs import config, write_data


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
