"""Distribution of training over ranks: the Trainer's arguments and DeepSpeed's settings."""

import copy
import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megacore.config.finetune import FinetuneConfig
from megacore.engine.deepspeed.join import import_deepspeed, join_ranks
from megacore.errors import ConfigError, LaunchError
from megacore.foreign.accelerate import fsdp_settings as accelerate_fsdp_settings
from megacore.foreign.deepspeed_claims import STAGES
from megacore.foreign.files import leaves

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments


def check_precision(config: FinetuneConfig, precision: str, device_type: str) -> None:
    """Raise ConfigError for a compute type that this host does not support.

    `precision` is already resolved.
    """
    if precision == "fp16" and device_type != "cuda":
        raise ConfigError(
            "train.precision is fp16, which needs a GPU, and this machine has none to fine-tune "
            f"{config.name} on: set train.precision to auto"
        )


def training_arguments(
    config: FinetuneConfig,
    *,
    precision: str,
    device: torch.device,
    total_steps: int,
    directory: Path,
) -> "TrainingArguments":
    """Build the Trainer's arguments for `launch.distributed`; the ranks must have joined.

    With ZeRO-3, as long as the returned object exists, `from_pretrained` partitions each model
    among the ranks while it reads it, so that no rank needs memory for the whole model.

    Args:
        config: configuration of the fine-tuning.
        precision: fp32, bf16 or fp16, resolved.
        device: device of this rank.
        total_steps: optimizer steps of the whole run.
        directory: directory of the run; the Trainer writes nothing there unless asked to.

    Raises:
        ConfigError: fp16 without a GPU, or a DeepSpeed JSON that contradicts the configuration.
    """
    check_precision(config, precision, device.type)
    if importlib.util.find_spec("deepspeed") is not None:
        # transformers and Accelerate would import it, too, but less quietly.
        import_deepspeed()
    from transformers import TrainingArguments

    _forget()
    train, optim = config.train, config.optim
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=train.micro_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        max_steps=total_steps,
        learning_rate=optim.lr,
        lr_scheduler_type=optim.lr_scheduler,
        warmup_steps=optim.warmup_steps,
        max_grad_norm=optim.clip_grad,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        seed=config.seed,
        data_seed=config.seed,
        use_cpu=device.type == "cpu",
        **_join(config, precision, device),
        # XLNet's mask weights have no gradient. PyTorch logs a line if all parameters have one.
        ddp_find_unused_parameters=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    if not dist.is_initialized():
        arguments._n_gpu = min(1, arguments.n_gpu)  # otherwise the Trainer uses all visible GPUs
    if config.launch.distributed in STAGES:
        ranks = dist.get_world_size()
        settings = deepspeed_json(
            config,
            precision=precision,
            device_type=device.type,
            ranks=ranks,
            total_steps=total_steps,
        )
        _use_settings(arguments, settings)
    return arguments


def check_distribution(
    accelerator: "Accelerator", config: FinetuneConfig, device: torch.device
) -> None:
    """Raise LaunchError if the Accelerator's distribution or number of ranks is unexpected."""
    from accelerate.utils import DistributedType

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    expected = {DistributedType.DEEPSPEED}
    if config.launch.distributed == "fsdp":
        expected = {DistributedType.FSDP}
    if config.launch.distributed == "ddp":
        several = DistributedType.MULTI_GPU if device.type == "cuda" else DistributedType.MULTI_CPU
        expected = {several} if ranks > 1 else {DistributedType.NO, several}
    if accelerator.distributed_type not in expected or accelerator.num_processes != ranks:
        raise LaunchError(
            f"launch.distributed is {config.launch.distributed} on {ranks} ranks and Accelerate "
            f"chose {accelerator.distributed_type.value} on {accelerator.num_processes}: unset "
            "environment variables of other launchers"
        )


