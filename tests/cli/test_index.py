"""`megacore index` writes a complete directory, or fails with one sentence and leaves nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from megacore.cli import app
from megacore.cli._options import repeat_options
from megacore.data import index_directory
from megacore.data.index_directory import MAP_NAMES, map_path, read_description
from megacore.data.index_options import SentenceOptions
from megacore.errors import ConfigError, DataFormatError, MegacoreError, WorkspaceError
from tests.data._files import write_tokens


def run(output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["index", "--seq-length", "10", "--output", str(output), *arguments]
    )


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[str, str]:
    a, b = (write_tokens(tmp_path / name, [count] * 20) for name, count in (("a", 100), ("b", 30)))
    return a, b


def test_index_maps_of_one_data_set_equal_megatron(shared_data: Path, tmp_path: Path) -> None:
    golden = shared_data / "golden" / "separate_final_epoch"
    samples = json.loads((golden / "params.json").read_text())["num_samples"]
    counts = [
        f"--{name}-samples={count}"
        for name, count in zip(("train", "valid", "test"), samples, strict=True)
    ]
    prefix = str(shared_data / "golden" / "C_merged")
    result = run(
        tmp_path / "o",
        "--data-prefix",
        prefix,
        "--split",
        "949,50,1",
        "--seq-length",
        "64",
        *counts,
    )
    assert result.exit_code == 0, result.output
    assert (
        "train: 6,425 samples of 566 sequences with 137,076 tokens, 3 epochs, the last one shuffled"
        in result.output
    )
    for name in ("train", "valid", "test"):
        for map_name in MAP_NAMES:
            assert (
                map_path(tmp_path / "o", name, map_name).read_bytes()
                == map_path(golden, name, map_name).read_bytes()
            )


def test_a_blend_is_written_with_its_members(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    a, b = prefixes
    arguments = ["--data-prefix", "1", a, "3", b, "--split", "8,1,1", "--train-samples", "40"]
    result = run(tmp_path / "deep" / "o", *arguments, "--valid-samples", "4", "--test-samples", "0")
    assert result.exit_code == 0, result.output
    assert "a: 10 drawn\n  b: 30 drawn" in result.output
    description = read_description(tmp_path / "deep" / "o")
    assert [member.prefix for member in description.members] == [a, b]
    assert [member.weights["train"] for member in description.members] == [1.0, 3.0]
    assert description.samples == {"train": 40, "valid": 4, "test": 0}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["o"]


def test_separate_prefixes_per_split_and_options_are_recorded(
    tmp_path: Path, prefixes: tuple[str, str]
) -> None:
    a, b = prefixes
    output = tmp_path / "o"
    output.mkdir()  # an empty directory is accepted
    result = run(
        output,
        *("--train-data-prefix", a, b, "--valid-data-prefix", b, "--seed", "7"),
        *("--packing", "unpacked", "--no-add-extra-token", "--no-drop-last-partial"),
    )
    assert result.exit_code == 0, result.output
    options = read_description(output).options
    assert (options.split, options.seed, options.packing) == (None, 7, "unpacked")
    assert (options.add_extra_token, options.drop_last_partial) == (False, False)
    assert read_description(output).samples == {"train": 40, "valid": 20}


def test_a_split_without_weight_gets_no_samples(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    options = ("--index-style", "neox", "--split", "2,1")
    neox = run(tmp_path / "n", "--data-prefix", prefixes[0], *options)
    assert neox.exit_code == 0, neox.output
    assert read_description(tmp_path / "n").options.style == "neox"
    assert read_description(tmp_path / "n").samples["test"] == 0


def test_sentence_maps_of_t5_are_written(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "s", [4] * 40)
    result = run(
        tmp_path / "o",
        "--data-prefix",
        prefix,
        "--kind",
        "t5",
        "--train-samples",
        "60",
        "--split",
        "39,1",
    )
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "o" / "train_sentence_index.npy").shape == (78, 3)
    assert (
        "train: 78 samples of 39 documents, 39 sequences with 156 tokens, 2 epochs" in result.output
    )
    assert read_description(tmp_path / "o").options.sentences == SentenceOptions("t5")


def test_sentence_maps_of_a_blend_are_written(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    prefix = write_tokens(tmp_path / "s", [4] * 40)
    members = [
        "--train-data-prefix",
        "1",
        prefix,
        "3",
        prefixes[0],
        "--train-samples",
        "40",
        "--seq-length",
        "200",
    ]
    result = run(tmp_path / "b", *members, "--kind", "t5", "--short-seq-prob", "0.5")
    assert result.exit_code == 0, result.output
    assert "s: 10 drawn\n  a: 30 drawn" in result.output
    assert read_description(tmp_path / "b").options.sentences == SentenceOptions(
        "t5", short_seq_prob=0.5
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--data-prefix", "0.3", "{a}", "0.7"], ConfigError, "give a weight before each prefix"),
        (["--data-prefix", "-1", "{a}", "1", "{b}"], ConfigError, "the weight -1.0"),
        (["--data-prefix", "0", "{a}", "0", "{b}"], ConfigError, "the weight 0.0"),
        (["--data-prefix", "nan", "{a}", "1", "{b}"], ConfigError, "the weight nan"),
        (["--data-prefix", "{a}x"], DataFormatError, "ax.idx does not exist"),
        (
            ["--data-prefix", "{a}", "--split", "1,0,0", "--valid-samples", "3"],
            DataFormatError,
            "the valid split of",
        ),
        (
            ["--data-prefix", "{a}", "--seq-length", "10000000"],
            DataFormatError,
            "cut the text into more documents, lower --seq-length, or use more text",
        ),
        (
            ["--data-prefix", "{a}", "{b}", "--split", "1,1,1", "--train-samples", "99"],
            DataFormatError,
            "99 samples",
        ),
        (["--data-prefix", "{a}", "--split", "1,x"], ConfigError, "--split is '1,x'"),
        (["--data-prefix", "{a}", "--seed", "-1"], ConfigError, "the seed of the shuffles is -1"),
        (["--data-prefix", "{a}", "--train-data-prefix", "{b}"], ConfigError, "leave one out"),
        (["--train-data-prefix", "{b}", "--split", "1,1,1"], ConfigError, "leave --split out"),
        ([], ConfigError, "no token files are named"),
        (
            ["--data-prefix", "{a}", "--index-style", "neox", "--packing", "unpacked"],
            ConfigError,
            "packing unpacked",
        ),
        (
            ["--data-prefix", "{a}", "--kind", "bert", "--packing", "unpacked"],
            ConfigError,
            "those of bert are not",
        ),
        (
            ["--data-prefix", "{a}", "--kind", "t5", "--short-seq-prob", "2"],
            ConfigError,
            "short_seq_prob is 2.0",
        ),
        (
            ["--data-prefix", "{a}", "--short-seq-prob", "0.1"],
            ConfigError,
            "--short-seq-prob is for",
        ),
        (
            ["--data-prefix", "{a}", "--kind", "bert"],
            DataFormatError,
            "was the text split into sentences",
        ),
        (
            ["--data-prefix", "{a}", "--kind", "t5"],
            DataFormatError,
            "the split has 0 of 20 documents",
        ),
    ],
)
def test_bad_input_leaves_nothing(
    tmp_path: Path,
    prefixes: tuple[str, str],
    arguments: list[str],
    error: type[MegacoreError],
    message: str,
) -> None:
    a, b = prefixes
    before = sorted(tmp_path.iterdir())
    result = run(
        tmp_path / "o", *(argument.replace("{a}", a).replace("{b}", b) for argument in arguments)
    )
    assert isinstance(result.exception, error), result.output
    assert message in str(result.exception)
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_with_files_is_refused_and_unchanged(
    tmp_path: Path, prefixes: tuple[str, str]
) -> None:
    output = tmp_path / "o"
    output.mkdir()
    (output / "kept").write_text("x")
    result = run(output, "--data-prefix", prefixes[0])
    assert isinstance(result.exception, ConfigError)
    assert "o is not empty: give another --output" in str(result.exception)
    result = run(output / "kept", "--data-prefix", prefixes[0])
    assert "kept is a file: give another --output" in str(result.exception)
    assert [path.name for path in output.iterdir()] == ["kept"]


def test_a_link_is_followed_and_the_working_directory_is_refused(
    tmp_path: Path, prefixes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    result = run(tmp_path / "link", "--data-prefix", prefixes[0], "--split", "8,1,1")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "disk" / "index.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = run(Path(), "--data-prefix", prefixes[0], "--split", "8,1,1")
    assert "is the working directory" in str(result.exception)


def test_a_failure_leaves_no_parent_of_the_output(
    tmp_path: Path, prefixes: tuple[str, str]
) -> None:
    result = run(tmp_path / "a" / "b", "--data-prefix", f"{prefixes[0]}-missing")
    assert isinstance(result.exception, MegacoreError)
    assert not (tmp_path / "a").exists()


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, prefixes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, values: np.ndarray) -> None:
        raise WorkspaceError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(index_directory, "save_array", full)
    before = sorted(tmp_path.iterdir())
    result = run(tmp_path / "o", "--data-prefix", prefixes[0], "--split", "1")
    assert isinstance(result.exception, WorkspaceError)
    assert sorted(tmp_path.iterdir()) == before


def test_the_remains_of_a_killed_process_are_removed(
    tmp_path: Path, prefixes: tuple[str, str]
) -> None:
    remains = tmp_path / "o.tmp-99999999"
    remains.mkdir()
    assert run(tmp_path / "o", "--data-prefix", prefixes[0], "--split", "1").exit_code == 0
    assert not remains.exists()


def test_repeat_options_passes_every_value_to_the_preceding_option() -> None:
    arguments = ["--data-prefix", "-1", "a", "2", "b", "--seed", "3", "--data-prefix=c", "d"]
    assert repeat_options(arguments, ["--data-prefix"]) == [
        *("--data-prefix", "-1", "--data-prefix", "a", "--data-prefix", "2", "--data-prefix", "b"),
        *("--seed", "3", "--data-prefix=c", "d"),
    ]


def test_weights_need_a_number_of_samples(tmp_path: Path) -> None:
    prefixes = [write_tokens(tmp_path / name, [40] * 20) for name in ("a", "b")]
    arguments = [
        "index",
        "--data-prefix",
        "0.3",
        prefixes[0],
        "0.7",
        prefixes[1],
        "--seq-length",
        "16",
    ]
    command = [
        *arguments,
        "--split",
        "1,1,1",
        "--train-samples",
        "5",
        "--output",
        str(tmp_path / "maps"),
    ]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ConfigError)
    assert "the valid split has weights but no --valid-samples" in str(result.exception)
    assert not (tmp_path / "maps").exists()
    result = CliRunner().invoke(app, [*command, "--valid-samples", "2", "--test-samples", "0"])
    assert result.exit_code == 0, result.output
