"""Models in the forms of other programs.

transformers is imported here alone, when it is needed; torch likewise.
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


def open_export(directory: Path) -> "tuple[ModelSpec, Mapping[str, torch.Tensor]]":
    """A transformers directory as a model of ours: its spec, and its weights in fp32.

    The weights have our names.

    Each weight is read when it is asked for. The spec knows the special tokens of config.json, and
    the directory as its tokenizer's when there is one that can be read.

    Raises ConversionError: its class or a value of its configuration is none that models here have,
    or files are missing, damaged or of another model.
    """
    from megacore.convert.hf.directory import open_hf
    from megacore.convert.tokenizers import spec_with_tokenizer

    _, spec, tensors = open_hf(directory)
    return spec_with_tokenizer(spec, directory), tensors


def load_model(
    spec: ModelSpec, tensors: "Mapping[str, torch.Tensor]", device: "torch.device | str"
) -> "Model":
    """Our model on `device` with these weights, for evaluation.

    Raises ConversionError when names or shapes are of another model.
    """
    from megacore.convert.source import load_weights

    return load_weights(spec, tensors, device)
