"""Rows of files and of data sets on the hub."""

import errno
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megacore.artifact.manifest import list_files
from megacore.config.finetune import FinetuneDataConfig
from megacore.corpus.formats import BOM, DOCUMENT_BYTES
from megacore.errors import DataFormatError, DownloadError, FileAccessError
from megacore.finetune import dataset
from megacore.finetune.dataset import collect_rows, dataset_fingerprint, open_split
from tests._listing import refuse_listing
from tests.finetune._tiny_models import pair_rows, write_rows

ROWS = pair_rows(20)


def files(train: Path | str, valid: Path | str | None = None, **values: Any) -> FinetuneDataConfig:
    source = {
        "kind": "files",
        "train": [str(train)],
        "valid": [] if valid is None else [str(valid)],
    }
    return FinetuneDataConfig.model_validate({"source": source, **values})


def hub(directory: Path | str, **values: Any) -> FinetuneDataConfig:
    return FinetuneDataConfig.model_validate(
        {"source": {"kind": "hub", "dataset": str(directory), **values}}
    )


def collect(data: FinetuneDataConfig, root: Path, seed: int = 1) -> tuple[dict[str, Any], Path]:
    """Return counts and directory of the artifact."""
    directory = root / "rows"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return collect_rows(data, directory, root / "cache", seed=seed), directory


