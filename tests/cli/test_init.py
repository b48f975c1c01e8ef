"""The command `megacore init` on files as users have them."""

import json
import os
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from megacore.cli import app
from megacore.config import RunConfig, load_config
from megacore.config.data import TextSource
from megacore.corpus import survey as corpus_survey
from megacore.corpus.collect import collect
from megacore.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    first + second
    for first in ("ba", "co", "di", "fu", "go", "ha", "li", "mo", "ne", "pu")
    for second in ("ran", "sel", "tik", "vom", "wun", "xas", "yet", "zor", "", "s")
]


def prose(characters: int, seed: int = 1) -> str:
    """Return paragraphs of random words."""
    source, parts, length = random.Random(seed), [], 0
    while length < characters:
        parts.append(" ".join(source.choices(WORDS, k=source.randint(5, 60))) + ".\n\n")
        length += len(parts[-1])
    return "".join(parts)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty directory the working directory."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


def written(name: str) -> RunConfig:
    return load_config(f"{name}.yaml")


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError), result.output
    assert result.exception.exit_code == 2
    assert not list(Path().glob("*.yaml"))
    return str(result.exception)


def test_one_text_file_is_cut_and_divided_in_order(here: Path) -> None:
    (here / "My Book.txt").write_text(prose(200_000))
    result = run("My Book.txt")
    assert result.exit_code == 0, result.output
    assert "wrote my-book.yaml" in result.output
    assert re.search(r" M tokens \(4\.0 passes over the training split\), about ", result.output)
    assert f"-m flows.pretrain --conf {here / 'my-book.yaml'}" in result.output
    config = written("my-book")
    assert isinstance(config.data.source, TextSource)
    assert config.data.source.document_characters == 1000
    assert config.data.source.files == (str(here / "My Book.txt"),)
    assert not config.data.shuffle_documents
    (here / "out").mkdir()
    assert collect(config.data.source, here / "out")["documents"] > 200


def test_infinite_minutes_are_refused(here: Path) -> None:
    (here / "a.txt").write_text(prose(20_000))
    assert "--minutes is inf: give a finite number" in refusal("a.txt", "--minutes", "inf")


def test_every_section_is_explained(here: Path) -> None:
    (here / "a.txt").write_text(prose(100_000))
    run("a.txt")
    text = (here / "a.yaml").read_text()
    assert text.count("  # ") >= 10
    sections = {"data", "model", "optim", "train", "evaluate", "export", "checkpoint"}
    assert sections <= {line.rstrip(":") for line in text.splitlines()}
    assert all(len(line) <= 180 for line in text.splitlines())