def _join(config: FinetuneConfig, precision: str, device: torch.device) -> dict[str, Any]:
    """Configure Accelerate for the ranks; return the Trainer arguments that belong to it."""
    if config.launch.distributed in STAGES:
        _join_deepspeed(config, device)
        return {"accelerator_config": {"use_configured_state": True}}
    if config.launch.distributed == "fsdp":
        _join_fsdp(config, precision, device)
        configured = {"accelerator_config": {"use_configured_state": True}}
        return configured | {"fsdp": True, "fsdp_config": fsdp_settings(config)}
    if not dist.is_initialized():
        # Otherwise Accelerate creates its own process group, on GPUs with NCCL only.
        os.environ.pop("LOCAL_RANK", None)
    return {}


def _join_deepspeed(config: FinetuneConfig, device: torch.device) -> None:
    """Configure DeepSpeed for the ranks.

    DeepSpeed reads environment variables, and on CPUs little else.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"launch.distributed is {config.launch.distributed}, which needs DeepSpeed, and that "
            "is not installed: pip install megacore[deepspeed], or set launch.distributed to ddp"
        )
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if device.type == "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        os.environ["DS_ACCELERATOR"] = "cpu"
    join_ranks()
    PartialState(backend="nccl" if device.type == "cuda" else "gloo")


def _join_fsdp(config: FinetuneConfig, precision: str, device: torch.device) -> None:
    """Configure Accelerate to use PyTorch's FSDP.

    Accelerate supports it only on GPUs; PyTorch's FSDP runs on gloo ranks, too.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if precision == "fp16":
        raise ConfigError(
            "launch.distributed is fsdp and train.precision fp16, which are untested together: set "
            "train.precision to bf16 or fp32, or launch.distributed to zero3"
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise ConfigError(
            "launch.distributed is fsdp, which divides a model among ranks, and there is one rank: "
            "raise launch.nproc_per_node, or set launch.distributed to ddp"
        )
    state = PartialState(
        cpu=device.type == "cpu", backend="nccl" if device.type == "cuda" else "gloo"
    )
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def fsdp_settings(config: FinetuneConfig) -> dict[str, Any]:
    """Return the Trainer's settings of FSDP 2, updated with those of an Accelerate YAML.

    Each rank saves its own shard, whatever `fsdp_state_dict_type` says: a run is resumed with the
    same ranks.
    """
    yaml = config.launch.accelerate_config
    block = yaml.get("fsdp_config") if isinstance(yaml, dict) else None
    settings = accelerate_fsdp_settings(block or {}, "launch.accelerate_config")
    return {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"} | settings


def choose_fsdp_layers(accelerator: "Accelerator", model: Any) -> None:
    """Divide the model by the layers that transformers names, without those around its embedding.

    Accelerate makes the input embedding a unit of its own and fails if a layer that contains it,
    such as BERT's embeddings, is a unit too. It also fails for a layer that the model lacks:
    transformers names those of all models of a family.

    Raises ConfigError for an encoder-decoder, and for a layer around the embedding in Accelerate's
    YAML.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"launch.distributed is fsdp and the model is {type(model).__name__}, whose encoder "
            "and decoder share an embedding, which torch's FSDP 2 refuses: set launch.distributed "
            "to zero3"
        )
    plugin: Any = accelerator.state.fsdp_plugin
    configured, embedding = plugin.transformer_cls_names_to_wrap, model.get_input_embeddings()
    present, around = set(), set()
    for module in model.modules():
        present.add(type(module).__name__)
        if module is not embedding and any(inner is embedding for inner in module.modules()):
            around.add(type(module).__name__)
    refused = sorted(around.intersection(configured or ()))
    if refused:
        raise ConfigError(
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap of launch.accelerate_config names "
            f"{refused[0]}, which contains the input embedding of {type(model).__name__}, a unit "
            "of its own: leave it out"
        )
    if configured is None:
        layers = set(getattr(model, "_no_split_modules", None) or ())
        plugin.transformer_cls_names_to_wrap = sorted((layers & present) - around)


def _use_settings(arguments: "TrainingArguments", settings: dict[str, Any]) -> None:
    """Make the Trainer build DeepSpeed's engine from complete, checked settings."""
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Settings(HfTrainerDeepSpeedConfig):
        """DeepSpeed configuration that is not compared with the Trainer's arguments.

        Values that depend on the model are still filled in. A JSON may differ from the arguments.
        """

        def fill_match(self, *values: Any, **named: Any) -> None: ...

    deepspeed_config: Any = Settings(settings)  # type: ignore[no-untyped-call]
    deepspeed_config.trainer_config_process(arguments)
    arguments.deepspeed = settings
    arguments.hf_deepspeed_config = deepspeed_config
    arguments.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config)


def _forget() -> None:
    """Clear the state of another launcher, or of an earlier Accelerator of this process.

    Only one Accelerator can exist at a time.
    """
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    logging.getLogger("accelerate").setLevel(logging.ERROR)


_SETTING = "launch.deepspeed_config"
_AUTO = "auto"
_BY_HIDDEN_SIZE = frozenset(
    f"zero_optimization.{name}"
    for name in (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
)
"""Settings that Accelerate fills in, since they depend on the model's hidden size."""
_AGREEING = {
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "train_batch_size": (
        "train.micro_batch_size x train.gradient_accumulation_steps x {ranks} ranks"
    ),
    "gradient_clipping": "optim.clip_grad",
}
"""Settings that a JSON may leave out, and the fields with which they must agree."""
_ADAMS = ("adam", "adamw")
_BUCKET = int(25 * 2**20 / 4)
"""Elements of a communication bucket: 25 MiB of fp32, as in DDP. DeepSpeed's default takes 2 GB
even for a small model."""


def deepspeed_json(
    config: FinetuneConfig, *, precision: str, device_type: str, ranks: int, total_steps: int
) -> dict[str, Any]:
    """Return the complete settings of DeepSpeed's engine.

    `auto` remains only for values that depend on the model's size.

    Args:
        config: configuration of the fine-tuning; its `launch.deepspeed_config` is an object or
            None.
        precision: fp32, bf16 or fp16, resolved.
        device_type: cuda or cpu; on a CPU no memory is page-locked.
        ranks: number of ranks of the job.
        total_steps: optimizer steps of the whole run, at which a learning rate schedule in the JSON
            ends.

    Raises:
        ConfigError: the JSON contradicts the configuration, or contains an `auto` that nothing
            fills in.
    """
    configured = config.launch.deepspeed_config
    if isinstance(configured, str):
        raise ConfigError(f"{_SETTING} is {configured!r}, a path: its content is what ranks take")
    values: dict[str, Any] = copy.deepcopy(configured) if configured is not None else {}
    filled = _filled_in(config, precision, ranks, total_steps)
    _fill(values, filled)
    for name in _AGREEING:
        values.setdefault(name, filled[name])
    _set_arithmetic(values, precision)
    _set_zero(values, config, device_type)
    _set_optimizer(values)
    _check(values, config, filled, ranks)
    unfilled = [
        name for name, value in leaves(values) if value == _AUTO and name not in _BY_HIDDEN_SIZE
    ]
    if unfilled:
        raise ConfigError(
            f'{unfilled[0]} of {_SETTING} is "auto", which nothing here fills in: give it a value'
        )
    return values


def _filled_in(
    config: FinetuneConfig, precision: str, ranks: int, total_steps: int
) -> dict[str, Any]:
    """Return the values that replace `auto`, by dotted name."""
    train, optim = config.train, config.optim
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "train_batch_size": train.micro_batch_size * train.gradient_accumulation_steps * ranks,
        "gradient_clipping": optim.clip_grad,
        "fp16.enabled": precision == "fp16",
        "bf16.enabled": precision == "bf16",
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": 16,
        "zero_optimization.stage": STAGES[config.launch.distributed],
        "zero_optimization.offload_optimizer.device": _offload(config),
        "zero_optimization.offload_param.device": _offload(config),
        "optimizer.params.lr": optim.lr,
        "optimizer.params.betas": [optim.adam_beta1, optim.adam_beta2],
        "optimizer.params.eps": optim.adam_eps,
        "optimizer.params.weight_decay": optim.weight_decay,
        "optimizer.params.torch_adam": True,
        "optimizer.params.adam_w_mode": True,
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": optim.lr,
        # DeepSpeed refuses 0 warm-up steps; with 1 step, too, the first rate is the peak.
        "scheduler.params.warmup_num_steps": max(1, optim.warmup_steps),
        "scheduler.params.total_num_steps": total_steps,
    }


def _offload(config: FinetuneConfig) -> str:
    return "cpu" if config.launch.distributed == "zero3-offload" else "none"


def _fill(values: dict[str, Any], filled: dict[str, Any], prefix: str = "") -> None:
    """Replace `auto` by the value of the same dotted name, if there is one."""
    for key, value in values.items():
        if isinstance(value, dict):
            _fill(value, filled, f"{prefix}{key}.")
        elif value == _AUTO and f"{prefix}{key}" in filled:
            values[key] = filled[f"{prefix}{key}"]


def _set_arithmetic(values: dict[str, Any], precision: str) -> None:
    """Enable fp16 with DeepSpeed's dynamic loss scale, bf16, or neither."""
    described = "fp16" in values
    for name in ("fp16", "bf16"):
        block = values.setdefault(name, {})
        enabled = block.setdefault("enabled", precision == name)
        if enabled != (precision == name):
            raise ConfigError(
                f"{name}.enabled of {_SETTING} is {str(enabled).lower()} and train.precision is "
                f"{precision}: set the "
                f'former to "auto", or train.precision to {name if enabled else "auto"}'
            )
    if precision == "fp16" and not described:
        values["fp16"]["auto_cast"] = True


def _set_zero(values: dict[str, Any], config: FinetuneConfig, device_type: str) -> None:
    """Set the stage and offload of `launch.distributed`.

    An offloaded Adam is PyTorch's, so that nothing is compiled.
    """
    zero = values.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", STAGES[config.launch.distributed])
    zero["stage3_gather_16bit_weights_on_model_save"] = stage == 3
    offloads = ("offload_optimizer", "offload_param")
    if config.launch.deepspeed_config is None:
        zero |= {name: {"device": _offload(config)} for name in offloads}
        zero |= dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), _BUCKET)
    for name in offloads:
        if zero.get(name, {}).get("device", "none") == "none":
            zero.pop(name, None)
        else:
            zero[name]["pin_memory"] = device_type == "cuda" and zero[name].get("pin_memory", True)
    values["zero_allow_untested_optimizer"] = True
    values["zero_force_ds_cpu_optimizer"] = False


