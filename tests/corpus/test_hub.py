"""Tests of sources on the Hugging Face hub."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from megacore.config.data import HubSource
from megacore.corpus import hub
from megacore.corpus.collect import collect, fingerprint
from megacore.errors import DataFormatError, DownloadError, WorkspaceError
from tests._listing import refuse_listing

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WIKITEXT = "^ = (?!= ).+ = $"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for shard, texts in enumerate((["eins", "zwei"], ["", "größe"])):
        table = pa.table({"text": texts, "number": list(range(len(texts)))})
        pq.write_table(table, folder / f"train-{shard:05}.parquet")
    (tmp_path / "out").mkdir()
    return folder


def source(dataset: Path, **values: str | bool) -> HubSource:
    return HubSource.model_validate({"kind": "hub", "dataset": str(dataset), **values})


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_of_local_parquet_become_documents(
    dataset: Path, tmp_path: Path, streaming: bool
) -> None:
    counts = collect(source(dataset, streaming=streaming), tmp_path / "out")
    assert counts == {"documents": 4, "files": 0, "skipped_files": 0, "bytes": 15}
    lines = (tmp_path / "out" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["eins", "zwei", "", "größe"]


def test_a_folder_that_cannot_be_listed_is_refused(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` itself leaves such a folder out."""
    (dataset / "more").mkdir()
    refuse_listing(monkeypatch, "more")
    with pytest.raises(DataFormatError, match="/more cannot be read: Permission denied"):
        fingerprint(source(dataset))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"key": "body"}, "has no column 'body', only number, text"),
        ({"key": "number"}, "row 0 of .* has a int in column 'number'"),
        ({"split": "test"}, r"cannot be loaded: (Bad split: test|Unknown split \"test\")"),
    ],
)
def test_a_wrong_split_or_column_is_refused_with_its_name(
    dataset: Path, tmp_path: Path, values: dict, message: str, streaming: bool
) -> None:
    with pytest.raises(DataFormatError, match=message):
        collect(source(dataset, streaming=streaming, **values), tmp_path / "out")


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match="cannot be loaded: Couldn't find any data file"):
        collect(source(tmp_path / "none"), tmp_path / "out")


