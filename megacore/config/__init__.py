"""Definitions of all configuration values of a run."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacore.config.finetune import FinetuneConfig
    from megacore.config.load import load_config, load_finetune_config, parse_overrides, read_config
    from megacore.config.run import RunConfig

__all__ = [
    "FinetuneConfig",
    "RunConfig",
    "load_config",
    "load_finetune_config",
    "parse_overrides",
    "read_config",
]


def __getattr__(name: str) -> Any:
    """Import and return a public name on first access.

    Building all sections takes a while, and commands that only work on files need one section.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megacore.config.load"), name)
