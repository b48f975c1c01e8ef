"""Translation of DeepSpeed's JSON and flags: ZeRO, precision, optimizer and schedule."""

import re
from collections.abc import Mapping
from typing import Any

from megacore.adopt.rules import (
    BadValueError,
    Draft,
    Place,
    Setting,
    Settings,
    first,
    integer,
    integer_of,
    number,
    sources,
    switch,
    word,
)
from megacore.config.deepspeed import FIELD_BY_KEY
from megacore.config.parallel import ZERO_STAGES
from megacore.foreign.deepspeed_keys import REFUSED
from megacore.foreign.files import leaves, read_number

_MOST_STAGE = 3
JSON_VALUES = {
    "gradient_clipping": "optim.clip_grad",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.eps": "optim.adam_eps",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "optimizer.params.max_grad_norm": "optim.clip_grad",
    "fp16.loss_scale_window": "optim.loss_scale.window",
    "fp16.hysteresis": "optim.loss_scale.hysteresis",
    "fp16.min_loss_scale": "optim.loss_scale.minimum",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "train_batch_size": "train.global_batch_size",
}
"""Keys of the JSON with the same meaning as a value of the configuration."""
_STARTS_WITH = {
    "curriculum_learning.": (
        "curriculum learning, which drops the tokens beyond its length",
        "data.seq_length_schedule, which drops none",
    ),
    "data_efficiency.": (
        "data efficiency: sampling by difficulty, dropped tokens",
        "the section data",
    ),
    "compression_training.": ("compression", "training of all weights"),
    "sparse_attention.": ("sparse attention", "model.sliding_window"),
    "elasticity.": ("elastic batches", "launch.nnodes MIN:MAX"),
    "autotuning.": ("DeepSpeed's tuning", "megacore plan --search"),
    "progressive_layer_drop.": ("dropped layers", "all layers"),
    "amp.": ("Apex' mixed precision", "train.precision"),
}
"""Blocks that are refused if they are enabled: the feature and the nearest thing."""
_SAME_RESULT = {
    "prescale_gradients": "it changes the rounding of sums only",
    "gradient_predivide_factor": "it changes the rounding of sums only",
    "steps_per_print": "see train.log_interval",
    "wall_clock_breakdown": "times are in events.jsonl",
    "dump_state": "see events.jsonl",
    "fp32_allreduce": "gradients are summed in fp32",
    "communication_data_type": "see parallel.grad_reduce_dtype",
    "zero_allow_untested_optimizer": "the optimizer is AdamW",
    "zero_force_ds_cpu_optimizer": "see deepspeed.cpu_adam",
    "fp16.fp16": "train.precision decides it",
    "bf16.bf16": "train.precision decides it",
    "fp16.type": "train.precision decides it",
    "fp16.auto_cast": "models take token ids, which have no precision",
    "fp16.consecutive_hysteresis": "overflows count since the scale last grew",
    "data_types.grad_accum_dtype": "gradients accumulate in fp32",
    "bf16.immediate_grad_update": "gradients accumulate in fp32",
}
_BLOCKS = (
    "tensorboard.",
    "wandb.",
    "csv_monitor.",
    "comms_logger.",
    "flops_profiler.",
    "comet.",
    "aio.",
    "activation_checkpointing.",
    "checkpoint.",
    "monitor_config.",
)
"""Blocks of reports and of memory, which change no result."""
_SCALE_FLAGS = {
    "--loss-scale": "initial",
    "--initial-loss-scale": "initial",
    "--min-loss-scale": "minimum",
    "--loss-scale-window": "window",
    "--hysteresis": "hysteresis",
}
_DYNAMIC = frozenset(
    f"fp16.{key}"
    for key in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
)
_SCALE_DEFAULTS = {"initial": 2.0**16, "window": 1000, "hysteresis": 2, "minimum": 1.0}
"""DeepSpeed's loss scale of fp16 without keys in the JSON."""
_CONSTANT_WINDOW = 10**9
"""Window of a loss scale that never grows."""
_ACTIVATIONS = {
    "partition_activations": "stored activations divided over tensor-parallel ranks",
    "cpu_checkpointing": "offload of activations",
}
"""Fields of the section deepspeed that the engine native has nothing for."""
_OTHER_ADAM = {
    "optimizer.params.adam_w_mode": "Adam with weight decay as a part of the gradient",
    "optimizer.params.bias_correction": "Adam without correction of its moments",
}
"""Options of Adam that change its results if they are false."""
_OWN = {
    "optimizer": "the program passes its own optimizer",
    "scheduler": "the program passes its own schedule (old versions of DeepSpeed took the JSON's)",
}
"""Blocks that DeepSpeed does not read if a program passes these objects itself."""