def test_a_lost_connection_is_retryable_and_the_cache_setting_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    before, cache_directories = constants.HF_HUB_CACHE, {}

    def unreachable(*_: object, cache_dir: str, **__: object) -> None:
        cache_directories.update(datasets=cache_dir, hub=constants.HF_HUB_CACHE)
        raise ConnectionError("Couldn't reach the Hub.\nDetails")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    (tmp_path / "out").mkdir()
    with pytest.raises(
        DownloadError, match="cannot be loaded: Couldn't reach the Hub: check the network"
    ) as caught:
        collect(source(Path("owner/name"), revision=COMMIT), tmp_path / "out")
    assert caught.value.retryable
    assert cache_directories == {
        name: str(tmp_path / ".huggingface" / name) for name in ("datasets", "hub")
    }
    assert before == constants.HF_HUB_CACHE


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Provide the rows of two articles in two files, the second one divided between them."""
    folder = tmp_path / "lines"
    folder.mkdir()
    parts = [
        [
            "",
            " = First = \n",
            "",
            " Text of = the = first . \n",
            " = = Section = = \n",
            " More . \n",
            "",
        ],
        [" = E = mc² = \n", "", " = = = Deep = = = \n"],
        ["without a line break", "", ""],
    ]
    for shard, texts in enumerate(parts):
        pq.write_table(pa.table({"text": texts}), folder / f"train-{shard:05}.parquet")
    (tmp_path / "out").mkdir()
    return folder


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_are_joined_from_one_that_matches_to_the_next(
    lines: Path, tmp_path: Path, streaming: bool
) -> None:
    counts = collect(source(lines, document_start=WIKITEXT, streaming=streaming), tmp_path / "out")
    assert (counts["documents"], counts["rows"]) == (2, 13)
    documents = [
        json.loads(line)
        for line in (tmp_path / "out" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [document["text"] for document in documents] == [
        " = First = \n\n Text of = the = first . \n = = Section = = \n More . ",
        " = E = mc² = \n\n = = = Deep = = = \nwithout a line break",
    ]
    assert [document["source"].rsplit("/", 1)[1] for document in documents] == ["1", "7"]


def test_rows_before_the_first_match_are_a_document(lines: Path, tmp_path: Path) -> None:
    counts = collect(source(lines, document_start="mc²"), tmp_path / "out")
    assert counts["documents"] == 2
    first = json.loads((tmp_path / "out" / "corpus.jsonl").read_text("utf-8").splitlines()[0])
    assert first["source"].endswith("/0")
    assert first["text"].startswith("\n = First")


def test_expression_that_matches_no_row_is_refused(lines: Path, tmp_path: Path) -> None:
    absent = source(lines, document_start="^Chapter")
    with pytest.raises(DataFormatError, match=r"no row matches .*document_start '\^Chapter'"):
        collect(absent, tmp_path / "out")
    with pytest.raises(DataFormatError, match=r"no row from 0 to 3 matches .* at most 30 bytes"):
        collect(absent, tmp_path / "out", document_bytes=30)
    with pytest.raises(ValidationError, match=r"'\(' is no regular expression"):
        source(lines, document_start="(")


def test_limit_of_a_joined_document_counts_bytes_and_names_a_large_row(
    lines: Path, tmp_path: Path
) -> None:
    joined = source(lines, document_start="First")
    with pytest.raises(
        DataFormatError, match=r"row 3 of the data set .* is a document of 26 bytes,"
    ):
        collect(joined, tmp_path / "out", document_bytes=25)
    parts = ["First ", "üüü", "üüü"]
    (tmp_path / "more").mkdir()
    pq.write_table(pa.table({"text": parts}), tmp_path / "more" / "train-0.parquet")
    more = source(tmp_path / "more", document_start="First")
    with pytest.raises(DataFormatError, match=r"no row from 1 to 2 matches .* at most 15 bytes"):
        collect(more, tmp_path / "out", document_bytes=15)  # 12 characters


def test_branch_is_resolved_to_the_commit_that_is_read_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import huggingface_hub

    asked: list[object] = []

    def info(_: object, name: str, *, revision: str | None) -> SimpleNamespace:
        asked.append((name, revision))
        return SimpleNamespace(sha=COMMIT)

    def load(*_: object, revision: str, **__: object) -> datasets.Dataset:
        asked.append(revision)
        return datasets.Dataset.from_dict({"text": ["one"]})

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    (tmp_path / "out").mkdir()
    counts = collect(source(Path("owner/name"), revision="main"), tmp_path / "out")
    assert counts["revision"] == COMMIT
    assert asked == [("owner/name", "main"), COMMIT]


def test_threads_share_the_setting_of_the_cache(tmp_path: Path) -> None:
    from huggingface_hub import constants

    before = constants.HF_HUB_CACHE
    with hub._hub_cache(tmp_path):
        with hub._hub_cache(tmp_path):
            pass
        assert str(tmp_path) == constants.HF_HUB_CACHE
    assert before == constants.HF_HUB_CACHE


def test_fingerprint_depends_on_the_expression_only_if_there_is_one(dataset: Path) -> None:
    assert "document_start" not in fingerprint(source(dataset))
    assert fingerprint(source(dataset, document_start="a"))["document_start"] == "a"


def test_fingerprint_of_a_local_dataset_depends_on_its_files(dataset: Path) -> None:
    before = fingerprint(source(dataset))
    (dataset / "train-00001.parquet").unlink()
    assert fingerprint(source(dataset)) != before
    assert fingerprint(source(dataset, revision="abc"))["revision"] == "abc"


def test_fingerprint_does_not_depend_on_streaming(dataset: Path) -> None:
    assert fingerprint(source(dataset, streaming=False)) == fingerprint(source(dataset))


def test_a_full_disk_is_a_workspace_error(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    def full(*_: object, **__: object) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise DatasetGenerationError(
                "An error occurred while generating the dataset"
            ) from error

    monkeypatch.setattr(datasets, "load_dataset", full)
    with pytest.raises(
        WorkspaceError,
        match=r"cannot write .*\.huggingface: No space left on device: free some space",
    ):
        collect(source(dataset, streaming=False), tmp_path / "out")
