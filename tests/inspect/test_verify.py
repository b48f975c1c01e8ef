import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megacore.artifact import manifest
from megacore.artifact.build import StageKey, lock, seal
from megacore.artifact.manifest import Manifest, list_files
from megacore.checkpoint.format import FileRecord, Marker
from megacore.data.index_directory import map_path
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Member, Mixture
from megacore.errors import ArtifactError, DataFormatError
from megacore.inspect import index as index_checks
from megacore.inspect import verify as verification
from megacore.inspect.verify import Check, Damage, Unchecked, examine, verify
from megacore.token_files.indexed_dataset import write_members
from tests.data._corpus import entry, write_documents
from tests.data._files import write_tokens

SEQ_LENGTH = 5
LENGTHS = [3, 1, 0, 20, 2, 9, 30, 5, 6]


def results(path: Path | str) -> dict[str, str]:
    return {check.name: check.result for check in verify(path)}


def flip(path: Path, offset: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def write_manifest(path: Path, pattern: str) -> None:
    """Write a manifest next to token files like the command line does."""
    files = list_files(path.parent, pattern)
    manifest = Manifest("tokenize", 1, "", {}, {}, files, {}, 0.0)
    manifest.write(path.parent)
    (path.parent / "manifest.json").rename(path)


def test_every_check_of_token_files_is_reported(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [5, 0, 3])
    checks = results(prefix)
    assert checks == {
        "a.idx": "version 1, uint16, 2 sequences, 90 bytes as these take",
        "pointers": "2, each where the sequence before it ends",
        "a.bin": "sum of lengths 8 x 2 bytes = 16, its size",
        "document index": "3 documents, 1 empty, from 0 to 2",
        "manifest": "a.manifest.json is not there: hashes were not checked",
    }
    assert results(f"{prefix}.bin") == results(f"{prefix}.idx") == checks


def test_modes_are_reported(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [5, 0, 3])
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes(2))
    assert (
        results(prefix)["a.idx"]
        == "version 1, uint16, 2 sequences and modes, 92 bytes as these take"
    )


def test_documents_json_must_count_the_documents_of_the_files(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [5, 0, 3])
    path = Path(f"{prefix}.documents.json")
    write_documents(path, [entry("x", 3)])
    assert results(prefix)["a.documents.json"] == "3 documents from 1 file"
    write_documents(path, [entry("x", 2)])
    with pytest.raises(DataFormatError, match="counts 2 documents"):
        results(prefix)


