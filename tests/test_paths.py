import errno
import os
from glob import glob
from pathlib import Path

import pytest

from megacore import paths
from tests._listing import refuse_listing

CHECKS = (paths.exists, paths.is_file, paths.is_dir, paths.is_symlink)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "a/run.json",
        "b/run.json",
        "b/deep/er/run.json",
        ".hidden/run.json",
        "x[1].tmp-2",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("a", (True, False, True, False)),
        ("a/run.json", (True, True, False, False)),
        ("link", (True, False, True, True)),
        ("nowhere", (False, False, False, True)),
        ("circle", (False, False, False, True)),
        ("missing/file", (False, False, False, False)),
        ("a/run.json/file", (False, False, False, False)),
        ("a\0", (False, False, False, False)),
    ],
)
def test_answers_are_those_of_pathlib(tree: Path, name: str, answers: tuple[bool, ...]) -> None:
    assert tuple(check(tree / name) for check in CHECKS) == answers
    assert tuple(check(f"{tree}/{name}") for check in CHECKS) == answers


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_errors_of_the_file_system_are_raised(
    tree: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "stat", fail)
    monkeypatch.setattr(os, "scandir", fail)
    for check in CHECKS:
        with pytest.raises(OSError, match=os.strerror(number)):
            check(tree / "a")
    for pattern in ("*", "*/run.json", "**/run.json"):
        with pytest.raises(OSError, match=os.strerror(number)):
            list(paths.glob(tree, pattern))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_name_in_a_folder_that_may_not_be_entered_is_left_out(
    tree: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == "b":
            raise OSError(number, os.strerror(number), path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    if number == errno.EACCES:
        assert [path.parent.name for path in paths.glob(tree, "?/run.json")] == ["a"]
    else:
        with pytest.raises(OSError, match="Input/output error"):
            list(paths.glob(tree, "?/run.json"))


def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    for check in CHECKS:
        with pytest.raises(OSError, match="File name too long"):
            check(tmp_path / ("a" * 300))


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "[!.]*",
        "*/run.json",
        "b/*.json",
        "a/run.json",
        "missing/*",
        "*/missing",
        "a/run.json/*",
        "**/run.json",
        "*/**/run.json",
        "x[[]1].tmp-*",
        "?/run.json",
    ],
)
def test_globs_are_those_of_pathlib(tree: Path, pattern: str) -> None:
    assert sorted(paths.glob(tree, pattern)) == sorted(tree.glob(pattern))
    assert sorted(paths.rglob(tree, "*")) == sorted(tree.rglob("*"))
    assert sorted(paths.rglob(tree, "*.json")) == sorted(tree.rglob("*.json"))


def test_a_missing_folder_has_no_paths(tmp_path: Path) -> None:
    assert list(paths.glob(tmp_path / "missing", "*")) == []
    assert list(paths.rglob(tmp_path / "missing", "*")) == []


def test_paths_in_the_working_directory_have_no_dot(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    assert sorted(map(str, paths.glob(".", "?/run.json"))) == ["a/run.json", "b/run.json"]


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        ".*/*",
        "*/",
        "*/run.json",
        "?/*.json",
        "a/run.json",
        "nowhere",
        "missing/*",
        "*/missing",
        "a/run.json/*",
        "**/run.json",
        "**/deep/**/*.json",
        "b/**",
        "x[[]1].tmp-*",
    ],
)
def test_matches_are_those_of_glob(
    tree: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "link").unlink()
    expected = {Path(name) for name in glob(f"{tree}/{pattern}", recursive=True)}
    assert paths.matches(f"{tree}/{pattern}") == sorted(expected)
    monkeypatch.chdir(tree)
    assert paths.matches(pattern) == sorted(path.relative_to(tree) for path in expected)


def test_matches_follow_links_and_end_in_loops_of_them(tree: Path) -> None:
    (tree / "1").symlink_to(".")
    (tree / "2").symlink_to("..")
    names = [str(path.relative_to(tree)) for path in paths.matches(f"{tree}/b/**/*.json")]
    assert names == ["b/deep/er/run.json", "b/run.json"]
    assert tree / "link/run.json" in paths.matches(f"{tree}/l*/**/run.json")
    assert tree / "a/run.json" in paths.matches(f"{tree}/**/a/*.json")


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_no_empty_one_for_matches(
    tree: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_listing(monkeypatch, "deep", number)
    assert paths.matches(f"{tree}/*/run.json")
    with pytest.raises(OSError, match=os.strerror(number)):
        paths.matches(f"{tree}/**/run.json")
