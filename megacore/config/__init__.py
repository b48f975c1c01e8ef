"""One definition of every value a run takes."""

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
    """The parts by name, imported when they are asked for.

    Commands on files read one section, and building all takes a while.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megacore.config.load"), name)
