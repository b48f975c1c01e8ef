"""Keys of DeepSpeed's JSON: those of DeepSpeed's own definitions, and those refused here.

Names are dotted: `zero_optimization.stage`. DeepSpeed is imported only when a JSON is read.
"""

import importlib.util
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from inspect import Parameter, signature
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from megacore.errors import dotted
from megacore.foreign.files import nested

Kind = Literal["flag", "size", "integer", "number", "text", "list", "pair"]
AUTO = "auto"
SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""DeepSpeed's schedulers with an equivalent here."""


class Key(NamedTuple):
    """Accepted key."""

    kind: Kind
    """Kind of its value."""
    choices: tuple[Any, ...] = ()
    """Valid values; empty for any."""
    default: Any = None
    """DeepSpeed's value for an absent key; None if it follows from other keys."""


class Refused(NamedTuple):
    """Refused key."""

    reason: str
    """Reason, and what to do instead."""
    off: tuple[Any, ...] = ()
    """Values that request nothing and are dropped, in addition to auto and null. If there are none,
    false and a disabled block are dropped."""


@dataclass(frozen=True)
class Definitions:
    """Definitions of the installed DeepSpeed's JSON, without refused keys."""

    keys: Mapping[str, Key]
    """All accepted keys."""
    renamed: Mapping[str, str]
    """Old and alternative spellings that DeepSpeed also reads."""
    offload_flags: Mapping[str, str]
    """Old flags for offload to the CPU, and the keys of the devices that they set."""
    schedulers: Mapping[str, Mapping[str, Any]]
    """Parameters of each scheduler with DeepSpeed's defaults; None for a parameter without
    default."""
    models: Mapping[str, type[BaseModel]]
    """DeepSpeed's pydantic model of each block that has one."""

    def default(self, key: str) -> Any:
        """Return DeepSpeed's default for an absent key."""
        return self.keys[key].default

    def optimizer(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults, by dotted name, of the optimizer that a JSON selects."""
        import torch

        kind = values["optimizer.type"]
        if kind in ("Adam", "AdamW") and not values.get("optimizer.params.torch_adam"):
            names = [key for key in self.keys if key.startswith("optimizer.params.")]
            return {key: self.default(key) for key in names}
        if kind == "Adam" and values.get("optimizer.params.adam_w_mode", True):
            kind = "AdamW"
        defaults = _defaults(getattr(torch.optim, kind))
        return {f"optimizer.params.{key}": value for key, value in defaults.items()}

    def check(self, values: Mapping[str, Any], name: str) -> None:
        """Validate the blocks of a JSON with DeepSpeed's models.

        Args:
            values: values by dotted name, each already parsed to the kind of its key.
            name: name of the file in messages.

        Raises:
            ValueError: DeepSpeed refuses a value or a combination of values.
        """
        content = nested({key: value for key, value in values.items() if value != AUTO})
        for block, model in self.models.items():
            part: Any = content
            for level in block.split("."):
                part = part.get(level, {})
            try:
                model(**part)
            except ValidationError as error:
                item = error.errors()[0]
                where = dotted((block, *item["loc"]))
                problem = item["msg"].removeprefix("Value error, ")
                raise ValueError(f"{where} of {name} is refused by DeepSpeed: {problem}") from error


_UNTYPED: dict[Kind, str] = {
    "size": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "steps_per_print activation_checkpointing.number_checkpoints",
    "flag": "wall_clock_breakdown memory_breakdown dump_state disable_python_gc "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer optimizer.params.torch_adam",
    "number": "gradient_clipping optimizer.params.max_grad_norm flops_profiler.module_depth "
    "scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr "
    "scheduler.params.warmup_min_ratio scheduler.params.cos_min_ratio",
    "integer": (
        "fp16.initial_scale_power scheduler.params.warmup_num_steps "
        "scheduler.params.total_num_steps"
    ),
    "text": "optimizer.type scheduler.type flops_profiler.output_file",
}
_BY_HAND = {
    **{key: Key(kind) for kind, keys in _UNTYPED.items() for key in keys.split()},
    "communication_data_type": Key("text", ("fp32", "bf16", "fp16")),
    "data_types.grad_accum_dtype": Key("text", ("fp32", "bf16", "fp16")),
    "log_level": Key("text", ("debug", "info", "warning", "error", "critical")),
    "scheduler.params.warmup_type": Key("text", ("linear", "log")),
}
"""Kinds of the keys for which DeepSpeed has no model or no type."""

_SPELLINGS = {
    "bfloat16": "bf16",
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "aio.thread_count": "aio.intra_op_parallelism",
}
"""Old spellings that are not in DeepSpeed's models."""
_OFFLOAD_FLAGS = {
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param.device",
}
"""Old flags for offload that are not in DeepSpeed's models, and the keys that they set."""


def definitions(name: str = "deepspeed.config") -> Definitions:
    """Return the definitions of the installed DeepSpeed's JSON.

    Args:
        name: name of the file in messages.

    Raises:
        ValueError: DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            f"{name} is DeepSpeed's JSON, which DeepSpeed itself checks, and that is not "
            "installed: pip install megacore[deepspeed]"
        )
    return _definitions()


@cache
def _definitions() -> Definitions:
    _import_quietly()
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import constants, lr_schedules
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    monitors = DeepSpeedMonitorConfig.model_fields
    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        **{name: field.annotation for name, field in monitors.items()},
    }
    blocks = {
        "activation_checkpointing": ACT_CHKPT_DEFAULT,
        "aio": AIO_DEFAULT_DICT,
        "flops_profiler": vars(DeepSpeedFlopsProfilerConfig({})),
        "optimizer.params": _defaults(FusedAdam),
    }
    defaults = {
        f"{name}.{key}": value for name, block in blocks.items() for key, value in block.items()
    }
    defaults |= {key: getattr(constants, f"{key.upper()}_DEFAULT", None) for key in _BY_HAND}
    keys = {key: Key(_kind(type(value), (), value), (), value) for key, value in defaults.items()}
    renamed, flags = dict(_SPELLINGS), dict(_OFFLOAD_FLAGS)
    for block, model in models.items():
        _read_model(model, block, keys, renamed, flags)
    for key, by_hand in _BY_HAND.items():
        keys[key] = by_hand._replace(default=keys[key].default)
    return Definitions(
        {key: value for key, value in keys.items() if not _is_refused(key)},
        {key: to for key, to in renamed.items() if not _is_refused(to)},
        flags,
        {kind: _defaults(getattr(lr_schedules, kind)) for kind in SCHEDULER_TYPES},
        models,
    )


def _import_quietly() -> None:
    """Import DeepSpeed for the available hardware.

    Environment variables that the import sets are removed again, because ranks on other hosts may
    inherit the environment.
    """
    before = dict(os.environ)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # does not create a CUDA context
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    for name in set(os.environ) - set(before):
        del os.environ[name]


def _defaults(kind: type) -> dict[str, Any]:
    """Return the parameters of an optimizer or scheduler class and their defaults."""
    return {
        name: None if parameter.default is Parameter.empty else parameter.default
        for name, parameter in signature(kind).parameters.items()
        if name not in ("params", "optimizer", "last_batch_iteration")
    }


def _read_model(
    model: type[BaseModel],
    block: str,
    keys: dict[str, Key],
    renamed: dict[str, str],
    flags: dict[str, str],
) -> None:
    """Add the keys, alternative spellings and offload flags of a model and its nested models."""
    for name, field in model.model_fields.items():
        key, extra = f"{block}.{field.alias or name}", field.json_schema_extra
        if isinstance(extra, dict):  # deprecated
            to = str(extra.get("new_param"))
            if "new_param_fn" in extra:
                flags[key] = f"{block}.{to}.device"
            elif to in model.model_fields:
                renamed[key] = f"{block}.{model.model_fields[to].alias or to}"
            continue
        if field.alias is not None:
            renamed[f"{block}.{name}"] = key
        parts = get_args(field.annotation) or (field.annotation,)
        kind = next(
            (part for part in parts if isinstance(part, type) and part is not type(None)), object
        )
        if issubclass(kind, BaseModel):
            _read_model(kind, key, keys, renamed, flags)
        else:
            choices = [each.value for each in kind] if issubclass(kind, Enum) else []
            default = field.get_default()
            keys[key] = Key(
                _kind(kind, field.metadata, default), (*dict.fromkeys(choices),), default
            )


def _kind(kind: type, bounds: Iterable[Any], default: Any) -> Kind:
    """Return the kind of a key.

    An integer without bounds is a size if its default is not 0: DeepSpeed does not declare a bound
    for every number that must be above 0.
    """
    if issubclass(kind, bool):
        return "flag"
    if issubclass(kind, int):
        bounds = tuple(bounds)
        above = any(hasattr(bound, "gt") for bound in bounds)
        return (
            "size"
            if above or (not bounds and not issubclass(kind, Enum) and default)
            else "integer"
        )
    if issubclass(kind, float):
        return "number"
    if issubclass(kind, list):
        return "list"
    return "pair" if issubclass(kind, tuple) else "text"


def _is_refused(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in REFUSED)


_OUR_CHECKPOINTS = (
    "checkpoints are megacore's own, which any engine and layout can load: see the section "
    "checkpoint"
)
_OUR_LAYOUT = "the division over ranks is that of the section parallel"
_ADAMW = "megacore trains only with AdamW:"
_FP32_MAIN = "main weights, their moments and what checkpoints hold are fp32: remove it"
_ZERO_PP = "quantised communication changes what is learned and is untested here: remove it"
_REMOVED = "DeepSpeed 0.19 no longer has it: remove it"
_UNREAD = "DeepSpeed 0.19 reads it and does nothing with it:"
_NO_EXPERTS = "no model here has experts: remove it"
_SUMMED = "gradients are summed before they are divided:"
_PRECISION = "train.precision decides it: remove it"

_REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {
        "dataloader_drop_last": ("megacore reads the data: see the section data",),
        "data_efficiency curriculum_learning": (
            "megacore reads the data: see data.seq_length_schedule",
        ),
        "checkpoint datastates_ckpt nebula": (_OUR_CHECKPOINTS,),
        "tensor_parallel pipeline": (_OUR_LAYOUT,),
        "sequence_parallel_size data_parallel_size": (_OUR_LAYOUT, 1),
        "seq_parallel_communication_data_type": (_OUR_LAYOUT, "fp32"),
        "expert_parallel moe use_data_before_expert_parallelism": (_NO_EXPERTS,),
        "compression_training amp quantize_training sparse_gradients eigenvalue": (_REMOVED,),
        "sparse_attention elasticity graph_harvesting progressive_layer_drop": (_REMOVED,),
        "weight_quantization": (_ZERO_PP,),
        "torch_autocast": ("it is another kind of mixed precision: use train.precision",),
        "data_types.param_dtype data_types.buffer_dtype": (_PRECISION,),
        "data_types.keep_in_fp32_modules": (_PRECISION, []),
        "gradient_allreduce_op": ("the gradient is the mean over all samples: use mean", "mean"),
        "gradient_predivide_factor": (f"{_SUMMED} use 1.0", 1),
        "prescale_gradients": (f"{_SUMMED} use false",),
        "managed_gradient_accumulation": (
            "DeepSpeed counts the micro batches: set it to true",
            True,
        ),
        "disable_allgather": (f"{_UNREAD} remove it",),
        "vocabulary_size": ("the tokenizer decides it: use model.make_vocab_size_divisible_by",),
        "optimizer.legacy_fusion": ("the optimizer is made by megacore: remove it",),
        "comet.api_key": (
            "what the file says is kept with the run: set COMET_API_KEY in the environment",
        ),
        "compile": ("the models are not compiled: remove it",),
        "hybrid_engine": ("it is for reinforcement learning, which is not done here: remove it",),
        "autotuning": ("it starts jobs of its own: use megacore plan",),
        "fp16.auto_cast": ("models take token ids, which have no precision: remove it",),
        "fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads": (_FP32_MAIN,),
        "bf16.bf16_optimizer_states": (_FP32_MAIN,),
        "bf16.check_grad_overflow": (
            "a gradient that is not finite must leave the weights alone: set it to true",
            True,
        ),
    },
    "zero_optimization.": {
        "elastic_checkpoint pipeline_loading_checkpoint": (_OUR_CHECKPOINTS,),
        "load_from_fp32_weights": (_OUR_CHECKPOINTS, True),
        "leaf_module": (_NO_EXPERTS,),
        "mics_hierarchical_params_gather zeropp_loco_param legacy_stage1": (_REMOVED,),
        "mics_shard_size": (_REMOVED, -1),
        "zero_quantized_weights zero_quantized_nontrainable_weights": (_ZERO_PP,),
        "zero_quantized_gradients": (_ZERO_PP,),
        "zero_hpz_partition_size": (
            "second copies of the weights within a node are untested here: set it to 1",
            1,
        ),
        "zenflow": (
            (
                "its optimizer leaves gradients out of updates and is untested here: use only "
                "offload_optimizer"
            ),
        ),
        "cpu_offload_use_pin_memory": (
            f"{_UNREAD} use pin_memory of offload_optimizer and offload_param",
            True,
        ),
        "compute_grad_norm": ("the norm clips the gradient and is logged: set it to true", True),
        "round_robin_gradients": (
            "DeepSpeed 0.19 then takes one parameter's state for another's, and a checkpoint would "
            "hold wrong values: set it to false",
        ),
        "stage3_module_granularity_threshold module_granularity_threshold": (
            "DeepSpeed 0.19 then gathers whole modules and fails in backward: set it to 0",
            0,
        ),
        "override_module_apply": ("models are built as DeepSpeed expects it: remove it", True),
        "save_muon_momentum_buffer_in_memory": (f"{_ADAMW} remove it",),
    },
    "zero_optimization.offload_optimizer.": {
        "super_offload": ("it is for one kind of machine and untested here",),
        "cpuadam_cores_perc": ("it belongs to super_offload: use launch.threads_per_rank", 0.8),
        "ratio": (
            "the optimizer of the part that stays on the GPU does not follow the learning rate and "
            "weight decay of optim: set it to 1.0",
            1,
        ),
    },
    "optimizer.params.": {
        "fp32_optimizer_states": (_FP32_MAIN, True),
        "amsgrad": (f"{_ADAMW} set it to false",),
        "bias_correction": (f"{_ADAMW} set it to true", True),
        "fused foreach set_grad_none": (
            "it says how Adam is computed, which deepspeed.cpu_adam does here: remove it",
        ),
    },
}
REFUSED = {
    f"{block}{key}": Refused(reason, tuple(off))
    for block, entries in _REFUSED.items()
    for keys, (reason, *off) in entries.items()
    for key in keys.split()
}
"""Keys that DeepSpeed reads, or used to read, and that are refused by name."""