def rows_of(directory: Path, split: str) -> list[dict[str, Any]]:
    rows = open_split(directory, split)
    assert rows is not None
    return list(rows)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in one of the readable formats."""
    match path.suffix:
        case ".gz":
            write(path.with_suffix(""), rows)
            path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
        case ".zst":
            write(path.with_suffix(""), rows)
            path.write_bytes(zstandard.compress(path.with_suffix("").read_bytes()))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".json":
            path.write_text(json.dumps(rows))
        case _:
            write_rows(path, rows)
    return path


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EACCES, DataFormatError), (errno.EIO, FileAccessError)]
)
def test_a_folder_that_cannot_be_listed_is_refused_and_not_left_out_of_a_glob(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("2023", "2024"):
        write_rows(tmp_path / name / "a.jsonl", ROWS)
    refuse_listing(monkeypatch, "2024", number)
    with pytest.raises(kind, match=r"/2024 .*(Permission denied|Input/output error)"):
        dataset_fingerprint(files(tmp_path / "*" / "*.jsonl"), seed=1)


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".jsonl.zst", ".csv.gz"]
)
def test_all_file_formats_give_the_same_rows(suffix: str, tmp_path: Path) -> None:
    train, valid = (
        write(tmp_path / f"train{suffix}", ROWS[:12]),
        write(tmp_path / f"valid{suffix}", ROWS[12:]),
    )
    counts, directory = collect(files(train, valid), tmp_path)
    assert counts == {"train": 12, "valid": 8}
    assert rows_of(directory, "train") == ROWS[:12]
    assert rows_of(directory, "valid") == ROWS[12:]
    assert open_split(directory, "test") is None


def test_lines_of_text_files_are_rows(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(" = Title = \n\nOne line .\n")
    (tmp_path / "valid.txt").write_text("Another\n")
    _, directory = collect(files(tmp_path / "train.txt", tmp_path / "valid.txt"), tmp_path)
    assert [row["text"] for row in rows_of(directory, "train")] == [
        " = Title = \n",
        "\n",
        "One line .\n",
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".txt"])
def test_a_byte_order_mark_is_skipped(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    rows = [{"text": "the" if suffix == ".txt" else "2020-01-01"}]
    content = b"the" if suffix == ".txt" else write(path, rows).read_bytes()
    path.write_bytes(BOM + content)
    assert list(dataset.read_files([path], "train", tmp_path)) == rows


DATES = ["2020-02-01", "1999-12-31 10:20", "2020-01-01T10:20:30.5Z"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_dates_in_json_stay_as_written(suffix: str, tmp_path: Path) -> None:
    train = [
        {"target": date, "choices": [date, None], "note": {"of": date}, "id": number}
        for number, date in enumerate(DATES)
    ]
    # Text in one file, and only dates in another, of which each has its own types.
    others = [{**train[0], "target": text} for text in ('the "2020-01-01', "\0", "2020-01-01")]
    paths = [
        write(tmp_path / f"{number}{suffix}", rows) for number, rows in enumerate((train, others))
    ]
    source = {"kind": "files", "train": [str(path) for path in paths], "valid": [str(paths[0])]}
    data = FinetuneDataConfig.model_validate({"source": source})
    counts, directory = collect(data, tmp_path)
    assert counts == {"train": 6, "valid": 3}
    assert rows_of(directory, "train") == [*train, *others]
    assert rows_of(directory, "valid") == train
    assert not list((tmp_path / "cache").glob("marked-*"))


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"note": "the"}, [{"note": "cat"}, {"note": 42}, {"note": "runs"}]),
        ({"note": "the"}, [{"note": 42}, {"note": "cat"}]),
        ({"note": "the"}, [{"note": True}]),
        ({"note": "2020-01-01"}, [{"note": "cat"}, {"note": 42}, {"note": "1999-12-31"}]),
        ({"note": ["the"]}, [{"note": ["cat", 42]}, {"note": ["runs", None]}]),
        ({"note": {"of": "the"}}, [{"note": {"of": "cat"}}, {"note": {"of": 42}}]),
        ({"note": "the"}, [{"note": {"of": "cat"}}, {"note": "runs"}]),
        ({"note": [{"of": "the"}]}, [{"note": [{"of": 42}, {"of": "cat"}]}]),
    ],
)
def test_texts_stay_as_written_if_later_files_have_other_values(
    first: dict[str, Any], later: list[dict[str, Any]], suffix: str, tmp_path: Path
) -> None:
    paths = [
        write(tmp_path / f"{number}{suffix}", rows) for number, rows in enumerate(([first], later))
    ]
    rows = dataset.read_files(paths, "train", tmp_path / "cache")
    assert list(rows) == [first, *later]
    _, directory = collect(files(tmp_path / f"[01]{suffix}", paths[0]), tmp_path)
    assert rows_of(directory, "train") == [first, *later]


def test_texts_stay_as_written_in_a_document_of_several_lines(tmp_path: Path) -> None:
    rows = [{"note": "the"}, {"note": "cat"}, {"note": 42}]
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    paths[0].write_text(json.dumps(rows[:1], indent=2))
    paths[1].write_text(json.dumps(rows[1:], indent=2))
    assert list(dataset.read_files(paths, "train", tmp_path / "cache")) == rows


@pytest.mark.parametrize("key", [b'"2020-01-01"', b'"2020-01-01" '])
def test_a_date_as_key_stays_as_written(key: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{" + key + b': "2020-01-01"}\n')
    assert list(dataset.read_files([path], "train", tmp_path)) == [{"2020-01-01": "2020-01-01"}]


def test_files_of_a_glob_are_read_in_order(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write_rows(tmp_path / f"part-{number}.jsonl", ROWS[number * 4 : number * 4 + 4])
    counts, directory = collect(
        files(tmp_path / "part-*.jsonl", tmp_path / "part-0.jsonl"), tmp_path
    )
    assert counts["train"] == 12
    assert rows_of(directory, "train") == ROWS[:12]


def test_held_out_rows_depend_on_the_seed(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", ROWS)
    held_out_rows = []
    for seed in (1, 1, 2):
        counts, directory = collect(files(train, valid_share=0.25), tmp_path, seed)
        assert counts == {"train": 15, "valid": 5}
        training, held_out = rows_of(directory, "train"), rows_of(directory, "valid")
        assert sorted(training + held_out, key=str) == sorted(ROWS, key=str)
        held_out_rows.append(held_out)
    assert held_out_rows[0] == held_out_rows[1] != held_out_rows[2]


def test_share_without_rows_is_refused(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", ROWS[:4])
    with pytest.raises(
        DataFormatError, match=r"has 4 rows, of which data\.valid_share 0\.05 holds 0 out"
    ):
        collect(files(train), tmp_path)


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    digests = []
    for folder in ("one", "another"):
        (tmp_path / folder).mkdir()
        train = write_rows(tmp_path / folder / f"{folder}.jsonl", ROWS)
        _, directory = collect(files(train, valid_share=0.25), tmp_path / folder)
        digests.append({name: entry.sha256 for name, entry in list_files(directory).items()})
    assert digests[0] == digests[1]


def test_fingerprint_depends_on_files_seed_and_share(tmp_path: Path) -> None:
    train, valid = (
        write_rows(tmp_path / "train.jsonl", ROWS),
        write_rows(tmp_path / "valid.jsonl", ROWS),
    )
    with_valid, held_out = (
        dataset_fingerprint(files(train, valid), 1),
        dataset_fingerprint(files(train), 1),
    )
    assert with_valid == dataset_fingerprint(files(train, valid, valid_share=0.5), 2)
    assert held_out != dataset_fingerprint(files(train), 2)
    assert held_out != dataset_fingerprint(files(train, valid_share=0.5), 1)
    write_rows(train, ROWS[1:])
    assert with_valid != dataset_fingerprint(files(train, valid), 1)
    json.dumps(held_out)


def parquet(directory: Path, *splits: str) -> Path:
    directory.mkdir()
    for number, split in enumerate(splits):
        pq.write_table(
            pa.Table.from_pylist(ROWS[number * 4 : number * 4 + 4]),
            directory / f"{split}-00000.parquet",
        )
    return directory


def test_local_copy_of_a_data_set_is_read(tmp_path: Path) -> None:
    counts, directory = collect(
        hub(parquet(tmp_path / "set", "train", "validation", "test"), test="test"), tmp_path
    )
    assert counts == {"train": 4, "valid": 4, "test": 4}
    assert rows_of(directory, "valid") == ROWS[4:8]


def test_mnli_is_validated_on_matched_genres(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    requested_splits = []

    def load(name: str, config: str, *, split: str, **_: Any) -> Any:
        requested_splits.append(split)
        return datasets.Dataset.from_list(ROWS[:2])

    known = ["train", "validation_matched", "validation_mismatched"]
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: known)
    monkeypatch.setattr(datasets, "load_dataset", load)
    collect(hub("nyu-mll/glue", config="mnli"), tmp_path)
    assert requested_splits == ["train", "validation_matched"]
    with pytest.raises(
        DataFormatError,
        match=r"no split 'dev', only train, validation_matched, validation_mismatched",
    ):
        collect(hub("nyu-mll/glue", config="mnli", valid="dev"), tmp_path)


def test_missing_split_is_refused(tmp_path: Path) -> None:
    directory = parquet(tmp_path / "set", "train", "test")
    with pytest.raises(
        DataFormatError,
        match=(
            r"no split 'validation', only train, test: set data\.source\.valid to one of them or "
            r"null"
        ),
    ):
        collect(hub(directory), tmp_path)


def test_lost_connection_is_retryable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def lose(*_: Any, **__: Any) -> None:
        raise ConnectionError("the hub is away")

    monkeypatch.setattr(datasets, "get_dataset_split_names", lose)
    with pytest.raises(
        DownloadError, match="the data set nyu-mll/glue cannot be loaded: the hub is away"
    ) as caught:
        collect(hub("nyu-mll/glue"), tmp_path)
    assert caught.value.retryable


def test_missing_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"none cannot be loaded: .*check data\.source"):
        collect(hub(tmp_path / "none"), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "bad.jsonl",
            b'{"sentence1": "a"}\n{"sentence1": \n',
            r"bad\.jsonl, line 2: not JSON .*'\{\"sentence1\": '",
        ),
        (
            "bad.jsonl",
            b'{"sentence1": "a"}\n[1, 2]\n',
            r"bad\.jsonl, line 2: a list where an object belongs",
        ),
        (
            "bad.jsonl",
            '{"sentence1": "a"}\n{"sentence1": "caf\xe9"}\n'.encode("latin-1"),
            r"bad\.jsonl, line 2: not JSON \('utf-8' codec can't decode",
        ),
        (
            "bad.jsonl",
            b'null\n{"sentence1": "a"}\n',
            r"bad\.jsonl, line 1: a NoneType where an object belongs",
        ),
        (
            "bad.csv",
            b"sentence1,sentence2,label\na,b,1\nc,d,1,2,3\n",
            r"/bad\.csv, line 3: 5 fields, but the header has 3 \(sentence1,sentence2,label\)",
        ),
        (
            "bad.csv",
            b"sentence1\na cat, a dog\na bird, a fish\n",
            r"/bad\.csv, line 2: 2 fields, but the header has 1 \(sentence1\): put a field",
        ),
        (
            "bad.tsv",
            b'sentence1\tlabel\na\t0\n"b\t0\nc\t1\nd" e\t1\n',
            r"/bad\.tsv, line 3: .* expected after '\"': a field that begins with a double quote",
        ),
        ("bad.csv", b'a,b\nx,1\n"y,1\nz,1\n', r"/bad\.csv, line 3: unexpected end of data"),
        ("bad.csv", b"a,label,label\nx,0,1\n", r"line 1: two columns have the name 'label'"),
        (
            "bad.csv.gz",
            gzip.compress("a,b\nx,1\ncaf\xe9,1\n".encode("latin-1"), mtime=0),
            r"/bad\.csv\.gz, line 3: not UTF-8 \(.* at byte 3\): convert the file to UTF-8",
        ),
        ("bad.csv", "a,b\nx,1\n".encode("utf-16-le"), r"line 1: it has zero bytes, as UTF-16 does"),
        ("bad.csv", b"only,two\n1,2\n", r"good\.csv, .*bad\.csv cannot be read as \.csv"),
        ("bad.jsonl", b"", r"bad\.jsonl is empty: remove it from data\.source\.train"),
        (
            "bad.csv.gz",
            gzip.compress(b"a,b\n1,2\n", mtime=0)[:-9],
            r"/bad\.csv\.gz ends in the middle",
        ),
        ("bad.jsonl.zst", b"no frame", r"bad\.jsonl\.zst does not begin as a zstd file does"),
        (
            "bad.md",
            b"text",
            (
                r"train mixes forms, good\.jsonl \(\.jsonl\) and bad\.md \(\.md\): give files of "
                r"one form"
            ),
        ),
    ],
    ids=[
        "not json",
        "no object",
        "not utf-8",
        "null",
        "columns of a row",
        "commas in texts",
        "quotes within a field",
        "open quote",
        "two columns of a name",
        "latin-1",
        "utf-16",
        "other columns",
        "empty",
        "cut",
        "no zstd",
        "other form",
    ],
)
def test_damaged_file_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    good = write(
        tmp_path / ("good.jsonl" if name.endswith(".md") else name.replace("bad", "good")), ROWS[:4]
    )
    (tmp_path / name).write_bytes(content)
    source = {"kind": "files", "train": [str(good), str(tmp_path / name)]}
    with pytest.raises(DataFormatError, match=message):
        collect(FinetuneDataConfig.model_validate({"source": source, "valid_share": 0.5}), tmp_path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_quotes_and_line_ends_of_csv_are_read(end: str, tmp_path: Path) -> None:
    lines = ["text,label", "", f'"a, ""b""{end}c",1', 'the 5" pipe\u2028,2', ",3", ""]
    path = tmp_path / "rows.csv"
    path.write_bytes(end.join(lines).encode())
    rows = dataset.read_files([path], "train", tmp_path)
    assert rows["text"] == [f'a, "b"{end}c', 'the 5" pipe\u2028', None]
    assert rows["label"] == [1, 2, 3]


def test_deeply_nested_line_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b'{"a": ' + b"[" * 200_000 + b"\n")
    with pytest.raises(DataFormatError, match=r"deep\.jsonl, line 2: not JSON"):
        dataset._refuse_unreadable(path, ".jsonl", tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": "x", "a": "2020-01-01"}', "the key a is given twice"),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_line_that_only_python_reads_is_refused_with_its_number(
    line: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"a": "1"}\n' + line + b"\n")
    with pytest.raises(DataFormatError, match=rf"bad\.jsonl, line 2: not JSON .*{message}"):
        dataset.read_files([path], "train", tmp_path)


def test_row_over_the_limit_has_advice_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS[:4])
    assert dataset._ROW_BYTES > DOCUMENT_BYTES
    monkeypatch.setattr(dataset, "_ROW_BYTES", 9)
    with pytest.raises(
        DataFormatError, match=r"rows\.jsonl:1 .*over the limit of 9: shorten or split the row$"
    ):
        dataset.read_files([path], "train", tmp_path)


def test_unknown_file_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    with pytest.raises(
        DataFormatError, match=r"rows\.xlsx, which is none of \.jsonl, \.json, \.csv"
    ):
        collect(files(tmp_path / "rows.xlsx"), tmp_path)


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataFormatError, match=r"data\.source\.train has .*none\*\.jsonl, which names no file"
    ):
        dataset_fingerprint(files(tmp_path / "none*.jsonl"), 1)
    with pytest.raises(DataFormatError, match="which is a directory"):
        collect(files(tmp_path), tmp_path)


def test_split_without_rows_is_refused(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.csv", ROWS)
    (tmp_path / "valid.csv").write_text("sentence1,sentence2,label\n")
    with pytest.raises(DataFormatError, match=r"valid\.csv has no rows"):
        collect(files(train, tmp_path / "valid.csv"), tmp_path)


def test_damaged_artifact_is_refused(tmp_path: Path) -> None:
    _, directory = collect(
        files(write_rows(tmp_path / "train.jsonl", ROWS), valid_share=0.5), tmp_path
    )
    (directory / "train" / "state.json").unlink()
    with pytest.raises(DataFormatError, match="train is damaged"):
        open_split(directory, "train")
