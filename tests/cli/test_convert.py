"""`megacore import` and `megacore export` on the command line."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megacore.cli import app
from megacore.convert.megatron.checkpoint import open_megatron
from megacore.convert.model_source import find_model
from megacore.errors import ConfigError, ConversionError
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.build import train_bpe
from megacore.tokenizer.load import JsonTokenizer
from tests.convert._megatron import ITERATION
from tests.convert._megatron_deepspeed import written_zero1
from tests.convert._models import their_model, tiny_spec


def run(*arguments: object) -> str:
    """Return what the command prints, with single spaces; raise what the command raises."""
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GPT-2 saved by transformers, with a tokenizer in its directory."""
    directory = tmp_path_factory.mktemp("model")
    spec = tiny_spec("gpt2", make_vocab_size_divisible_by=1).model_copy(update={"vocab_size": 260})
    their_model(spec).save_pretrained(directory)
    JsonTokenizer(train_bpe(["abc abc abc abd abd"] * 9, 259), "<|endoftext|>").save(directory)
    return directory


def test_import_and_export_carry_the_tokenizer(model: Path, tmp_path: Path) -> None:
    assert "GPT2LMHeadModel, with its tokenizer" in run(
        "import", "--from-hf", model, "--output", tmp_path / "in"
    )
    source = find_model(tmp_path / "in")
    assert source.directory == str(tmp_path / "in" / "iter_0000000")
    assert source.spec.tokenizer_directory == str(tmp_path / "in" / "tokenizer")
    assert (
        source.spec.special_tokens.eod == 2
    )  # config.json has precedence over the token's spelling
    printed = run(
        "export",
        "--checkpoint",
        tmp_path / "in",
        "--output",
        tmp_path / "out",
        "--dtype",
        "bfloat16",
    )
    assert f"with the tokenizer of {tmp_path / 'in' / 'tokenizer'}" in printed
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "export.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
    text = "abd abc"
    tokenizers = (load_tokenizer(tmp_path / "out"), load_tokenizer(model))
    assert tokenizers[0].encode(text).tolist() == tokenizers[1].encode(text).tolist()
    assert (
        json.loads((tmp_path / "out" / "export.json").read_text(encoding="utf-8"))["dtype"]
        == "bfloat16"
    )
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "push_to_hub" in card
    assert "without comparing it" in card


def test_an_export_to_megatron_is_imported_again(model: Path, tmp_path: Path) -> None:
    run("import", "--from-hf", model, "--output", tmp_path / "in")
    sizes = ("--tensor-model-parallel-size", 2)
    run(
        "export",
        "--checkpoint",
        tmp_path / "in",
        "--output",
        tmp_path / "out",
        "--format",
        "megatron",
        *sizes,
    )
    ranks = sorted(path.name for path in (tmp_path / "out" / "iter_0000000").iterdir())
    assert ranks == ["mp_rank_00", "mp_rank_01"]
    record = json.loads((tmp_path / "out" / "export.json").read_text(encoding="utf-8"))
    assert (record["form"], record["tensor_model_parallel_size"]) == ("megatron", 2)
    printed = run("import", "--from-megatron", tmp_path / "out", "--output", tmp_path / "named")
    assert f"naming the tokenizer that its files name, {tmp_path / 'in' / 'tokenizer'}" in printed
    assert find_model(tmp_path / "named").spec.tokenizer_directory == str(
        tmp_path / "in" / "tokenizer"
    )
    run(
        "import",
        "--from-megatron",
        tmp_path / "out",
        "--output",
        tmp_path / "again",
        "--tokenizer",
        model,
    )
    spec = find_model(tmp_path / "again").spec
    assert (spec.family, spec.vocab_size) == ("gpt", 260)
    assert spec.tokenizer_directory == str(tmp_path / "again" / "tokenizer")