def put_zero(settings: Settings, draft: Draft) -> None:
    """Set ZeRO from the flags of Megatron-DeepSpeed and its JSON."""
    json = settings.json
    used, flag = settings.get("--deepspeed"), settings.get("--zero-stage")
    path = settings.get("--deepspeed_config") or settings.get("--deepspeed-config")
    cpu = settings.get("--cpu-optimizer")
    if used is None and path is None:
        for setting in (flag, cpu):
            if setting is not None:
                draft.ignore(setting, "it is read with --deepspeed only")
        return
    stage = integer_of(flag, draft, "deepspeed.zero_stage", most=_MOST_STAGE)
    _ignore_scales(settings, draft)
    if json is not None and path is not None:
        read_json(draft, json, path.place, word(first(path)), own_optimizer=True)
    elif path is not None:
        draft.remarks.append(
            f"{path}: this file was not found; give it as another FILE, so that it is read too"
        )
    if draft.get("train.precision", "fp16" if "--fp16" in settings else "") == "fp16":
        put_scale(draft)
    if json is not None and "gradient_clipping" not in json and "optim.clip_grad" in draft.values:
        draft.remarks.append(
            f"{path} does not say gradient_clipping, so that DeepSpeed does not clip; here "
            "--clip-grad counts: set optim.clip_grad to 0 to repeat the run"
        )
    known = None if flag is not None and flag.unknown else flag
    stage = draft.get("deepspeed.zero_stage", stage)
    offload = None if cpu is None else "cpu"
    put_stage(draft, stage or 0, sources(known, path, used, cpu), offload)


def _ignore_scales(settings: Settings, draft: Draft) -> None:
    """Take back the loss scale of Megatron's flags, which DeepSpeed does not read."""
    for name, part in _SCALE_FLAGS.items():
        setting = settings.get(name)
        if setting is not None:
            draft.values.pop(f"optim.loss_scale.{part}", None)
            draft.ignore(setting, "DeepSpeed's JSON decides the loss scale")


def put_scale(draft: Draft) -> None:
    """Set what the JSON does not say about the loss scale of fp16 to DeepSpeed's defaults."""
    for part, value in _SCALE_DEFAULTS.items():
        if f"optim.loss_scale.{part}" not in draft.values:
            draft.put(f"optim.loss_scale.{part}", value, "DeepSpeed's default")


def put_constant_scale(draft: Draft, value: float, origin: Setting) -> None:
    """Set a loss scale that never moves: its minimum is its start and it never grows."""
    if value == 0:
        draft.ignore(origin, "0 requests the dynamic loss scale")
        return
    for part in ("initial", "minimum"):
        draft.put(f"optim.loss_scale.{part}", value, origin)
    draft.put("optim.loss_scale.window", _CONSTANT_WINDOW, origin, "a constant scale never grows")


def put_stage(
    draft: Draft, stage: int, origins: list[Setting | str], offload: str | None = None
) -> None:
    """Set a ZeRO stage in the engine native, or in DeepSpeed's if only that has what is asked.

    Args:
        draft: draft with the layout and DeepSpeed's JSON.
        stage: ZeRO stage, 0 to 3.
        origins: settings that ask for the stage.
        offload: device of the optimizer's state that a flag names; None if none does.
    """
    draft.values.pop("deepspeed.zero_stage", None)
    offload = offload or draft.get("deepspeed.offload_optimizer")
    reasons = _only_in_deepspeed(draft, stage, offload)
    if not reasons:
        _put_native(draft, stage, origins)
        return
    draft.remarks.append(f"engine deepspeed, because engine native has no {', no '.join(reasons)}")
    draft.put("engine", "deepspeed", *origins)
    draft.put("deepspeed.zero_stage", max(1, stage), *origins)
    if offload != draft.get("deepspeed.offload_optimizer") and offload not in (None, "none"):
        draft.put("deepspeed.offload_optimizer", offload, *origins)
    if "parallel.data_parallel_sharding" in draft.values and stage != 1:
        entry = draft.values.pop("parallel.data_parallel_sharding")
        draft.remarks.append(f"{entry.origin}: ZeRO stage {stage} contains it")


