"""Tests of sources on the Hugging Face hub."""

import errno
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megacore.config.data import HubSource
from megacore.corpus.collect import collect, fingerprint
from megacore.errors import DataFormatError, DownloadError, WorkspaceError


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
        collect(source(Path("owner/name")), tmp_path / "out")
    assert caught.value.retryable
    assert cache_directories == {
        name: str(tmp_path / ".huggingface" / name) for name in ("datasets", "hub")
    }
    assert before == constants.HF_HUB_CACHE


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
