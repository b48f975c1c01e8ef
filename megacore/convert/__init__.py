"""Conversion between megacore's models and those of other programs.

The package imports transformers and torch only when they are needed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.config.spec import ModelSpec
from megacore.convert.counterparts import exportable

if TYPE_CHECKING:
    import torch

    from megacore.models.base import Model

__all__ = ["exportable", "load_model", "open_export"]


def open_export(directory: Path | str) -> "tuple[ModelSpec, Mapping[str, torch.Tensor]]":
    """Open a transformers directory as a megacore model.

    Args:
        directory: transformers directory.

    Returns:
        The spec, with the special tokens of config.json and the tokenizer if there is a readable
        one, and the fp32 weights under our names. Each weight is read on access.

    Raises:
        ConversionError: if the class or a value of its configuration has no counterpart here, or
            files are missing, damaged or of another model.
    """
    from megacore.convert.hf.directory import open_hf
    from megacore.convert.tokenizers import spec_with_tokenizer

    directory = Path(directory)
    opened = open_hf(directory)
    return spec_with_tokenizer(opened.spec, directory), opened.tensors


def load_model(
    spec: ModelSpec, tensors: "Mapping[str, torch.Tensor]", device: "torch.device | str"
) -> "Model":
    """Build our model on `device` with these weights, in evaluation mode.

    Raises:
        ConversionError: if names or shapes are those of another model.
    """
    from megacore.convert.source import load_weights

    return load_weights(spec, tensors, device)
