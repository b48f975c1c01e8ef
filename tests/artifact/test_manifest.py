"""Tests of the comparison of digests at the start of a training."""

import errno
import os
import threading
from pathlib import Path

import pytest

from megacore.artifact import StageKey, build_artifact, manifest
from megacore.artifact.build import remove_tree, seal
from megacore.artifact.manifest import FirstRead, file_digest, list_files, verified_record
from megacore.errors import ArtifactError, FileAccessError, TransientFileError
from tests._limits import HANG


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    def fill(directory: Path) -> dict[str, int]:
        (directory / "a.bin").write_bytes(bytes(1000))
        (directory / "b.bin").write_bytes(bytes(range(100)))
        return {}

    return build_artifact(tmp_path, StageKey("tokenize", 1, {}, {}), fill)[0].directory


def flip(path: Path) -> None:
    """Change one byte and keep size and modification time."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def lines_of(*directories: Path) -> list[str]:
    lines: list[str] = []
    with FirstRead(directories, lambda text, *values: lines.append(text % values)) as reading:
        reading.finish()
    return lines


def test_digests_are_compared_once(artifact: Path) -> None:
    (line,) = lines_of(artifact, artifact, artifact.parent)
    assert "all digests of 2 files, 0.0 MB, are right" in line
    assert lines_of(artifact) == []
    os.utime(artifact / "a.bin")
    assert len(lines_of(artifact)) == 1
    assert lines_of(artifact) == []


@pytest.mark.parametrize("known", [False, True])
def test_a_flipped_byte_is_named_with_both_digests(artifact: Path, known: bool) -> None:
    if known:
        lines_of(artifact)
    flip(artifact / "b.bin")
    with FirstRead([artifact]) as reading, pytest.raises(ArtifactError) as error:
        reading.finish()
    expected = manifest.Manifest.read(artifact).files["b.bin"].sha256
    found = manifest.file_digest(artifact / "b.bin")
    assert f"{artifact}: b.bin has other content" in str(error.value)
    assert f"(its sha256 is {found} instead of {expected}): delete {artifact}" in str(error.value)
    assert "stage tokenize" in str(error.value)
    with pytest.raises(ArtifactError):  # it is not recorded as right
        lines_of(artifact)


def test_a_failing_disk_is_no_reason_to_delete(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, on_read: object) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # without a name, as read() raises it

    monkeypatch.setattr(manifest, "file_digest", fail)
    with FirstRead([artifact]) as reading, pytest.raises(FileAccessError) as error:
        reading.finish()
    assert f"{artifact}/a.bin (Input/output error): the disk" in str(error.value)
    assert "delete" not in str(error.value)


def test_a_disk_that_fails_while_a_digest_is_computed_is_named() -> None:
    with pytest.raises(TransientFileError, match="cannot read or write /proc/self/mem "):
        file_digest(Path("/proc/self/mem"))  # the system refuses to read its first page


def test_a_folder_that_cannot_be_written_has_no_record(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, value: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("megacore.artifact.manifest.write_json", refuse)
    assert [len(lines_of(artifact)), len(lines_of(artifact))] == [1, 1]


def test_the_record_goes_with_the_artifact(artifact: Path) -> None:
    lines_of(artifact)
    assert verified_record(artifact).exists()
    remove_tree(artifact)
    assert not verified_record(artifact).exists()


def test_a_failed_training_does_not_wait_for_the_comparison(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_CHUNK", 1)
    reached = threading.Event()

    class Slow(FirstRead):
        def _go_on(self, count: int) -> None:
            reached.set()
            self._abandoned.wait(2 * HANG)
            super()._go_on(count)

    with Slow([artifact]) as reading:
        assert reached.wait(HANG)
        reading.check()
    assert reading.error is None
    assert not verified_record(artifact).exists()


def test_a_manifest_names_no_file_of_a_failed_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run.tmp-1"  # the directory's own name does not count
    for name in ("iter_0000002", "iter_0000001.tmp-1a2b-deleted"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "complete.json").write_text("{}")
    synced: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    sealed = seal(run, StageKey("train", 1, {}, {}), {}, 1.0, "checkpoints/*/complete.json")
    assert list(sealed.files) == ["checkpoints/iter_0000002/complete.json"]
    assert sealed.files == list_files(run, "checkpoints/*/*")
    assert synced
    assert not any("deleted" in path for path in synced)