def _set_optimizer(values: dict[str, Any]) -> None:
    """Replace DeepSpeed's compiled Adam optimizers by PyTorch's.

    Both make the same update, and PyTorch's needs no compilation on the ranks.
    """
    optimizer = values.get("optimizer")
    if optimizer is None or str(optimizer.get("type", "")).lower() not in _ADAMS:
        return
    parameters = optimizer.setdefault("params", {})
    if parameters.setdefault("torch_adam", True) is not True:
        raise ConfigError(
            f"optimizer.params.torch_adam of {_SETTING} is false: DeepSpeed's own Adam would be "
            "compiled in every rank, which is not done here; leave it out, torch's Adam makes the "
            "same update"
        )


def _check(
    values: dict[str, Any], config: FinetuneConfig, filled: dict[str, Any], ranks: int
) -> None:
    """Raise ConfigError for settings that contradict the configuration, naming both."""
    stage = values["zero_optimization"]["stage"]
    if stage != STAGES[config.launch.distributed]:
        raise ConfigError(
            f"zero_optimization.stage of {_SETTING} is {stage} and launch.distributed is "
            f"{config.launch.distributed}: make them agree"
        )
    for name, setting in _AGREEING.items():
        if values[name] != filled[name]:
            raise ConfigError(
                f"{name} of {_SETTING} is {values[name]} and {setting.format(ranks=ranks)} is "
                f'{filled[name]}: set the former to "auto"'
            )
