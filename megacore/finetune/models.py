"""Configuration and tokenizer of a transformers directory, read without a network and without running its code."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megacore.config.finetune import PretrainedConfig
from megacore.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_DIRECTORY = "model"
"""The transformers directory, below the artifact of the stage `pretrained`."""
CONFIG_NAME = "config.json"

T = TypeVar("T")


def read_model_config(model: PretrainedConfig, pretrained_directory: Path) -> Any:
    """The transformers configuration of a collected model. Raises ConfigError."""
    from transformers import AutoConfig

    directory = pretrained_directory / MODEL_DIRECTORY
    refuse_remote_code(model.path, directory)
    return _loaded(model.path, "configuration", lambda: AutoConfig.from_pretrained(directory, **_OWN_CODE))


def refuse_remote_code(path: str, directory: Path) -> None:
    """Raise ConfigError for a model whose class transformers does not have; `path` is what errors call it."""
    from transformers import CONFIG_MAPPING

    try:
        values = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path {path} has no readable {CONFIG_NAME} ({error}): give a directory that save_pretrained wrote"
        ) from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind in CONFIG_MAPPING:
        return
    if isinstance(values, dict) and "auto_map" in values:
        raise ConfigError(
            f"model.path {path} is of model_type {kind!r} and needs code of its own, which is never run here: give a "
            "model whose class transformers has"
        )
    raise ConfigError(
        f"model.path {path} has model_type {kind!r} in its {CONFIG_NAME}, which transformers does not know: give a "
        "model whose class it has"
    )


def read_tokenizer(model: PretrainedConfig, pretrained_directory: Path) -> "PreTrainedTokenizerBase":
    """Its tokenizer, with `model.pad_token` as padding where that is given.

    Raises ConfigError when transformers refuses it, or the padding token is not in its vocabulary.
    """
    from transformers import AutoTokenizer

    directory = pretrained_directory / MODEL_DIRECTORY
    load: Callable[[], Any] = lambda: AutoTokenizer.from_pretrained(directory, **_OWN_CODE)  # noqa: E731
    tokenizer = _loaded(model.path, "tokenizer", load)
    if not len(tokenizer):
        raise ConfigError(f"model.path {model.path} has no tokenizer: copy its tokenizer.json beside config.json")
    token = model.pad_token
    if token is not None:
        if token not in tokenizer.get_vocab():
            raise ConfigError(
                f"model.pad_token is {token!r}, which the tokenizer of {model.path} lacks: name one of its "
                f"{len(tokenizer)} tokens, such as its end of text {tokenizer.eos_token!r}"
            )
        tokenizer.pad_token = token
    result: PreTrainedTokenizerBase = tokenizer
    return result


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and tables of transformers and datasets: what matters of them is checked here."""
    import datasets
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # it has no types

    bars = (logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled())
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars[0]:
            logging.enable_progress_bar()
        if bars[1]:
            datasets.enable_progress_bars()


_OWN_CODE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Nothing is downloaded, and no code that comes with a model is run."""


def _loaded(path: str, part: str, load: Callable[[], T]) -> T:
    try:
        with quiet():
            return load()
    except MemoryError:
        raise
    except Exception as error:  # safetensors and tokenizers raise plain Exception
        raise ConfigError(
            f"transformers cannot load the {part} of model.path {path}: {' '.join(str(error).split())[:300]}"
        ) from error
