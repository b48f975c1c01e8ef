"""The one way to import deepspeed: for the hardware that is here, quietly, and so that no rank compiles anything."""

import logging
import os
import warnings
from functools import cache
from types import ModuleType

import torch

_COMPILED_ON_THE_WAY = "deepspeed_shm_comm"
"""An operator for sums on one host's CPUs, which DeepSpeed otherwise compiles when it joins the ranks."""


@cache
def import_deepspeed() -> ModuleType:
    """The package, for CPUs and gloo where there is no GPU; a DS_ACCELERATOR that is set already stays."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Of DeepSpeed's own calls, one for each kind and rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    package: ModuleType = deepspeed
    package.utils.logger.setLevel(logging.WARNING)
    package.ops.__compatible_ops__[_COMPILED_ON_THE_WAY] = False
    # It prints its memory while it is made, whatever `memory_breakdown` says.
    package.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None
    return package
