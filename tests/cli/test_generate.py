"""`megacore generate`: equal text for every layout and form of the weights, and refusals."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.errors import (
    CheckpointError,
    ConfigError,
    DataFormatError,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
    TrainingError,
)
from megacore.jobs.model import GenerateJob
from megacore.tokenizer import load_tokenizer
from tests._limits import HANG
from tests.cli._model import Files, output, run, write_files

PROMPTS = ("--prompt", "the value of", "--prompt", "the sum of step 3 is not the sum of step")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("generate"))


@pytest.mark.slow
def test_every_layout_and_form_gives_the_same_tokens(files: Files) -> None:
    options = (*PROMPTS, "--top-k", 40, "--max-new-tokens", 12, "--json")
    expected = json.loads(output("generate", "--checkpoint", files.checkpoint, *options))
    assert [row["prompt"] for row in expected] == [PROMPTS[1], PROMPTS[3]]
    assert [len(row["tokens"]) == 12 or row["ended"] for row in expected] == [True, True]
    two = output(
        "generate", "--checkpoint", files.checkpoint, *options, "--tensor-model-parallel-size", 2
    )
    assert json.loads(two) == expected
    exported = output("generate", "--checkpoint", files.export, *options, "--batch-size", 1)
    assert json.loads(exported) == expected


def test_prompts_of_a_file_follow_those_of_the_command_line(files: Files, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("\ufeffthe value of\nthe sum\n", encoding="utf-8")
    options = ("--prompt", "step", "--prompt-file", tmp_path / "prompts", "--max-new-tokens", 4)
    text = output(
        "generate",
        "--checkpoint",
        files.checkpoint.parent,
        "--tokenizer",
        files.tokenizer,
        *options,
    )
    for number, prompt in enumerate(("step", "the value of", "the sum"), 1):
        assert f"== prompt {number} ==\n{prompt}" in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), ConfigError, "there is no prompt: give --prompt, --prompt-file or --interactive"),
        (("--prompt", ""), ConfigError, "prompt 1 is empty: give it at least one token"),
        (
            ("--prompt", "a", "--top-p", 1.5),
            ConfigError,
            "top_p is 1.5: give a probability above 0 and up to 1",
        ),
        (("--prompt", "a", "--seed", 2**64), ConfigError, f"--seed is {2**64}: give one of -"),
        (
            ("--prompt", "a", "--max-new-tokens", 64),
            ConfigError,
            "max_new_tokens is 64, but prompt 1 has 1 of the",
        ),
        (("--prompt", "zq" * 40), ConfigError, "prompt 1 has 80 tokens and the model 64 positions"),
        (("--prompt", "a", "--prompt", "b\udcff"), ConfigError, r"--prompt 'b\udcff' has bytes"),
        (
            ("--prompt", "a", "--prompt-file", "nowhere"),
            DataFormatError,
            "nowhere cannot be read (No such file or directory): give a text file",
        ),
        (
            ("--prompt", "a", "--precision", "fp8"),
            ConfigError,
            "--precision is fp8: give one of auto, fp32, bf16, fp16",
        ),
        (
            ("--prompt", "a", "--tokenizer", "nowhere"),
            DataFormatError,
            "the tokenizer nowhere is no directory",
        ),
        (
            ("--prompt", "a", "--tensor-model-parallel-size", 3),
            ConfigError,
            "model.num_attention_heads 4 is not a multiple of --tensor-model-parallel-size 3",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    files: Files, arguments: tuple[object, ...], error: type[MegacoreError], message: str
) -> None:
    result = run("generate", "--checkpoint", files.checkpoint, *arguments)
    assert isinstance(result.exception, error), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def written(directory: Path, prompt: list[int], count: int) -> list[int]:
    """Return the most probable tokens after `prompt`, none of which ends the text."""
    import torch

    from megacore.convert.model_source import find_model
    from megacore.generate.generate import generate
    from megacore.generate.weights import load_model
    from megacore.jobs.model import GenerateOptions
    from megacore.parallel.mesh import ProcessMesh

    source = find_model(directory)
    model = load_model(
        source, ProcessMesh.serial(), device=torch.device("cpu"), dtype=torch.float32
    )
    options = GenerateOptions(max_new_tokens=count)
    [continuation] = generate(model, [prompt], options, vocab_size=source.spec.vocab_size)  # type: ignore[arg-type]
    return list(continuation.tokens)


def test_every_end_of_the_model_ends_a_text(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.ranks.process.set_up_arithmetic", lambda threads: None)
    arguments = ("--prompt", PROMPTS[1], "--max-new-tokens", 20)
    tokenizer = load_tokenizer(files.tokenizer)
    prompt = tokenizer.encode(PROMPTS[1]).tolist()
    new = written(files.export, prompt, 20)
    model = tmp_path / "model"
    shutil.copytree(files.export, model)
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, new[9], new[5]]}), encoding="utf-8"
    )
    first = min(new.index(new[9]), new.index(new[5]))
    expected = tokenizer.decode([*prompt, *new[:first]])
    assert output("generate", model, *arguments) == f"{expected}\n"
    jobs = []

    def run_job(module: str, job: GenerateJob, scratch: Path) -> dict[str, object]:
        jobs.append(job)
        return {"continuations": [{"tokens": [new[0], new[5]], "ended": True}]}

    monkeypatch.setattr("megacore.ranks.stages.run_job", run_job)
    [row] = json.loads(output("generate", model, *arguments, "--json"))
    assert jobs[0].ends == (0, new[9], new[5])
    assert row["continuation"] == tokenizer.decode(new[:1])


def test_models_that_do_not_continue_text_are_refused(files: Files, tmp_path: Path) -> None:
    result = run("generate", "--checkpoint", files.bert, "--prompt", "a")
    assert isinstance(result.exception, ConfigError)
    assert "holds a model of family bert, which fills in masked words" in str(result.exception)
    result = run("generate", "--checkpoint", tmp_path / "nowhere", "--prompt", "a")
    assert isinstance(result.exception, CheckpointError)


def test_a_run_is_found_by_the_beginning_of_its_key(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    run_directory = tmp_path / "runs" / "0123456789abcdef"
    shutil.copytree(files.checkpoint, run_directory / "checkpoints" / files.checkpoint.name)
    assert output("generate", "0123", "--prompt", "the", "--max-new-tokens", 1).startswith("the")
    written = output("export", "--checkpoint", "0123", "--output", tmp_path / "exported")
    assert f"from {run_directory}" in written
    refused = run("evaluate", "--checkpoint", "0123", "--passkey", 1)
    assert "the passkey test has the length 1" in str(refused.exception)


@pytest.mark.parametrize(
    ("error", "named", "kept"),
    [
        (RankLostError, True, True),
        (TrainingError, False, True),
        (MemoryExhaustedError, False, False),
        (ConfigError, False, False),
    ],
)
def test_the_log_of_ranks_that_crash_is_kept(
    error: type[MegacoreError],
    named: bool,
    kept: bool,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(module: str, job: object, scratch: Path) -> None:
        log = scratch / "generate.log"
        log.write_text("Traceback")
        raise error("rank 0 ended" + (f"; last lines of {log}: Traceback" if named else ""))

    monkeypatch.setattr("megacore.ranks.stages.run_job", crash)
    result = run("generate", files.checkpoint, "--prompt", "the", "--prompt", "value")
    assert isinstance(result.exception, error)
    logs = re.findall(r"/[^ :)]+generate\.log", str(result.exception))
    assert len(logs) == kept
    for log in logs:
        assert Path(log).read_text() == "Traceback"
        shutil.rmtree(Path(log).parent)


def test_a_key_of_nothing_is_refused_with_the_command_that_lists_runs() -> None:
    result = run("generate", "0123456789abcdef", "--prompt", "a")
    assert isinstance(result.exception, CheckpointError)
    assert "give a run that `megacore runs` lists" in str(result.exception)


def test_a_wrong_vocabulary_is_refused_with_both_sizes_and_an_exit_code(
    files: Files, tmp_path: Path
) -> None:
    command = [
        "--checkpoint",
        files.checkpoint,
        "--prompt",
        "a",
        "--tokenizer",
        files.other_tokenizer,
    ]
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from megacore.cli import main; main()",
            "generate",
            *map(str, command),
        ],
        capture_output=True,
        text=True,
        timeout=HANG,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 2
    assert result.stderr.startswith(
        f"error: the tokenizer in {files.other_tokenizer} has a vocabulary of 310 entries"
    )
    assert "one of 300: give --tokenizer the one that the model was trained with" in result.stderr
    assert list(tmp_path.iterdir()) == []