def _only_in_deepspeed(draft: Draft, stage: int, offload: str | None) -> list[str]:
    """Return what is asked of ZeRO that the engine native does not have."""
    reasons = []
    if offload not in (None, "none"):
        reasons.append(f"offload of the optimizer ({offload})")
    if stage > 1:
        weights = draft.get("deepspeed.offload_param")
        if weights not in (None, "none"):
            reasons.append(f"offload of weights ({weights})")
        reasons += [
            what
            for name, what in _ACTIVATIONS.items()
            if str(draft.get(f"deepspeed.{name}")).lower() == "true"
        ]
    if stage == 3 and draft.get("parallel.pipeline_model_parallel_size", 1) > 1:
        reasons.append("divided weights in a pipeline")
    return reasons


def _put_native(draft: Draft, stage: int, origins: list[Setting | str]) -> None:
    """Set the sharding that equals a ZeRO stage, and leave out what tunes DeepSpeed."""
    for name in [name for name in draft.values if name.startswith("deepspeed.")]:
        origin = draft.values.pop(name).origin
        draft.remarks.append(f"{origin}: it tunes DeepSpeed's ZeRO, engine native does not need it")
    if stage == 0:
        draft.put("engine", "native", *origins)
        return
    sharding = ZERO_STAGES[stage]
    entry = draft.values.pop("parallel.data_parallel_sharding", None)
    if entry is not None and entry.value != sharding:
        draft.remarks.append(f"{entry.origin}: ZeRO stage {stage} contains it")
    draft.put("parallel.data_parallel_sharding", sharding, *origins)
    draft.remarks.append(
        f"ZeRO stage {stage} is parallel.data_parallel_sharding: {sharding} of engine native; "
        "engine deepspeed runs it too"
    )


def read_json(
    draft: Draft,
    content: Mapping[str, Any],
    place: Place,
    name: str,
    *,
    own_optimizer: bool = False,
) -> None:
    """Give each key of DeepSpeed's JSON its place in the draft.

    A value that a flag has set already is compared with it.

    Args:
        draft: draft to fill.
        content: the JSON.
        place: where the JSON is named.
        name: name of the JSON.
        own_optimizer: True if the program gives DeepSpeed its own optimizer and schedule.
    """
    for key, value in leaves(content):
        setting = Setting(key, value, place)
        blocks = next(
            (entry for start, entry in _STARTS_WITH.items() if key.startswith(start)), None
        )
        if blocks is not None:
            block = content.get(key.split(".")[0])
            enabled = isinstance(block, Mapping) and _enabled(block)
            if not enabled:
                draft.ignore(setting, "its block is not enabled")
            elif blocks[0] not in {refused.feature for refused in draft.refused}:
                draft.refuse(setting, *blocks)
            else:
                draft.ignore(setting, "its block is refused")
        elif own_optimizer and key.startswith(("optimizer.", "scheduler.")):
            draft.ignore(setting, _OWN[key.split(".")[0]])
        elif value in ("auto", None):
            draft.ignore(setting, "the value is left to the configuration")
        else:
            try:
                _key(draft, setting, content)
            except (ValueError, TypeError, ArithmeticError):
                if isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", value):
                    draft.lack(setting, JSON_VALUES.get(key, key))
                else:
                    draft.refuse(setting, "its value cannot be read", "one number or true or false")


def _enabled(block: Mapping[str, Any]) -> bool:
    flags = [value for key, value in leaves(block) if key.rsplit(".", 1)[-1] == "enabled"]
    return str(flags[0]).lower() == "true" if flags else bool(block)