def test_hashes_of_the_command_lines_manifest_are_checked(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [5, 3])
    write_manifest(Path(f"{prefix}.manifest.json"), "a.*")
    assert results(prefix)["a.manifest.json"] == "2 files, 98 bytes, sha256 as it was written"
    flip(Path(f"{prefix}.bin"))
    with pytest.raises(
        ArtifactError,
        match=r"a\.bin has other content than when it was written \(.*delete what is damaged",
    ):
        results(prefix)
    Path(f"{prefix}.manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"a\.manifest\.json is damaged"):
        results(prefix)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Return a directory like the one the tokenize stage leaves."""
    write_tokens(tmp_path / "tokens_text_document", LENGTHS)
    seal(tmp_path, StageKey("tokenize", 1, {}, {}), {}, 1.0)
    return tmp_path


def test_an_artifact_is_checked_by_its_manifest(artifact: Path) -> None:
    assert results(artifact)["manifest.json"].startswith("2 files")
    assert results(artifact / "tokens_text_document")["manifest.json"].startswith("2 files")


def test_every_member_of_a_blend_is_checked(tmp_path: Path) -> None:
    members = [tmp_path / name for name in ("one", "two")]
    for number, member in enumerate(members):
        member.mkdir()
        write_tokens(member / "tokens_text_document", [5, 3 + number])
        seal(member, StageKey("tokenize", 1, {}, {}), {}, 1.0)
    (tmp_path / "both").mkdir()
    write_members(tmp_path / "both", members)
    seal(tmp_path / "both", StageKey("blend", 1, {}, {}), {}, 1.0)
    names = [check.name for check in verify(tmp_path / "both")]
    assert names.count("tokens_text_document.bin") == 2
    assert names[-3:] == ["manifest.json"] * 3
    flip(members[1] / "tokens_text_document.bin")
    with pytest.raises(ArtifactError, match=r"two: tokens_text_document\.bin has other content"):
        results(tmp_path / "both")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip(path), "has other content"),
        (lambda path: path.write_bytes(b""), "has 0 bytes instead of 152"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_damage_of_an_artifact_is_refused_by_file(
    artifact: Path, damage: Callable[[Path], None], message: str
) -> None:
    for name in ("tokens_text_document.bin", "tokens_text_document.idx"):
        (artifact / name).rename(artifact / name.replace("tokens", "other"))
    seal(artifact, StageKey("convert", 1, {}, {}), {}, 1.0)
    assert list(results(artifact)) == ["manifest.json"]
    damage(artifact / "other_text_document.bin")
    with pytest.raises(ArtifactError, match=rf"other_text_document\.bin {message}"):
        results(artifact)


def test_a_path_without_known_files_is_refused_with_all_that_can_be_checked(
    tmp_path: Path,
) -> None:
    kinds = "give the path of token files .*, index maps, .* an import or a run, or a workspace"
    with pytest.raises(DataFormatError, match=f"{tmp_path} is empty: a workspace has .* {kinds}"):
        examined(tmp_path)
    (tmp_path / "other").touch()
    with pytest.raises(DataFormatError, match=f"{tmp_path} holds nothing that .*: {kinds}"):
        examined(tmp_path)
    with pytest.raises(DataFormatError, match=f"{tmp_path}/none does not exist: {kinds}"):
        examined(tmp_path / "none")


@pytest.fixture(
    params=["packed", "best_fit", "pack_until_overflow", "unpacked", "one token less", "neox"]
)
def index(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return index maps of several epochs with their tokens; checks read them in small blocks."""
    monkeypatch.setattr(index_checks, "_BLOCK", 4)
    kind = request.param
    packing = kind if kind in ("best_fit", "pack_until_overflow", "unpacked") else "packed"
    options = IndexOptions(
        "6,3",
        SEQ_LENGTH,
        seed=3,
        style="neox" if kind == "neox" else "megatron",
        packing=packing,
        add_extra_token=kind != "one token less",
        drop_last_partial=kind != "one token less",
    )
    prefix = write_tokens(tmp_path / "a", LENGTHS)
    build_index_maps(Mixture.single(prefix), tmp_path, options, (40, None, 0))
    return tmp_path


def test_maps_are_checked_against_their_tokens(index: Path) -> None:
    checks = results(index)
    assert list(checks) == [
        "index.json",
        "tokens 0",
        "train maps 0",
        "valid maps 0",
        "test maps 0",
        "manifest",
    ]
    assert "each sample once" in checks["train maps 0"]
    assert checks["test maps 0"] == "no samples"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("document", lambda values: values.__setitem__(0, 99), "names sequence 99 of 8"),
        ("document", lambda values: values.__setitem__(0, -1), "names sequence -1 of 8"),
        (
            "document",
            lambda values: values.__setitem__(0, (values[0] + 1) % 5),
            r"has sequence \d \d+ times, but",
        ),
        ("sample", lambda values: values.__setitem__((1, 1), 10**6), r"row 1 is \[\d+, 1000000\]"),
        ("sample", lambda values: values.__setitem__((2, 0), 10**6), r"row 2 is \[1000000, \d+\]"),
        (
            "sample",
            lambda values: values.__setitem__(slice(1, 3), values[2:0:-1].copy()),
            r"row 2 is .* does not follow",
        ),
        ("shuffle", lambda values: values.__setitem__(0, values[1]), "lacks 1 of"),
        ("shuffle", lambda values: values.__setitem__(0, len(values)), r"names sample \d+ of \d+"),
        ("shuffle", lambda values: values.__setitem__(0, -2), "names sample -2 of"),
    ],
)
def test_damaged_maps_are_refused_by_file(
    index: Path, name: str, damage: Callable[[np.ndarray], None], message: str
) -> None:
    path = map_path(index, "train", name)
    values = np.load(path).astype(np.int64)
    damage(values)
    np.save(path, values)
    with pytest.raises(DataFormatError, match=rf"train_{name}_index\.npy:? {message}"):
        results(index)


