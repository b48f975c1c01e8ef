"""Text that appears while it is generated: for one prompt, or line by line in a loop."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megacore.errors import ConfigError, MegacoreError, MemoryExhaustedError
from megacore.jobs.model import GenerateOptions

if TYPE_CHECKING:
    from megacore.jobs.model import ModelSource
    from megacore.tokenizer import Tokenizer

_PROMPT = "> "
_END = "exit"


class Writer(Protocol):
    """Model that continues a text, or answers it."""

    answers: bool
    """True if the new text is an answer, False if it continues the prompt."""

    def write(self, text: str, emit: Callable[[str], object]) -> None:
        """Generate from `text`, and call `emit` with each piece of new text.

        Raises ConfigError, MemoryExhaustedError.
        """


class CheckpointWriter:
    """Model of a checkpoint or an export, in this process, that emits its text at once."""

    def __init__(
        self,
        source: "ModelSource",
        tokenizer: "Tokenizer",
        options: GenerateOptions,
        *,
        ends: tuple[int, ...],
        precision: Any,
        threads: int,
    ) -> None:
        """Load the model of `source`. The first of `ends`, which end a text, ends T5's prompts.

        Raises CheckpointError if the weights are damaged or of another model, MemoryExhaustedError.
        """
        from megacore.generate.weights import load_model
        from megacore.hardware import resolve_precision
        from megacore.kernels.implementation import DTYPES
        from megacore.parallel.mesh import ProcessMesh
        from megacore.ranks.process import choose_device, set_up_arithmetic

        set_up_arithmetic(threads)
        device = choose_device()
        dtype = DTYPES[resolve_precision(precision, device.type)]
        with _memory_errors():
            self._model: Any = load_model(source, ProcessMesh.serial(), device=device, dtype=dtype)
        self._source, self._tokenizer, self._options, self._ends = source, tokenizer, options, ends
        self.answers = source.spec.family == "t5"

    def write(self, text: str, emit: Callable[[str], object]) -> None:
        """Generate from `text`, and call `emit` with each piece of new text.

        Raises:
            ConfigError: the text is empty or too long.
            MemoryExhaustedError: the memory does not suffice for it.
        """
        from megacore.generate.generate import generate
        from megacore.tokenizer.load import IncrementalText

        ids = self._tokenizer.encode(text).tolist()
        prompt = [*ids, self._ends[0]] if ids and self.answers else ids
        pieces = IncrementalText(self._tokenizer.decode, emit, () if self.answers else ids)
        with _memory_errors():
            generate(
                self._model,
                [prompt],
                self._options,
                vocab_size=self._source.spec.vocab_size,
                ends=self._ends,
                start=self._source.spec.special_tokens.pad or 0,
                on_token=lambda _, token: pieces.add(token) if token not in self._ends else None,
            )
        pieces.end()


def transformers_writer(path: Path, options: GenerateOptions) -> Writer | None:
    """Load a model that only transformers generates with; None if `path` is none of transformers.

    Raises ConversionError, also for a model that generates no text, such as a classifier;
    MemoryExhaustedError.
    """
    from megacore.convert.model_source import transformers_directory
    from megacore.ranks.rank import OFFLINE

    directory = transformers_directory(path)
    if directory is None:
        return None
    os.environ.update(OFFLINE)
    from megacore.convert.hf.generate import TransformersWriter, check_generates_text

    check_generates_text(directory)
    with _memory_errors():
        return TransformersWriter(directory, options)


def _memory_errors() -> AbstractContextManager[None]:
    """Translate a failing allocation in the body into MemoryExhaustedError."""
    from megacore.train.memory import translate_memory_errors

    return translate_memory_errors(
        lambda reason: (
            f"the memory does not suffice for the model and the text ({reason}): shorten the text "
            "or lower --max-new-tokens, or divide the model over GPUs with "
            "--tensor-model-parallel-size"
        )
    )


def write_all(writer: Writer, texts: Sequence[str]) -> None:
    """Print the text for each of `texts`, or, if there are none, for each line that is typed in."""
    if not texts:
        chat(writer)
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            _print(f"== prompt {number} ==\n")
        show(writer, text)


def show(writer: Writer, text: str) -> None:
    """Print a prompt's continuation, after the prompt, or its answer, while it is generated."""
    if not writer.answers:
        _print(text)
    try:
        writer.write(text, _print)
    finally:
        _print("\n")


def chat(writer: Writer) -> None:
    """Answer or continue each line of the standard input until its end or `exit`.

    On a terminal an empty line ends it too; Ctrl-C ends only the current text. A line that the
    model refuses is reported, and the next one is read.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  # input() then has a history

        sys.stderr.write("an empty line, exit or Ctrl-D ends; Ctrl-C stops a text\n")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in _lines(terminal):
        try:
            show(writer, line)
        except KeyboardInterrupt:
            if not terminal:
                raise
        except (ConfigError, MemoryExhaustedError) as error:
            _report(error)


def _lines(terminal: bool) -> Iterator[str]:
    while True:
        try:
            line = input(_PROMPT if terminal else "")
        except EOFError:
            if terminal:
                _print("\n")
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            _print("\n")
            continue
        except UnicodeDecodeError as error:
            raise ConfigError(f"the input is not UTF-8 ({error}): convert it first") from error
        # Bytes that are not UTF-8 arrive as surrogates, which no tokenizer takes.
        line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if line.strip() == _END or (terminal and not line.strip()):
            return
        if line.strip():
            yield line


def _report(error: MegacoreError) -> None:
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