def test_the_page_on_configuration_begins_with_such_a_file(here: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    (here / "tinyshakespeare.yaml").write_text(block[1], encoding="utf-8")
    assert written("tinyshakespeare").name == "tinyshakespeare"
    (here / "a.txt").write_text(prose(1_100_000))
    assert run("a.txt").exit_code == 0

    def fields(name: str) -> list[str]:
        text = (here / f"{name}.yaml").read_text(encoding="utf-8")
        return re.findall(r"^ *\w+:|^  # [A-Z]\w+ \w+", text, re.MULTILINE)

    assert fields("tinyshakespeare") == fields("a")
    assert block[1].startswith("# yaml-language-server: $schema=schema.json\n# Written by")


def test_the_file_names_the_schema_to_editors(here: Path) -> None:
    (here / "a.txt").write_text(prose(50_000))
    run("a.txt")
    first = (here / "a.yaml").read_text().splitlines()[0]
    assert first == f"# yaml-language-server: $schema=file://{ROOT / 'conf' / 'schema.json'}"
    (here / "schema.json").touch()
    run("a.txt", "--name", "b")
    assert (here / "b.yaml").read_text().startswith("# yaml-language-server: $schema=schema.json\n")


def test_a_directory_gives_its_text_and_names_what_is_skipped(here: Path) -> None:
    (here / "notes").mkdir()
    for number in range(12):
        (here / "notes" / f"{number}.md").write_text(prose(6_000, number))
    (here / "notes" / "empty.md").touch()
    (here / "notes" / "image.png").write_bytes(b"\x89PNG\0\xff")
    result = run("notes", "--name", "n")
    assert result.exit_code == 0
    remark = "2 of 14 files are skipped: they are empty or not text"
    assert remark in result.output
    assert remark in Path("n.yaml").read_text()
    config = written("n")
    assert isinstance(config.data.source, TextSource)
    assert config.data.source.files == (str(here / "notes"),)
    assert config.data.shuffle_documents


def test_a_path_that_is_given_twice_counts_once(here: Path) -> None:
    (here / "d").mkdir()
    (here / "d" / "a.txt").write_text(prose(100_000))
    assert run("d", "d/../d", str(here / "d")).exit_code == 0
    source = written("d").data.source
    assert isinstance(source, TextSource)
    assert len(source.files) == 1
    assert "# 100," in (here / "d.yaml").read_text()


def test_a_file_in_a_directory_that_is_named_too_is_refused(here: Path) -> None:
    (here / "d").mkdir()
    (here / "d" / "a.txt").write_text(prose(100_000))
    result = run("d", "d/a.txt")
    assert str(result.exception) == "d/a.txt is in d, which is named, too: name only one of them"
    assert not Path("d.yaml").exists()


@pytest.mark.parametrize("blank", ["id", "text"])
def test_json_lines_take_the_field_with_the_longest_text(blank: str, here: Path) -> None:
    """A field of blanks has none, though `text` comes first otherwise."""
    rows = [
        {blank: " " if blank == "text" else str(number), "body": prose(1_000, number)}
        | {"score": number}
        for number in range(100)
    ]
    (here / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("a.jsonl").exit_code == 0
    source = written("a").data.source
    assert source is not None
    assert source.kind == "jsonl"
    assert source.key == "body"
    assert f"The text is in 'body', not in {blank}, score." in Path("a.yaml").read_text()


@pytest.mark.parametrize("name", ["A.JSONL", "c4.00000.json"])
def test_json_lines_are_recognized_by_any_usual_name(here: Path, name: str) -> None:
    (here / "data").mkdir()
    rows = [{"text": prose(1_000, number)} for number in range(20)]
    (here / "data" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("data").exit_code == 0
    source = written("data").data.source
    assert source is not None
    assert source.kind == "jsonl"
    (here / "out").mkdir()
    assert collect(source, here / "out")["documents"] == 20


def test_parquet_takes_its_text_column(here: Path) -> None:
    texts = [prose(1_000, number) for number in range(100)]
    (here / "data").mkdir()
    for part in range(2):
        table = pa.table({"n": list(range(50)), "content": texts[50 * part : 50 * part + 50]})
        pq.write_table(table, here / "data" / f"{part}.parquet")
    assert run("data").exit_code == 0
    source = written("data").data.source
    assert source is not None
    assert source.kind == "parquet"
    assert source.key == "content"
    (here / "out").mkdir()
    assert collect(source, here / "out")["documents"] == 100


def test_parquet_with_text_that_is_not_utf8_is_refused_with_its_row(here: Path) -> None:
    def write(file: str, **columns: list[bytes]) -> None:
        values = {
            key: pa.Array.from_buffers(pa.string(), len(rows), pa.array(rows).buffers())
            for key, rows in columns.items()
        }
        pq.write_table(pa.table(values), here / file)

    texts = [prose(1_000, number).encode() for number in range(100)]
    write("a.parquet", text=[*texts, b"\xff"])
    assert refusal("a.parquet") == (
        "a.parquet row 101 is not UTF-8 under 'text' (invalid start byte): repair or remove the row"
    )
    write("b.parquet", text=[*texts, b"last"], title=[*texts, b"\xff"])
    assert run("b.parquet").exit_code == 0
    assert written("b").data.sources[0].key == "text"  # type: ignore[union-attr]


def test_a_larger_budget_gives_a_model_that_is_not_smaller(here: Path) -> None:
    (here / "a.txt").write_text(prose(700_000))
    sizes = []
    for minutes in ("0.1", "5", "2000"):
        assert run("a.txt", "--name", f"m{minutes}", "--minutes", minutes).exit_code == 0
        model = written(f"m{minutes}").model
        sizes.append(model.num_layers * model.hidden_size**2)
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_an_existing_file_is_never_overwritten(here: Path) -> None:
    (here / "a.txt").write_text(prose(50_000))
    (here / "a.yaml").write_text("mine")
    result = run("a.txt")
    assert isinstance(result.exception, ConfigError)
    assert "a.yaml exists and is not overwritten: give another --name" in str(result.exception)
    assert (here / "a.yaml").read_text() == "mine"
    assert sorted(path.name for path in here.iterdir()) == ["a.txt", "a.yaml"]


def test_in_a_clone_the_file_is_written_to_conf(here: Path) -> None:
    for name in ("conf", "flows"):
        (here / name).mkdir()
    (here / "flows" / "pretrain.py").touch()
    (here / "a.txt").write_text(prose(50_000))
    result = run("a.txt")
    assert (here / "conf" / "a.yaml").is_file()
    assert "make pretrain CONF=a\n" in result.output
    assert 'make pretrain CONF=a ARGS="--dry-run"' in result.output


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b"a\0b", "a.txt is binary"),
        ("a.txt", "ü".encode("latin-1") * 9, "a.txt is not UTF-8 text"),
        ("a.txt", b"A short text.", "too few to divide them into train, validation and test"),
        ("a.jsonl", b"", "a.jsonl has no rows"),
        ("a.txt.gz", b"\x1f\x8b\x08", "a.txt.gz is compressed text: unpack it first"),
        ("a.json", b'[{"text": "b"}]', "a.json is a JSON array, not JSON Lines"),
        ("a.jsonl", b'{"a": 1}\n{"a": 2}\n', "a.jsonl has no field with text (fields: a)"),
        (
            "a.jsonl",
            b'{"a": "b"}\n{"a": null}\n',
            "in 'a', but 1 of the first 2 rows have no text there, the first is row 2",
        ),
        ("a.json", b'{"text": "b"}\n{"text": "c"}\n', "2 bytes in 2 rows, too few to divide"),
        ("a.jsonl", b'{"text": "b"}\n\nnot json\n', "a.jsonl:3 is not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1 holds a JSON list"),
        ("a.parquet", b"PAR1", "a.parquet is a damaged parquet file"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(
    here: Path, name: str, content: bytes, sentence: str
) -> None:
    (here / name).write_bytes(content)
    assert sentence in refusal(name)


def test_a_directory_without_text_is_refused_with_the_reasons(here: Path) -> None:
    (here / "d").mkdir()
    (here / "d" / ".hidden.txt").write_text(prose(20_000))
    (here / "d" / os.fsdecode(b"\xff.txt")).write_text(prose(20_000))
    message = "d holds no file whose name is UTF-8 and begins without a dot: name a file"
    assert message in refusal("d")
    (here / "d" / "empty.md").touch()
    (here / "d" / "image.png").write_bytes(b"\x89PNG\0\xff")
    assert "d holds no text: of 2 files, 1 empty, 1 not UTF-8 text" in refusal("d")


def test_advice_for_a_large_line_can_be_followed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "a.jsonl").write_text('{"text": "long"}\n')
    monkeypatch.setattr(corpus_survey, "DOCUMENT_BYTES", 9)
    with pytest.raises(ConfigError, match=r"a\.jsonl:1 .* name only the other files, and add"):
        corpus_survey.survey([here / "a.jsonl"])


def test_named_files_of_several_kinds_are_refused(here: Path) -> None:
    (here / "a.txt").write_text(prose(50_000))
    (here / "b.jsonl").write_text('{"text": "b"}\n')
    assert "the named files are of several kinds (jsonl, text)" in refusal("a.txt", "b.jsonl")


def test_a_missing_path_and_a_bad_name_are_refused(here: Path) -> None:
    assert "none.txt does not exist" in refusal("none.txt")
    (here / "a.txt").write_text(prose(50_000))
    assert "--name is 'A b': give lower-case letters" in refusal("a.txt", "--name", "A b")
