"""AdamW and its schedule, or the stand-ins for those that a DeepSpeed JSON describes."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megacore.config.finetune import FinetuneConfig

if TYPE_CHECKING:
    from accelerate import Accelerator


def parameter_groups(model: nn.Module, weight_decay: float | None) -> list[dict[str, Any]]:
    """The trained parameters, biases and weights of norms apart: they do not decay.

    Args:
        model: before it is prepared; under ZeRO-3 its parameters may be divided already.
        weight_decay: of the others; None leaves it to whoever makes the optimizer.
    """
    apart = {id(weight) for module in model.modules() for weight in _undecayed(module)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decaying: dict[str, Any] = {"params": [each for each in trained if id(each) not in apart]}
    if weight_decay is not None:
        decaying["weight_decay"] = weight_decay
    groups = [decaying, {"params": [each for each in trained if id(each) in apart], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _undecayed(module: nn.Module) -> list[nn.Parameter]:
    own = dict(module.named_parameters(recurse=False))
    if "norm" in type(module).__name__.lower():
        return list(own.values())
    return [parameter for name, parameter in own.items() if name == "bias" or name.endswith("_bias")]


def build_optimizer(config: FinetuneConfig, model: nn.Module, accelerator: "Accelerator", total_steps: int) -> Any:
    """Optimizer and scheduler for `accelerator.prepare`.

    What the DeepSpeed JSON describes is made by DeepSpeed: Accelerate takes a stand-in for it. The lengths of its
    schedule are in the JSON already, in optimizer steps, and are not divided among ranks.

    Args:
        config: the fine-tuning.
        model: whose parameters are trained.
        accelerator: of the job.
        total_steps: optimizer steps of the whole run.
    """
    from accelerate.utils import DummyOptim, DummyScheduler
    from transformers import get_scheduler

    plugin, optim = accelerator.state.deepspeed_plugin, config.optim
    described: dict[str, Any] = {} if plugin is None else plugin.deepspeed_config
    if "optimizer" in described:
        parameters = described["optimizer"].get("params", {})
        optimizer: Any = DummyOptim(
            parameter_groups(model, None),
            lr=parameters.get("lr", optim.lr),
            weight_decay=parameters.get("weight_decay", optim.weight_decay),
        )
    else:
        optimizer = torch.optim.AdamW(
            parameter_groups(model, optim.weight_decay),
            lr=optim.lr,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_eps,
        )

    def schedule(made: Any) -> Any:
        return get_scheduler(
            optim.lr_scheduler, made, num_warmup_steps=optim.warmup_steps, num_training_steps=total_steps
        )

    if "scheduler" in described:
        return optimizer, DummyScheduler(optimizer)
    if "optimizer" in described:
        return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=schedule)
    return optimizer, schedule(optimizer)
