"""What two gloo ranks do for the tests of this package, in one spawn."""

import os
from pathlib import Path
from typing import Any

import torch

from megacore.config.finetune import FinetuneConfig
from tests._dist import still_alive
from tests.finetune import _tiny_models
from tests.finetune._tiny_task import TinyTask, config, run, weights

ADAMW = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}
DECAY = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}
DECAY["params"] |= {"total_num_steps": "auto", "warmup_type": "linear"}


DISTRIBUTED = {
    "deberta": ("ddp", "zero2", "zero3", "fsdp"),
    "blenderbot": ("ddp", "zero2", "zero3"),
    "xlnet": ("ddp", "zero2"),
    "head": ("ddp", "zero3"),
}
"""What is tried of each real model; `head` is a DeBERTa with a trained head of three classes, which
gives way."""


def real_config(root: Path, model: str) -> FinetuneConfig:
    """The configuration for one of DISTRIBUTED, whose files are below `root`."""
    kind = "seq2seq" if model == "blenderbot" else "classification"
    given = {"new_head": True} if model == "head" else {}
    directory = root / model / "model"
    return _tiny_models.tiny_config(
        directory, root / model, kind, model={"path": str(directory), **given}
    )


def write_real(root: Path, model: str) -> None:
    """Everything that `_real` reads."""
    made = real_config(root, model)
    directory = _tiny_models.write_model(
        Path(made.model.path), "deberta" if model == "head" else model
    )
    if model == "head":
        from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

        trained = DebertaV2Config.from_pretrained(directory, num_labels=3)
        DebertaV2ForSequenceClassification(trained).save_pretrained(directory)
    _tiny_models.write_data(root / model, made.task.kind)
    _tiny_models.prepare(made, root / model / "stages")


def cases(root: Path) -> dict[str, Any]:
    """Each case by its name; this rank's account of it."""
    found: dict[str, Any] = {}
    for kind in ("ddp", "zero2", "zero3", "zero3-offload", "fsdp"):
        found[kind] = _case(root, kind, kind)
    for kind in ("ddp", "zero2", "fsdp"):
        found[f"{kind} accumulated"] = _case(
            root, f"{kind}-acc", kind, train={"gradient_accumulation_steps": 2}
        )
    for kind in ("ddp", "zero2", "zero3", "fsdp"):
        found[f"{kind} bf16"] = _case(
            root, f"{kind}-bf16", kind, train={"precision": "bf16", "max_steps": 2}
        )
    found["json optimizer"] = _case(root, "json", "zero2", launch={"deepspeed_config": ADAMW})
    found["json both"] = _case(
        root, "json-both", "zero2", launch={"deepspeed_config": ADAMW | {"scheduler": DECAY}}
    )
    for kind in ("ddp", "zero2", "zero3", "fsdp"):
        found[f"{kind} resumed"] = _resumed(root, kind)
    for model, kinds in DISTRIBUTED.items():
        for distributed in kinds:
            found[f"{model} {distributed}"] = _real(root, model, distributed)
    found["divided"] = _divided(root)
    return found


def _case(root: Path, name: str, kind: str, **sections: Any) -> dict[str, Any]:
    launch = {"distributed": kind} | sections.pop("launch", {})
    # 24 samples: an epoch is 3 batches of 8, so with 2 accumulated the last step has one.
    done = run(config(launch=launch, **sections), TinyTask(root / "model", train=24), root / name)
    still_alive()
    return {
        "losses": done.losses,
        "lr": [event["lr"] for event in done.of("step")],
        "metrics": done.of("evaluation")[-1]["metrics"],
        "norms": [event["grad_norm"] for event in done.of("step")],
        "weights": weights(done.directory),
    }


def _resumed(root: Path, kind: str) -> dict[str, Any]:
    """With dropout: a run that nothing disturbs, and one that a signal to the second rank stops
    within an epoch."""
    made = config(launch={"distributed": kind})
    whole = run(made, TinyTask(root / "dropout"), root / f"{kind}-whole")
    still_alive()
    rank = int(os.environ["RANK"])
    stopped = run(
        made, TinyTask(root / "dropout", signal_at=5 if rank == 1 else None), root / f"{kind}-twice"
    )
    again = run(made, TinyTask(root / "dropout"), root / f"{kind}-twice", attempt=2)
    still_alive()
    return {
        "stopped": stopped.stopped,
        "stopped at": stopped.events[-1]["iteration"],
        "from": again.of("start")[-1]["resumed_from"],
        "losses": (whole.losses, again.losses),
        "metrics": (whole.of("evaluation")[-1]["metrics"], again.of("evaluation")[-1]["metrics"]),
        "weights": (weights(whole.directory), weights(again.directory)),
    }


def _real(root: Path, model: str, distributed: str) -> dict[str, Any]:
    """A real task on the artifacts that `write_real` has made, evaluated with everything it has."""
    from megacore.finetune.task import build_task

    values = real_config(root, model).model_dump(mode="json")
    values["launch"]["distributed"] = distributed
    values["train"]["log_interval"] = 1
    made = FinetuneConfig.model_validate(values)
    task = build_task(
        made, root / model / "stages" / "examples", root / model / "stages" / "pretrained"
    )
    done = run(made, task, root / f"{model}-{distributed}")
    still_alive()
    return {"losses": done.losses, "metrics": [event["metrics"] for event in done.of("evaluation")]}


def _divided(root: Path) -> dict[str, Any]:
    """Numbers of a model that is read under ZeRO-3: those that this rank holds, and all."""
    from megacore.finetune.distribution import training_arguments

    made = config(launch={"distributed": "zero3"})
    arguments = training_arguments(
        made, precision="fp32", device=torch.device("cpu"), total_steps=1, directory=root
    )
    parameters = list(TinyTask(root / "model").build_model().parameters())
    held = sum(parameter.ds_tensor.numel() for parameter in parameters)
    return {
        "kind": arguments.distributed_state.distributed_type.value,
        "whole": sum(parameter.numel() for parameter in parameters),
        "held": held,
        "all": sum(parameter.ds_numel for parameter in parameters),
    }
