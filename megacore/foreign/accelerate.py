"""Reader of Accelerate's YAML, which `accelerate config` writes.

The set of keys comes from Accelerate's own definitions. A key is translated, ignored because it has
no effect here, or refused unless its value requests nothing. Accelerate is imported only when a
YAML is read.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from megacore.foreign.files import Claim, nearest, read_number

_OFF: tuple[Any, ...] = (None, False, "", "no", "none", "None", "NO", {}, [], [""], ["None"])
"""Values with which a key requests nothing."""
_Refused = Mapping[str, tuple[str, tuple[Any, ...]]]
_TPU = "there is nothing here for TPUs: remove it"
_TPU_KEYS = "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands"
_NOT_USED = "nothing here uses it: remove it"

_HONOURED = (
    "compute_environment distributed_type deepspeed_config fsdp_config mixed_precision fp16 "
    "use_cpu num_processes num_machines machine_rank main_process_ip main_process_port"
)
HONOURED = frozenset(_HONOURED.split())
"""Keys that `read_accelerate` translates or checks."""
WITHOUT_EFFECT = frozenset({"same_network", "main_training_function"})
"""Keys without effect here: hosts are reached through ssh or a scheduler, and the function is for
notebooks and TPUs."""
_REASONS = {
    "gpu_ids": "ranks take the GPUs that are visible: set CUDA_VISIBLE_DEVICES, and gpu_ids to all",
    "rdzv_backend": "ranks meet as launch.rdzv_endpoint says: set it to static",
    "enable_cpu_affinity": (
        "ranks are not bound to cores: set it to false, and see launch.threads_per_rank"
    ),
    "debug": "set it to false, and ACCELERATE_DEBUG_MODE=1 in the environment",
    "dynamo_config": "models are not compiled: remove it",
    "dynamo_backend": "models are not compiled: set it to 'NO'",
    "megatron_lm_config": (
        "Megatron-LM is not used here: use distributed_type DEEPSPEED, or the flow pretrain"
    ),
    "parallelism_config": "a fine-tuning divides only its batch: remove it",
    "fp8_config": "a fine-tuning computes in fp32, bf16 or fp16: remove it",
    "mpirun_config": (
        "ranks are started by torchrun, deepspeed, Slurm or Kubernetes: see launch.kind"
    ),
    "ipex_config": "Intel's extension for PyTorch is not used here: remove it",
    **dict.fromkeys(("downcast_bf16", *_TPU_KEYS.split()), _TPU),
}
_ALSO_OFF: dict[str, tuple[Any, ...]] = {
    "gpu_ids": ("all",),
    "rdzv_backend": ("static", "c10d"),
    "dynamo_config": ({"dynamo_backend": "NO"}, {"dynamo_backend": "no"}),
    "ipex_config": ({"ipex": False},),
}
REFUSED = {key: (reason, _ALSO_OFF.get(key, ())) for key, reason in _REASONS.items()}
"""Refused keys: the reason, and values that request nothing in addition to those of `_OFF`."""

_DEEPSPEED_HONOURED = (
    "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device "
    "gradient_accumulation_steps gradient_clipping deepspeed_hostfile deepspeed_inclusion_filter "
    "deepspeed_exclusion_filter deepspeed_multinode_launcher"
)
DEEPSPEED_HONOURED = frozenset(_DEEPSPEED_HONOURED.split())
"""Keys of deepspeed_config that are translated or checked."""
_DEEPSPEED_WITHOUT_EFFECT = (
    "offload_optimizer_nvme_path offload_param_nvme_path zero3_init_flag zero3_save_16bit_model"
)
DEEPSPEED_WITHOUT_EFFECT = frozenset(_DEEPSPEED_WITHOUT_EFFECT.split())
"""Keys of deepspeed_config without effect here: nothing is offloaded to nvme, each rank creates the
model in host memory before it is divided, and the best model is gathered and saved in fp32."""
DEEPSPEED_REFUSED: _Refused = {
    "deepspeed_moe_layer_cls_names": ("mixtures of experts are untested here: remove it", ()),
}

FSDP_HONOURED = {
    "fsdp_offload_params": "cpu_offload",
    "fsdp_auto_wrap_policy": "auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
}
"""Keys of fsdp_config and their names in transformers' Trainer. Apart from them, only resharding
after a forward pass and activation checkpointing are read. The other keys do not change the
results: they select how version 1 communicates, and the form of saved weights."""
_FSDP_STRATEGIES = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
"""Strategies of FSDP's version 1, with True if weights are resharded after a forward pass."""