def _key(draft: Draft, setting: Setting, content: Mapping[str, Any]) -> None:
    key, value = setting.name, setting.value
    if key in ("fp16.enabled", "bf16.enabled"):
        wanted = key.split(".")[0]
        if bool(value) if value in (0, 1) else switch(value):
            kind = "bf16" if _fp16(content, "type") == "bfloat16" else wanted
            draft.put("train.precision", kind, setting)
        else:
            draft.ignore(setting, "it requests nothing")
    elif key == "zero_optimization.stage":
        stage = integer(value)
        if 0 <= stage <= _MOST_STAGE:
            draft.put("deepspeed.zero_stage", stage, setting)
        else:
            draft.reject(setting, f"give 0 to {_MOST_STAGE}")
    elif key in ("zero_optimization.cpu_offload", "zero_optimization.offload_optimizer.device"):
        device = {"True": "cpu", "False": "none"}.get(str(value), str(value))
        draft.put("deepspeed.offload_optimizer", device, setting)
    elif key == "fp16.loss_scale":
        put_constant_scale(draft, number(value), setting)
    elif key in _DYNAMIC and read_number(_fp16(content, "loss_scale")):
        draft.ignore(setting, "the loss scale is constant")
    elif key == "fp16.initial_scale_power":
        draft.put("optim.loss_scale.initial", 2.0 ** integer(value), setting)
    elif key == "optimizer.params.betas":
        if not isinstance(value, list) or len(value) != 2:
            raise BadValueError("give two numbers")
        for position, beta in enumerate(value):
            _same(draft, f"optim.adam_beta{position + 1}", number(beta), setting)
    elif key == "optimizer.type":
        if str(value).lower() in ("adam", "adamw"):
            draft.ignore(setting, "the optimizer is AdamW")
        else:
            draft.refuse(setting, "other optimizers than AdamW", "AdamW")
    elif key in _OTHER_ADAM and str(value).lower() in ("false", "0"):
        draft.refuse(setting, _OTHER_ADAM[key], "AdamW: leave it out")
    elif key in JSON_VALUES:
        whole = JSON_VALUES[key].startswith(("train.", "optim.loss_scale.w", "optim.loss_scale.h"))
        _same(draft, JSON_VALUES[key], integer(value) if whole else number(value), setting)
    elif key in FIELD_BY_KEY:
        size = int(value) if isinstance(value, float) and value == int(value) else value
        draft.put(f"deepspeed.{FIELD_BY_KEY[key]}", size, setting)
    elif key in _SAME_RESULT or key.startswith(_BLOCKS):
        draft.ignore(setting, _SAME_RESULT.get(key, "it changes no result"))
    elif key in REFUSED and value not in (False, *REFUSED[key].off):
        draft.refuse(setting, REFUSED[key].reason, "leave it out")
    elif (
        key.startswith(("zero_optimization.", "scheduler.", "optimizer.params.")) or key in REFUSED
    ):
        reason = (
            "the section optim has the schedule"
            if key.startswith("scheduler")
            else ("it changes memory and communication only")
        )
        draft.ignore(setting, reason)
    elif re.fullmatch(
        r"bf16\.(loss_scale|loss_scale_window|initial_scale_power|hysteresis|min_loss_scale)", key
    ):
        draft.ignore(setting, "bf16 needs no loss scale")
    elif key == "gradient_accumulation_steps":
        draft.ignore(setting, "it follows from the batch sizes")
    else:
        draft.refuse(setting, "unknown key of DeepSpeed's JSON", "see docs/deepspeed.md")


def _fp16(content: Mapping[str, Any], key: str) -> Any:
    """Return a value of the block fp16; None if the JSON does not have it."""
    block = content.get("fp16")
    return block.get(key) if isinstance(block, Mapping) else None


def _same(draft: Draft, name: str, value: Any, setting: Setting) -> None:
    """Set a value; DeepSpeed takes that of its JSON where a flag has another."""
    entry = draft.values.get(name)
    if entry is None:
        draft.put(name, value, setting)
    elif float(entry.value) == float(value):
        draft.put(name, entry.value, entry.origin, setting)
    else:
        draft.remarks.append(
            f"{setting} differs from {entry.origin}: {name} is {value}, which DeepSpeed takes"
        )
        draft.put(name, value, setting, entry.origin)