def test_samples_of_another_length_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_checks, "_BLOCK", 4)
    prefix = write_tokens(tmp_path / "a", LENGTHS)
    build_index_maps(
        Mixture.single(prefix), tmp_path, IndexOptions("1", SEQ_LENGTH, seed=3), (40, 0, 0)
    )
    path = map_path(tmp_path, "train", "sample")
    rows = np.load(path)
    inside = next(row for row in range(1, len(rows)) if rows[row, 1] > 0)
    rows[inside, 1] -= 1
    np.save(path, rows)
    with pytest.raises(
        DataFormatError, match=rf"sample {inside} begins {inside * SEQ_LENGTH - 1} tokens into"
    ):
        results(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda rows: rows.__setitem__(1, rows[0]), "sample 0 has no documents"),
        (lambda rows: rows.__setitem__((1, 0), 3), r"sample 0 has \d+ tokens of 16: the maps"),
        (lambda rows: rows.__setitem__((-2, 1), 0), "does not have each piece of sequence 4 of"),
    ],
)
def test_samples_that_best_fit_does_not_give_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[np.ndarray], None],
    message: str,
) -> None:
    monkeypatch.setattr(index_checks, "_BLOCK", 4)
    # The rests 10, 9, 8, 7, 5, 3 fill three samples, six further ones are full.
    prefix = write_tokens(tmp_path / "a", [5, 9, 7, 3, 100, 8])
    options = IndexOptions("1", 15, seed=3, packing="best_fit")
    build_index_maps(Mixture.single(prefix), tmp_path, options, (18, 0, 0))
    assert "18 samples, 24 pieces in 2 epochs" in results(tmp_path)["train maps 0"]
    path = map_path(tmp_path, "train", "sample")
    rows = np.load(path)
    damage(rows)
    np.save(path, rows)
    with pytest.raises(DataFormatError, match=message):
        results(tmp_path)


def test_a_shuffle_index_without_its_last_row_is_refused(index: Path) -> None:
    path = map_path(index, "train", "shuffle")
    np.save(path, np.load(path)[:-1])
    with pytest.raises(DataFormatError, match="should have one row more"):
        results(index)