def test_a_deepspeed_checkpoint_is_imported_and_exported_to_megatron(
    model: Path, tmp_path: Path
) -> None:
    spec, tensors = written_zero1(tmp_path / "ds" / f"global_step{ITERATION}")
    (tmp_path / "ds" / "latest").write_text(f"global_step{ITERATION}")
    printed = run(
        "import",
        "--from-deepspeed",
        tmp_path / "ds",
        "--output",
        tmp_path / "in",
        "--tokenizer",
        model,
    )
    assert (
        "DeepSpeed's sharded checkpoint of Megatron-DeepSpeed, gpt, with its tokenizer" in printed
    )
    record = json.loads((tmp_path / "in" / "import.json").read_text(encoding="utf-8"))
    assert (record["form"], record["moments"]) == ("deepspeed", ["exp_avg", "exp_avg_sq"])
    assert len(record["files"]) == 6
    assert find_model(tmp_path / "in").spec.model == spec.model
    run(
        "export",
        "--checkpoint",
        tmp_path / "in",
        "--output",
        tmp_path / "out",
        "--format",
        "megatron",
    )
    exported = open_megatron(tmp_path / "out")
    assert exported.iteration == ITERATION
    assert all(torch.equal(exported.tensors[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("import", "--output", "x"),
            "give one of --from-hf, --from-megatron, --from-deepspeed, --from-neox and",
        ),
        (
            ("import", "--output", "x", "--from-hf", "a", "--from-megatron", "b"),
            "give one of --from-hf",
        ),
        (
            ("import", "--output", "x", "--from-megatron", "a", "--from-deepspeed", "b"),
            "give one of --from-hf",
        ),
        (
            ("export", "--output", "x", "--checkpoint", "c", "--format", "onnx"),
            "--format is onnx: give hf, megatron or torch_dist",
        ),
        (
            ("export", "--output", "x", "--checkpoint", "c", "--dtype", "int8"),
            "--dtype is int8: give float32 or",
        ),
        (
            (
                "export",
                "--output",
                "x",
                "--checkpoint",
                "c",
                "--format",
                "megatron",
                "--dtype",
                "bfloat16",
            ),
            "--dtype bfloat16 is for --format hf",
        ),
        (
            ("export", "--output", "x", "--checkpoint", "c", "--tensor-model-parallel-size", "2"),
            "--tensor-model-parallel-size 2 is for --format megatron",
        ),
    ],
)
def test_conflicting_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConversionError, match=r"config\.json cannot be read \(No such file or directory\)"
    ):
        run("import", "--from-hf", tmp_path, "--output", tmp_path / "out")


@pytest.mark.parametrize("inside", [True, False], ids=["workspace", "elsewhere"])
@pytest.mark.parametrize("seal", ["complete.json", "manifest.json"])
def test_an_output_in_a_checkpoint_or_an_artifact_is_refused(
    seal: str, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path if inside else tmp_path / "other"))
    place = tmp_path / "runs"
    place.mkdir()
    (place / seal).write_text("{}")
    (tmp_path / "link").symlink_to(place)
    tokens = ["tokenize", "--input", "no.jsonl", "--vocab-file", "v", "--merge-file", "m"]
    steps = ["curate", "--input", str(place / seal), "--steps", str(tmp_path / "steps.yaml")]
    (tmp_path / "steps.yaml").write_text("[{step: exact_dedup}]")
    refused = inside or seal == "complete.json"
    for arguments in (
        ["export", "--checkpoint", "nowhere", "--output"],
        ["import", "--from-hf", "nowhere", "--output"],
        ["index", "--data-prefix", "nowhere", "--seq-length", "8", "--output"],
        [*steps, "--output"],
        [*tokens, "--output-prefix"],
    ):
        for output in (place / "new", tmp_path / "link" / "a" / "b"):
            error = CliRunner().invoke(app, [*arguments, str(output)]).exception
            sentence = f"{arguments[-1]} {output} is in {place}, whose {seal} says that it is"
            assert (sentence in str(error)) == refused, error
    assert not refused or [path.name for path in place.iterdir()] == [seal]