_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP")
_AUTOS = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
)
_LAUNCHERS = ("pdsh", "standard", "nossh")
"""DeepSpeed's launchers for several hosts that are accepted; ssh replaces them."""
_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
_STAGES = {(0, False, False): "ddp", (2, False, False): "zero2", (3, False, False): "zero3"}
_STAGES[3, True, True] = "zero3-offload"


@cache
def cluster_defaults() -> dict[str, Any]:
    """Return the keys of Accelerate's YAML with their defaults, None for a key without default."""
    from accelerate.commands.config.config_args import ClusterConfig

    return {
        each.name: None if each.default is MISSING else each.default
        for each in fields(ClusterConfig)
    }


@cache
def fsdp_defaults() -> dict[str, Any]:
    """Return the keys of fsdp_config with the defaults of `accelerate launch`."""
    from accelerate.commands.launch import launch_command_parser

    arguments = vars(launch_command_parser().parse_args(["script"]))
    return {name: value for name, value in arguments.items() if name.startswith("fsdp_")}


def named_json(content: Mapping[str, Any]) -> str | None:
    """Return the path of the DeepSpeed JSON that the YAML names, or None."""
    block = content.get("deepspeed_config")
    path = block.get("deepspeed_config_file") if isinstance(block, dict) else None
    return path if isinstance(path, str) and path not in _OFF else None


def asks_for_cpu(content: Mapping[str, Any]) -> bool:
    """Return True if the YAML requests ranks on the CPU even where GPUs exist."""
    return bool(content.get("use_cpu")) or content.get("distributed_type") == "MULTI_CPU"


