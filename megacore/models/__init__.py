"""Models, built from layers that take their tensor-parallel group explicitly."""

from megacore.models.build import build_model
from megacore.models.gpt import GPTModel

__all__ = ["GPTModel", "build_model"]