def test_index_json_must_count_the_samples(index: Path) -> None:
    path = index / "index.json"
    content = json.loads(path.read_text())
    content["samples"]["train"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(DataFormatError, match="train samples, but its maps have"):
        results(index)


@pytest.fixture
def blend(tmp_path: Path) -> Path:
    """Return the maps of a blend of two data sets."""
    prefixes = [write_tokens(tmp_path / name, LENGTHS) for name in "ab"]
    (tmp_path / "index").mkdir()
    mixture = Mixture.blend([Member(prefixes[0], 3.0), Member(prefixes[1], 1.0)])
    build_index_maps(
        mixture, tmp_path / "index", IndexOptions("6,3", SEQ_LENGTH, seed=3), (40, 8, 0)
    )
    return tmp_path / "index"


def test_checks_of_a_blend_are_reported(blend: Path) -> None:
    checks = results(blend)
    assert checks["train blend"] == "40 samples: 75.0% of member 0, 25.0% of member 1"
    assert {"tokens 1", "train maps 1", "valid maps 1", "valid blend"} <= set(checks)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dataset", 2, "names data set 2 of 2"),
        ("dataset", -1, "names data set -1 of 2"),
        ("dataset_sample", 10**6, "sample 1000000 of"),
        ("dataset_sample", -7, "sample -7 of"),
    ],
)
def test_damaged_blends_are_refused(blend: Path, name: str, value: int, message: str) -> None:
    path = map_path(blend, "train", name)
    values = np.load(path)
    values[3] = value
    np.save(path, values)
    with pytest.raises(DataFormatError, match=message):
        results(blend)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Return a workspace with an artifact and a run of two checkpoints."""
    tokens, run = tmp_path / "tokenized" / "0123", tmp_path / "runs" / "4567"
    tokens.mkdir(parents=True)
    (tokens / "a.bin").write_bytes(bytes(1000))
    (tokens / "b.bin").write_bytes(bytes(100))
    seal(tokens, StageKey("tokenize", 1, {}, {}), {}, 1.0)
    for iteration in (10, 20):
        checkpoint = run / "checkpoints" / f"iter_{iteration:07d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "__0_0.distcp").write_bytes(bytes(500))
        files = {"__0_0.distcp": FileRecord.of(checkpoint / "__0_0.distcp")}
        Marker(iteration, 3.5, files).write(checkpoint)
    (run / "run.json").write_text("{}")
    seal(run, StageKey("train", 1, {}, {}), {}, 1.0, "checkpoints/*/complete.json")
    (tmp_path / "tokenized" / "89ab.tmp-1").mkdir()
    return tmp_path


def examined(path: Path) -> dict[str, str]:
    return {
        result.name: f"{result.problem}|{result.command}|{result.remedy}"
        if isinstance(result, Damage)
        else "ok"
        if isinstance(result, Check)
        else result.state
        for result in examine(path)
    }


def test_a_workspace_is_checked_as_a_whole(workspace: Path) -> None:
    read: list[int] = []
    assert [(check.name, check.result) for check in examine(workspace, read.append)] == [
        ("tokenized/0123", "2 files, 1,100 bytes, sha256 as it was written"),
        *(
            (
                f"runs/4567/checkpoints/iter_{iteration}",
                "1 file, 500 bytes, sha256 as it was written",
            )
            for iteration in ("0000010", "0000020")
        ),
    ]
    assert sum(read) > 2100


def test_every_damage_of_a_workspace_is_listed_with_its_remedy(workspace: Path) -> None:
    tokens, run = workspace / "tokenized" / "0123", workspace / "runs" / "4567"
    first, last = (run / "checkpoints" / f"iter_00000{number}0" for number in (1, 2))
    flip(tokens / "a.bin")
    (tokens / "b.bin").unlink()
    flip(first / "__0_0.distcp")
    results = examined(workspace)
    assert results["tokenized/0123"].startswith("a.bin has other content than when it was written")
    assert results["tokenized/0123"].endswith(
        f"; b.bin is missing|rm -r -- {tokens}|the same `make pretrain` command builds it again "
        "(stage tokenize)"
    )
    assert "__0_0.distcp has other content" in results["runs/4567/checkpoints/iter_0000010"]
    assert f"|rm -r -- {first}|" in results["runs/4567/checkpoints/iter_0000010"]
    assert results["runs/4567/checkpoints/iter_0000020"] == "ok"
    assert examined(last) == {"checkpoints/iter_0000020": "ok"}
    assert examined(first).keys() == {"checkpoints/iter_0000010"}
    assert "ok" not in examined(first).values()

    Marker(20, 1.0, Marker.read(last).files).write(last)  # valid, but not what the run has listed
    (run / "checkpoints" / "iter_0000030").mkdir()
    (tokens / "manifest.json").write_text("{")
    results = examined(workspace)
    assert "complete.json has " in results["runs/4567/checkpoints/iter_0000020"]
    assert "has no complete.json" in results["runs/4567/checkpoints/iter_0000030"]
    assert "manifest.json is damaged" in results["tokenized/0123"]
    (run / "manifest.json").write_text("{")
    assert f"rm -- {run}/manifest.json" in examined(run)["4567/manifest.json"]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_files_that_cannot_be_read_now_are_not_to_be_deleted(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(path: Path, on_read: object = None) -> str:
        if path.name == "__0_0.distcp" and path.parent.name != "iter_0000020":
            return digest(path)
        raise OSError(code, os.strerror(code), str(path))

    digest = manifest.file_digest
    monkeypatch.setattr(manifest, "file_digest", fail)
    found = {result.name: result for result in examine(workspace)}
    run = "runs/4567/checkpoints/iter_00000"
    assert found.keys() == {"tokenized/0123", f"{run}10", f"{run}20"}
    assert all(
        isinstance(result, Unchecked)
        and result.state == "not readable"
        and os.strerror(code) in result.reason
        for result in found.values()
    )


def test_a_folder_or_artifact_whose_link_is_broken_is_not_readable(workspace: Path) -> None:
    (workspace / "index").symlink_to(workspace / "lost mount")
    (workspace / "exports").touch()
    (workspace / "tokenized" / "4567").symlink_to(workspace / "lost mount")
    (workspace / "tokenized" / "notes.txt").touch()
    results = {result.name: result for result in examine(workspace)}
    unreadable = {name: each for name, each in results.items() if isinstance(each, Unchecked)}
    assert unreadable.keys() == {"index", "exports", "tokenized/4567"}
    assert {each.state for each in unreadable.values()} == {"not readable"}
    assert f"{workspace}/index is a link to a missing directory" in unreadable["index"].reason
    assert f"{workspace}/exports is a file" in unreadable["exports"].reason


def test_a_run_that_is_just_beginning_is_not_damaged(workspace: Path) -> None:
    run = workspace / "runs" / "abc"
    (run / "jobs").mkdir(parents=True)
    with lock(run):
        assert set(examined(workspace).values()) == {"ok"}
    (result,) = [result for result in examine(workspace) if result.name == "runs/abc"]
    assert isinstance(result, Unchecked)
    assert result.state == "not complete"
    assert "command completes it" in result.reason


def test_a_run_without_a_manifest_is_not_complete_unless_something_works_on_it(
    workspace: Path,
) -> None:
    run = workspace / "runs" / "4567"
    (run / "manifest.json").unlink()
    assert examined(workspace)["runs/4567"] == "not complete"
    assert examined(run)["4567"] == "not complete"
    with lock(run):
        assert set(examined(workspace).values()) == {"ok"}


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_damaged_job_file_of_a_run_is_found(workspace: Path, content: str) -> None:
    run = workspace / "runs" / "4567"
    (run / "run.json").write_text(content)
    both = f"|rm -- {run}/run.json {run}/manifest.json|the same `make pretrain`"
    assert both in examined(workspace)["runs/4567/run.json"]
    (run / "manifest.json").unlink()
    (run / "checkpoints").rename(workspace / "elsewhere")
    results = examined(workspace)
    assert f"|rm -- {run}/run.json|" in results["runs/4567/run.json"]
    assert results["runs/4567"] == "not complete"


def test_a_job_file_that_cannot_be_read_now_is_not_to_be_deleted(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(verification, "read_json", fail)
    assert examined(workspace)["runs/4567/run.json"] == "not readable"


@pytest.mark.parametrize("name", ["imported", "checkpoints", "best"])
def test_a_checkpoint_outside_a_run_is_imported_or_copied_again(workspace: Path, name: str) -> None:
    folder = workspace / "copies" / name
    folder.parent.mkdir()
    (workspace / "runs" / "4567" / "checkpoints").rename(folder)
    (folder / "iter_0000010" / "__0_0.distcp").unlink()
    (result,) = examined(folder / "iter_0000010").values()
    assert f"|rm -r -- {folder}/iter_0000010|import it again into an empty directory" in result


@pytest.mark.parametrize(("name", "shown"), [("imported", ""), ("checkpoints", "checkpoints/")])
def test_all_checkpoints_of_an_import_are_checked(workspace: Path, name: str, shown: str) -> None:
    folder = workspace / "copies" / name
    folder.parent.mkdir()
    (workspace / "runs" / "4567" / "checkpoints").rename(folder)
    (folder / "tokenizer").mkdir()
    (folder / "import.json").write_text("{}")
    assert examined(folder) == {f"{shown}iter_0000010": "ok", f"{shown}iter_0000020": "ok"}
    (folder / "iter_0000010" / "__0_0.distcp").unlink()
    results = examined(folder)
    assert results.pop(f"{shown}iter_0000020") == "ok"
    (result,) = results.values()
    assert f"|rm -r -- {folder}/iter_0000010|import it again into an empty directory" in result


def test_a_damaged_best_model_costs_its_fine_tuning(workspace: Path) -> None:
    run = workspace / "runs" / "4567"
    (run / "checkpoints").rename(run / "best")
    (run / "manifest.json").unlink()
    assert set(examined(run).values()) == {"ok", "not complete"}
    (run / "best" / "iter_0000020" / "__0_0.distcp").unlink()
    result = examined(workspace)["runs/4567/best/iter_0000020"]
    assert f"__0_0.distcp is missing|rm -r -- {run}|the same `make finetune`" in result
