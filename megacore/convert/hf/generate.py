"""Text generation with transformers, for its models that have no counterpart here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megacore.convert.hf.config import HfConfig
from megacore.convert.tokenizers import missing_end
from megacore.errors import ConfigError, ConversionError, one_line
from megacore.hardware import refuse_unsupported_accelerator
from megacore.jobs.model import DEFAULT_NEW_TOKENS, GenerateOptions
from megacore.tokenizer.load import IncrementalText

_GENERATING = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel")
"""Endings of the names of transformers classes that generate text."""


def check_generates_text(directory: Path) -> None:
    """Raise ConversionError unless the model's class in `config.json` generates text."""
    architectures = HfConfig.read(directory).optional("architectures", list) or ["no named class"]
    if not str(architectures[0]).endswith(_GENERATING):
        raise ConversionError(
            f"{directory} holds a model of {architectures[0]}, which generates no text: give a "
            "model that does, or run this one with transformers' pipeline"
        )


class TransformersWriter:
    """Model of a transformers directory that continues a text, or answers it."""

    def __init__(self, directory: Path, options: GenerateOptions) -> None:
        """Load the model in fp32 and its tokenizer, without network access.

        Raises ConversionError.
        """
        from transformers.utils import logging

        from megacore.convert.parity import load_exported, load_exported_tokenizer

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._directory, self._options = directory, options
        refuse_unsupported_accelerator()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = load_exported(directory).to(self._device)
        self._tokenizer = load_exported_tokenizer(directory)
        self.answers = bool(self._model.config.is_encoder_decoder)
        self._end = missing_end(self._tokenizer, self._model.config)

    def write(self, text: str, emit: Callable[[str], object]) -> None:
        """Generate from `text`, and call `emit` with each piece of new text.

        Raises:
            ConfigError: the text is empty or too long, or the model refuses an option.
        """
        ids: list[int] = self._tokenizer(text)["input_ids"]
        if ids and self._end is not None:
            ids = [*ids, self._end]
        self._check_length(len(ids))
        inputs = torch.tensor([ids], device=self._device)
        pieces = _Pieces(self._tokenizer, emit, () if self.answers else ids)
        options = self._options
        settings: dict[str, Any] = {"do_sample": options.samples, "num_beams": 1}
        if options.samples:
            settings["temperature"] = options.resolved_temperature
            settings["top_k"] = options.top_k or 0
            settings["top_p"] = options.top_p or 1.0
        torch.manual_seed(options.seed)
        try:
            with torch.inference_mode():
                self._model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    **settings,
                    max_new_tokens=self._limit(len(ids)),
                    streamer=pieces,
                )
        except ValueError as error:
            raise ConfigError(
                f"transformers cannot generate with {self._directory}: {one_line(error, 300)}"
            ) from error

    def _positions(self) -> int | None:
        """Return the longest input in tokens; None if the model has no limit."""
        return getattr(self._model.config, "max_position_embeddings", None)

    def _limit(self, length: int) -> int:
        """Return the number of new tokens after an input of `length` tokens."""
        positions = self._positions()
        if positions is None:
            return self._options.max_new_tokens or DEFAULT_NEW_TOKENS
        left = positions - 1 if self.answers else positions - length
        requested = self._options.max_new_tokens
        if requested is not None and requested > left:
            raise ConfigError(
                f"max_new_tokens is {requested}, and the model's {positions} positions leave "
                f"{left}: lower it to at most {left}"
                + ("" if self.answers else ", or shorten the text")
            )
        return requested or min(DEFAULT_NEW_TOKENS, left)

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise ConfigError("the text is empty: give at least one token")
        positions = self._positions()
        longest = None if positions is None else positions - (not self.answers)
        if longest is not None and length > longest:
            raise ConfigError(
                f"the text has {length} tokens and the model {positions} positions: shorten it to "
                f"at most {longest} tokens"
            )


class _Pieces:
    """Receiver of new ids with the interface of transformers' streamers."""

    def __init__(
        self, tokenizer: Any, emit: Callable[[str], object], context: Sequence[int]
    ) -> None:
        def decode(ids: list[int]) -> str:
            # Clean-up changes text that was emitted, such as the space before a comma.
            return str(
                tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )

        self._text = IncrementalText(decode, emit, context)
        self._began = False

    def put(self, value: torch.Tensor) -> None:
        """Take the input's ids first, which are left out, and then each new id."""
        if self._began:
            for token in value.flatten().tolist():
                self._text.add(token)
        self._began = True

    def end(self) -> None:
        """Emit the remaining text."""
        self._text.end()