def read_accelerate(
    content: Mapping[str, Any], launch: dict[str, Any], name: str
) -> Iterator[Claim]:
    """Yield the settings of the YAML as values of the configuration.

    Args:
        content: content of the YAML.
        launch: section `launch` of the configuration. If no value of `launch.distributed` is
            equivalent to the YAML, a DeepSpeed JSON is added to the section.
        name: name of the file in messages.

    Raises:
        ValueError: a key is unknown or refused, a value is invalid, or Accelerate is not installed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError(
            f"{name} is Accelerate's YAML, which Accelerate itself checks, and that is not "
            "installed: pip install megacore[finetune]"
        )
    defaults = cluster_defaults()
    unused = {
        key: (_NOT_USED, (default,))
        for key, default in defaults.items()
        if key not in HONOURED | WITHOUT_EFFECT | REFUSED.keys()
    }
    _known(content, "", (defaults, HONOURED, REFUSED), name)
    _refuse(content, "", REFUSED | unused, name)
    where = content.get("compute_environment", "LOCAL_MACHINE")
    if where != "LOCAL_MACHINE":
        raise ValueError(
            f"compute_environment of {name} is {where}: only LOCAL_MACHINE is started here, other "
            "machines by launch.hostfile and launch.kind"
        )
    kind = content.get("distributed_type")
    if kind not in _TYPES:
        raise ValueError(f"distributed_type of {name} is {kind}: use {', '.join(_TYPES)}")
    block = content.get("deepspeed_config") or {}
    if not isinstance(block, dict):
        raise ValueError(f"deepspeed_config of {name} is {block!r}: give a mapping of its keys")
    if block and kind != "DEEPSPEED":
        raise ValueError(
            f"deepspeed_config of {name} is given but distributed_type is {kind}: set the latter "
            "to DEEPSPEED, or remove the former"
        )
    if kind != "FSDP" and content.get("fsdp_config") not in _OFF:
        raise ValueError(
            f"fsdp_config of {name} is given but distributed_type is {kind}: set the latter to "
            "FSDP, or remove the former"
        )
    yield from _processes(content, name)
    yield from _precision(content, name)
    if kind == "FSDP":
        yield from _fsdp(content, name)
    elif kind == "DEEPSPEED":
        yield from _deepspeed(block, launch, name)
    else:
        yield Claim("launch.distributed", "ddp", f"distributed_type of {name} is {kind}")


def read_fsdp(block: Any, name: str) -> Iterator[Claim]:
    """Yield the settings of the block fsdp_config by Accelerate's names for them.

    An example of a name is `fsdp_config.fsdp_version`. Raises ValueError for a key that Accelerate
    does not know, and for a value of the wrong type.
    """
    if not isinstance(block, dict):
        raise ValueError(f"fsdp_config of {name} is {block!r}: give a mapping of its keys")
    defaults = fsdp_defaults()
    spelled = {
        str(key) if str(key).startswith("fsdp") else f"fsdp_{key}": value
        for key, value in block.items()
    }
    _known(spelled, "fsdp_config.", (defaults,), name)
    for key, value in spelled.items():
        if value is None:
            continue
        read, expected = _fsdp_value(key, value, defaults[key])
        if read is None:
            raise ValueError(f"fsdp_config.{key} of {name} is {value}: give {expected}")
        field = f"fsdp_config.{key}"
        yield Claim(field, read, f"{field} of {name} is {Claim.shown(value)}", ours=False)


def _fsdp_value(key: str, value: Any, default: Any) -> tuple[Any, str]:
    """Return the parsed value of a key, None if it is invalid, and a description of valid ones."""
    from accelerate.utils import constants

    flag = {"true": True, "false": False}.get(str(value).lower())
    choices = [str(each) for each in getattr(constants, key.upper(), ())]
    if key == "fsdp_reshard_after_forward" and flag is None:  # a strategy of version 1
        choices = constants.FSDP_SHARDING_STRATEGY
    if choices:
        chosen = next((each for each in choices if each == str(value).upper()), None)
        return chosen, f"one of {', '.join(choices)}"
    if key == "fsdp_version":
        return {"1": 1, "2": 2}.get(str(value)), "1 or 2"
    if isinstance(default, int):
        return _number(value, int), "an integer"
    if default in ("true", "false"):
        return flag, "true or false"
    return (value if isinstance(value, str) else None), "text"


def fsdp_settings(block: Any, name: str) -> dict[str, Any]:
    """Return the settings of the block fsdp_config by their names in transformers' Trainer.

    Version 1 has a sharding strategy in place of `reshard_after_forward`; it is translated. Raises
    ValueError for unsupported settings.
    """
    values = {
        claim.field.removeprefix("fsdp_config."): claim.value for claim in read_fsdp(block, name)
    }
    if values.get("fsdp_activation_checkpointing_offload"):
        raise ValueError(
            f"fsdp_config.fsdp_activation_checkpointing_offload of {name} is true, which is "
            "refused: what is kept for backward stays where it is, set it to false"
        )
    if values.get("fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP":
        raise ValueError(
            f"fsdp_config.fsdp_auto_wrap_policy of {name} is SIZE_BASED_WRAP, which is refused: "
            "torch's FSDP 2 cannot wrap a list of layers, use TRANSFORMER_BASED_WRAP or NO_WRAP"
        )
    settings = {
        trainer_name: values[accelerate_name]
        for accelerate_name, trainer_name in FSDP_HONOURED.items()
        if accelerate_name in values
    }
    for key in ("fsdp_reshard_after_forward", "fsdp_sharding_strategy"):
        value = values.get(key)
        if isinstance(value, str):
            if value not in _FSDP_STRATEGIES:
                raise ValueError(
                    f"fsdp_config.{key} of {name} is {value}, which is refused: use "
                    f"{' or '.join(_FSDP_STRATEGIES)}"
                )
            value = _FSDP_STRATEGIES[value]
        if value is not None:
            settings["reshard_after_forward"] = value
            break
    classes = settings.get("transformer_layer_cls_to_wrap")
    if classes is not None:
        settings["transformer_layer_cls_to_wrap"] = [each.strip() for each in classes.split(",")]
    return settings


def _fsdp(content: Mapping[str, Any], name: str) -> Iterator[Claim]:
    """Yield the claims for FSDP, and for activation checkpointing if it is set."""
    yield Claim("launch.distributed", "fsdp", f"distributed_type of {name} is FSDP")
    block = content.get("fsdp_config")
    if block in _OFF:
        return
    fsdp_settings(block, name)  # refuses what is not supported
    for claim in read_fsdp(block, name):
        if claim.field == "fsdp_config.fsdp_activation_checkpointing":
            yield Claim("train.gradient_checkpointing", claim.value, claim.clause)


def _known(block: Mapping[str, Any], prefix: str, tables: tuple[Any, ...], name: str) -> None:
    known = sorted({key for table in tables for key in table})
    for key in block:
        if key not in known:
            raise ValueError(f"unknown key {prefix}{key} in {name}{nearest(str(key), known)}")


def _refuse(block: Mapping[str, Any], prefix: str, refused: _Refused, name: str) -> None:
    for key, (reason, off) in refused.items():
        value = block.get(key)
        if value not in (*_OFF, *off):
            raise ValueError(
                f"{prefix}{key} of {name} is {Claim.shown(value)}, which is refused: {reason}"
            )


def _processes(content: Mapping[str, Any], name: str) -> Iterator[Claim]:
    """Yield the claims for the number of ranks and hosts, and the address where ranks connect."""
    machines = _count(content, "num_machines", name)
    processes = _count(content, "num_processes", name)
    kind, on_cpu = content["distributed_type"], _flag(content, "use_cpu", name)
    if kind == "NO" and (processes or 1) > 1:
        raise ValueError(
            f"num_processes of {name} is {processes} but distributed_type is NO, one process: set "
            "the latter to MULTI_GPU, MULTI_CPU or DEEPSPEED"
        )
    if kind == "MULTI_GPU" and on_cpu:
        raise ValueError(
            f"use_cpu of {name} is true but distributed_type is MULTI_GPU: set the latter to "
            "MULTI_CPU"
        )
    if asks_for_cpu(content):
        key, value = ("use_cpu", "true") if on_cpu else ("distributed_type", "MULTI_CPU")
        yield Claim("launch.allow_cpu", True, f"{key} of {name} is {value}")
    processes = 1 if kind == "NO" else processes
    if processes is not None:
        clause = f"num_processes of {name} is {processes}"
        if processes % (machines or 1):
            raise ValueError(
                f"{clause}, which num_machines {machines} does not divide: give each machine as "
                "many"
            )
        if (machines or 1) > 1:
            clause += f" on num_machines {machines}"
        yield Claim("launch.nproc_per_node", processes // (machines or 1), clause)
    if machines is not None:
        yield Claim("launch.nnodes", machines, f"num_machines of {name} is {machines}")
    rank = content.get("machine_rank") or 0
    if rank != 0:
        raise ValueError(
            f"machine_rank of {name} is {rank}: all machines are started from one place, give the "
            "file of machine 0"
        )
    if (machines or 1) > 1:
        yield from _meeting(content, name)


def _meeting(content: Mapping[str, Any], name: str) -> Iterator[Claim]:
    """Yield the claim for the address of the first host."""
    address, port = content.get("main_process_ip"), content.get("main_process_port")
    if address is None and port is not None:
        raise ValueError(
            f"main_process_port of {name} is {port} without main_process_ip: give both, or neither"
        )
    if address is not None:
        host = f"[{address}]" if ":" in str(address) else str(address)  # an IPv6 address
        endpoint, clause = host, f"main_process_ip of {name} is {address}"
        if port is not None:
            endpoint, clause = f"{host}:{port}", f"{clause} and main_process_port {port}"
        yield Claim("launch.rdzv_endpoint", endpoint, clause)


def _precision(content: Mapping[str, Any], name: str) -> Iterator[Claim]:
    value = content.get("mixed_precision")
    if value is None and content.get("fp16"):
        yield Claim("train.precision", "fp16", f"fp16 of {name} is true")
    if value is None:
        return
    precision = "no" if value is False else str(value).lower()  # YAML reads a bare `no` as false
    if precision not in _PRECISIONS:
        raise ValueError(f"mixed_precision of {name} is {value}: use {', '.join(_PRECISIONS)}")
    yield Claim(
        "train.precision", _PRECISIONS[precision], f"mixed_precision of {name} is {precision}"
    )


def _deepspeed(block: Mapping[str, Any], launch: dict[str, Any], name: str) -> Iterator[Claim]:
    prefix = "deepspeed_config."
    _known(block, prefix, (DEEPSPEED_HONOURED, DEEPSPEED_WITHOUT_EFFECT, DEEPSPEED_REFUSED), name)
    _refuse(block, prefix, DEEPSPEED_REFUSED, name)
    path = named_json({"deepspeed_config": block})
    if path is not None and not isinstance(launch.get("deepspeed_config"), dict):
        raise ValueError(
            f"{prefix}deepspeed_config_file of {name} is {path}, which was not read: give its "
            "content as launch.deepspeed_config, or load the configuration from its YAML"
        )
    yield from _stage(block, launch, name)
    for key, field, kind in (
        ("gradient_accumulation_steps", "train.gradient_accumulation_steps", int),
        ("gradient_clipping", "optim.clip_grad", float),
    ):
        value = block.get(key)
        if value in _OFF or value == "auto":
            continue
        number = _number(value, kind)
        if number is None or number <= 0:
            raise ValueError(f"{prefix}{key} of {name} is {value}: give a number above 0")
        yield Claim(field, number, f"{prefix}{key} of {name} is {value}")
    yield from _hosts(block, name)


def _stage(block: Mapping[str, Any], launch: dict[str, Any], name: str) -> Iterator[Claim]:
    """Yield the claims for the ZeRO stage and offload; both may be absent if a JSON sets them."""
    clauses, devices = dict[str, str](), dict[str, str]()
    for what in ("optimizer", "param"):
        key = f"offload_{what}_device"
        value = block.get(key)
        devices[what] = "none" if value in _OFF else str(value)
        clauses[what] = f"deepspeed_config.{key} of {name} is {devices[what]}"
        if devices[what] not in ("none", "cpu"):
            raise ValueError(f"{clauses[what]}: use cpu or none, nvme is not used here")
        if value is not None:
            field = f"zero_optimization.offload_{what}.device"
            yield Claim(field, devices[what], clauses[what], ours=False)
    in_json = isinstance(launch.get("deepspeed_config"), dict)
    stage = block.get("zero_stage", None if in_json else 2)
    if stage is None:
        return
    clause = f"deepspeed_config.zero_stage of {name} is {stage}"
    if _number(stage, int) not in (0, 2, 3):
        raise ValueError(f"{clause}: use 2 or 3, or 0 for distributed data parallelism")
    stage, on_cpu = int(stage), [what for what, device in devices.items() if device == "cpu"]
    if on_cpu and (stage == 0 or (stage == 2 and "param" in on_cpu)):
        raise ValueError(
            f"{clauses[on_cpu[-1]]} but {clause}: {'2 or ' if stage == 0 else ''}3 offloads that"
        )
    if stage:
        yield Claim("zero_optimization.stage", stage, clause, ours=False)
    method = _STAGES.get((stage, "optimizer" in on_cpu, "param" in on_cpu))
    if method is not None:
        offloads = " with offload of both" if method == "zero3-offload" else ""
        yield Claim("launch.distributed", method, f"{clause}{offloads}")
    elif not in_json:  # this combination needs a DeepSpeed JSON
        launch["deepspeed_config"] = _json(stage, on_cpu)


def _json(stage: int, on_cpu: list[str]) -> dict[str, Any]:
    """Return a DeepSpeed JSON that offloads one part, as no value of `launch.distributed` does."""
    offload = {f"offload_{what}": {"device": "cpu", "pin_memory": True} for what in on_cpu}
    return {
        **dict.fromkeys(_AUTOS.split(), "auto"),
        "zero_optimization": {"stage": stage, **offload},
    }


def _hosts(block: Mapping[str, Any], name: str) -> Iterator[Claim]:
    prefix = "deepspeed_config."
    launcher = block.get("deepspeed_multinode_launcher")
    if launcher not in _OFF and launcher not in _LAUNCHERS:
        raise ValueError(
            f"{prefix}deepspeed_multinode_launcher of {name} is {launcher}: other machines are "
            f"reached through ssh, use {' or '.join(_LAUNCHERS)}, or launch.kind slurm"
        )
    for what, field in (("inclusion", "include"), ("exclusion", "exclude")):
        key = f"deepspeed_{what}_filter"
        if block.get(key) not in _OFF:
            clause = f"{prefix}{key} of {name} is {block[key]}"
            yield Claim(f"launch.{field}", str(block[key]).split("@"), clause)
    if (hostfile := block.get("deepspeed_hostfile")) not in _OFF:
        clause = f"{prefix}deepspeed_hostfile of {name} is {hostfile}"
        yield Claim("launch.hostfile", str(hostfile), clause)


def _count(content: Mapping[str, Any], key: str, name: str) -> int | None:
    """Return a number of processes or hosts; None if the file leaves it open."""
    value = content.get(key)
    if value is None or value == -1:
        return None
    number = _number(value, int)
    if number is None or number < 1:
        raise ValueError(f"{key} of {name} is {value}: give an integer above 0")
    return int(number)


def _flag(content: Mapping[str, Any], key: str, name: str) -> bool:
    value = content.get(key)
    if value not in (None, True, False):
        raise ValueError(f"{key} of {name} is {value}: give true or false")
    return bool(value)


def _number(value: Any, kind: type[int] | type[float]) -> float | None:
    number = read_number(value)
    if number is None or kind is float:
        return number
    return int(number) if number == int(number) else None
