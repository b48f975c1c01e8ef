"""Text of one prompt or of each typed line, printed while it is generated."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megacore.cli.chat import CheckpointWriter, chat, transformers_writer, write_all
from megacore.convert.model_source import find_model, find_tokenizer
from megacore.errors import ConfigError, ConversionError, MemoryExhaustedError
from megacore.generate.generate import generate
from megacore.generate.weights import load_model
from megacore.jobs.model import GenerateOptions
from megacore.parallel.mesh import ProcessMesh
from tests._limits import HANG
from tests.cli._model import Files, run, write_files
from tests.finetune._tiny_models import write_model

MAIN = [sys.executable, "-c", "from megacore.cli import main; main()", "generate"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("chat"))


class Echo:
    """Writer that writes each word of the text, in capitals, as a piece of its own."""

    answers = True

    def write(self, text: str, emit: Callable[[str], object]) -> None:
        for word in text.split():
            if word == "stop":
                raise KeyboardInterrupt
            if word == "long":
                raise ConfigError("the text is too long")
            if word == "large":
                raise MemoryExhaustedError("the memory does not suffice")
            emit(word.upper())


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that sets the lines of a terminal; None stands for Ctrl-C."""

    def set_lines(*lines: str | None, terminal: bool = True) -> None:
        remaining = iter(lines)

        def read(prompt: str) -> str:
            assert prompt == ("> " if terminal else "")
            line = next(remaining, "EOF")
            if line is None:
                raise KeyboardInterrupt
            if line == "EOF":
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)

    return set_lines


@pytest.mark.parametrize("last", ["", "exit", "EOF"])
def test_loop_survives_interruptions_and_refused_lines(
    typed: Callable[..., None], capsys: pytest.CaptureFixture[str], last: str
) -> None:
    typed("a b", None, "c stop d", "long", "large", "e", last, "never")
    chat(Echo())
    output = capsys.readouterr()
    assert output.out.split() == ["AB", "C", "E"]
    assert output.err.splitlines()[1:] == [
        "error: the text is too long",
        "error: the memory does not suffice",
    ]


@pytest.mark.parametrize("part", ["generate", "weights.load_model"])
def test_lack_of_memory_is_one_sentence(
    part: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr("megacore.ranks.process.set_up_arithmetic", lambda threads: None)
    monkeypatch.setattr(
        f"megacore.generate.{part.replace('generate', 'generate.generate')}", exhausted
    )
    result = run("generate", files.checkpoint, "--prompt", "the value", "--max-new-tokens", 2)
    assert isinstance(result.exception, MemoryExhaustedError)
    assert str(result.exception).startswith(
        "the memory does not suffice for the model and the text (CUDA out of memory.): shorten"
    )


def test_empty_lines_of_a_pipe_are_skipped(
    typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("a", "", "caf\udce9", terminal=False)
    chat(Echo())
    assert capsys.readouterr() == ("A\nCAF�\n", "")


def test_streamed_text_equals_that_of_the_whole_generation(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.ranks.process.set_up_arithmetic", lambda threads: None)
    options = GenerateOptions(max_new_tokens=20, top_k=40)
    source = find_model(files.checkpoint)
    tokenizer = find_tokenizer(source, None)
    writer = CheckpointWriter(source, tokenizer, options, ends=(0,), precision="fp32", threads=1)
    write_all(writer, ["the value of"])
    import torch

    model = load_model(
        source, ProcessMesh.serial(), device=torch.device("cpu"), dtype=torch.float32
    )
    prompt = tokenizer.encode("the value of").tolist()
    (expected,) = generate(model, [prompt], options, vocab_size=source.spec.vocab_size, ends=[0])  # type: ignore[arg-type]
    new = expected.tokens[:-1] if expected.ended else expected.tokens
    assert len(new) > 5
    assert capsys.readouterr().out == tokenizer.decode([*prompt, *new]) + "\n"


@pytest.mark.parametrize("added", [True, False], ids=["end added", "no end added"])
def test_seq2seq_model_of_transformers_answers_like_its_own_generation(
    tmp_path: Path, added: bool
) -> None:
    """A source has one end token, also if the tokenizer does not add it."""
    export = tmp_path / "export"
    write_model(export / "model", "blenderbot")
    path = export / "model" / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    assert values["post_processor"] is not None
    if not added:
        path.write_text(json.dumps(values | {"post_processor": None}), encoding="utf-8")
    writer = transformers_writer(export, GenerateOptions(max_new_tokens=8))
    assert writer is not None
    assert writer.answers
    pieces: list[str] = []
    writer.write("the cat sees", pieces.append)
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(export / "model")
    ids = tokenizer("the cat sees", add_special_tokens=False)["input_ids"]
    inputs = torch.tensor([[*ids, model.config.eos_token_id]])
    mask = torch.ones_like(inputs)
    written = model.generate(
        inputs, attention_mask=mask, max_new_tokens=8, do_sample=False, num_beams=1
    )[0]
    assert "".join(pieces) == tokenizer.decode(written, skip_special_tokens=True)
    assert len(pieces) > 1
    with pytest.raises(ConfigError, match="the text has 101 tokens and the model 64 positions"):
        writer.write("cat " * 100, pieces.append)
    assert transformers_writer(tmp_path, GenerateOptions()) is None


def test_a_classifier_is_named_as_a_model_that_generates_no_text(tmp_path: Path) -> None:
    values = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    result = run("generate", tmp_path, "--prompt", "a")
    assert isinstance(result.exception, ConversionError)
    assert "a model of BertForSequenceClassification, which generates no text" in str(
        result.exception
    )


def test_terminal_has_a_prompt_and_ctrl_c_stops_only_the_answer(files: Files) -> None:
    main, terminal = pty.openpty()
    command = [*MAIN, str(files.export), "--interactive", "--max-new-tokens", "4"]
    child = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)

    def until(text: str) -> str:
        seen, deadline = b"", time.monotonic() + HANG
        while text.encode() not in seen:
            readable, _, _ = select.select([main], [], [], max(0, deadline - time.monotonic()))
            assert readable, f"no {text!r} after {seen!r}"
            seen += os.read(main, 1000)
        return seen.decode(errors="replace")

    try:
        until("> ")
        for _ in range(30):  # Python misses a signal just before it waits for a key
            child.send_signal(2)
            if select.select([main], [], [], 10)[0]:
                break
        until("> ")
        os.write(main, b"the value\n")
        shown = until("> ")
        while shown.count("the value") < 2:  # prompts of further signals come before the input
            shown += until("> ")
        os.write(main, b"\n")
        assert child.wait(HANG) == 0
    finally:
        child.kill()
        os.close(main)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model is named"),
        (("m", "--checkpoint", "m"), "MODEL and --checkpoint are both given"),
        (("m", "--interactive", "--json"), "leave out --json, or --interactive"),
        (("m", "--interactive", "--prompt", "a"), "leave out --prompt, or"),
        (("models:/m@candidate", "--prompt", "a"), "mlflow artifacts download -u models:/m@"),
    ],
)
def test_contradicting_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    result = run("generate", *arguments)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
