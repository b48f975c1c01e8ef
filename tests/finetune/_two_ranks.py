"""Cases that two gloo ranks run for the tests of this package, in one start."""

import os
from collections.abc import Callable, Sequence
from functools import partial
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


KINDS = ("ddp", "zero2", "zero3", "fsdp")
DISTRIBUTED = {
    "deberta": ("ddp", "zero2", "zero3", "fsdp"),
    "bert": ("ddp", "fsdp"),
    "blenderbot": ("ddp", "zero2", "zero3"),
    "xlnet": ("ddp", "zero2"),
    "head": ("ddp", "zero3"),
    "regression": ("ddp", "zero2", "fsdp"),
}
"""Distributions of each real model.

`head` is a DeBERTa with a trained head of three classes, which is replaced; `regression` is a BERT
that learns years in bf16, which has no numbers between 2008 and 2016.
"""


def real_config(root: Path, model: str) -> FinetuneConfig:
    """Return the configuration for one of DISTRIBUTED, with all files below `root`."""
    kind = "seq2seq" if model == "blenderbot" else "classification"
    options = {"new_head": True} if model == "head" else {}
    directory = root / model / "model"
    years = model == "regression"
    return _tiny_models.tiny_config(
        directory,
        root / model,
        kind,
        model={"path": str(directory), **options},
        task={"regression": True} if years else {},
        train={"precision": "bf16", "max_steps": 2} if years else {},
    )


def write_real(root: Path, model: str) -> None:
    """Write all files that `_real` reads."""
    configuration = real_config(root, model)
    directory = _tiny_models.write_model(
        Path(configuration.model.path), {"head": "deberta", "regression": "bert"}.get(model, model)
    )
    if model == "head":
        from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

        trained = DebertaV2Config.from_pretrained(directory, num_labels=3)
        DebertaV2ForSequenceClassification(trained).save_pretrained(directory)
    _tiny_models.write_data(root / model, configuration.task.kind)
    if model == "regression":
        for split in ("train", "valid"):
            rows = _tiny_models.pair_rows(24)
            years = [row | {"label": 2010 + row["label"]} for row in rows]
            _tiny_models.write_rows(root / model / f"{split}.jsonl", years)
    _tiny_models.prepare(configuration, root / model / "stages")


def run_cases(root: Path, place: Path, names: Sequence[str]) -> dict[str, Any]:
    """Run some CASES on the models in `root`, and return this rank's results by name.

    Each run has a directory in `place`.
    """
    return {name: CASES[name](root, place) for name in names}


def _case(root: Path, place: Path, name: str, kind: str, **sections: Any) -> dict[str, Any]:
    launch = {"distributed": kind} | sections.pop("launch", {})
    # 24 samples: an epoch is 3 batches of 8, so with 2 accumulated the last step has one.
    result = run(
        config(launch=launch, **sections), TinyTask(root / "model", train=24), place / name
    )
    still_alive()
    return {
        "losses": result.losses,
        "lr": [event["lr"] for event in result.of("step")],
        "metrics": result.of("evaluation")[-1]["metrics"],
        "norms": [event["grad_norm"] for event in result.of("step")],
        "weights": weights(result.directory),
    }


def _resumed(root: Path, place: Path, kind: str) -> dict[str, Any]:
    """Run with dropout, without a break and with a signal to the second rank within an epoch."""
    configuration = config(launch={"distributed": kind})
    unbroken = run(configuration, TinyTask(root / "dropout"), place / f"{kind}-whole")
    still_alive()
    rank = int(os.environ["RANK"])
    stopped = run(
        configuration,
        TinyTask(root / "dropout", signal_at=5 if rank == 1 else None),
        place / f"{kind}-twice",
    )
    resumed = run(configuration, TinyTask(root / "dropout"), place / f"{kind}-twice", attempt=2)
    still_alive()
    return {
        "stopped": stopped.stopped,
        "stopped at": stopped.events[-1]["iteration"],
        "from": resumed.of("start")[-1]["resumed_from"],
        "losses": (unbroken.losses, resumed.losses),
        "metrics": (
            unbroken.of("evaluation")[-1]["metrics"],
            resumed.of("evaluation")[-1]["metrics"],
        ),
        "weights": (weights(unbroken.directory), weights(resumed.directory)),
    }


def _real(root: Path, place: Path, model: str, distributed: str) -> dict[str, Any]:
    """Run a real task on the artifacts of `write_real`."""
    from megacore.finetune.task import build_task

    values = real_config(root, model).model_dump(mode="json")
    values["launch"]["distributed"] = distributed
    values["train"]["log_interval"] = 1
    configuration = FinetuneConfig.model_validate(values)
    task = build_task(
        configuration, root / model / "stages" / "examples", root / model / "stages" / "pretrained"
    )
    result = run(configuration, task, place / f"{model}-{distributed}")
    still_alive()
    return {
        "losses": result.losses,
        "metrics": [event["metrics"] for event in result.of("evaluation")],
    }


def _divided(root: Path, place: Path) -> dict[str, Any]:
    """Return how many numbers of a model read under ZeRO-3 this rank holds, and all ranks."""
    from megacore.finetune.distribution import training_arguments

    configuration = config(launch={"distributed": "zero3"})
    arguments = training_arguments(
        configuration, precision="fp32", device=torch.device("cpu"), total_steps=1, directory=place
    )
    parameters = list(TinyTask(root / "model").build_model().parameters())
    local = sum(parameter.ds_tensor.numel() for parameter in parameters)
    return {
        "kind": arguments.distributed_state.distributed_type.value,
        "whole": sum(parameter.numel() for parameter in parameters),
        "held": local,
        "all": sum(parameter.ds_numel for parameter in parameters),
    }


CASES: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    **{kind: partial(_case, name=kind, kind=kind) for kind in (*KINDS, "zero3-offload")},
    **{
        f"{kind} accumulated": partial(
            _case, name=f"{kind}-acc", kind=kind, train={"gradient_accumulation_steps": 2}
        )
        for kind in ("ddp", "zero2", "fsdp")
    },
    **{
        f"{kind} bf16": partial(
            _case, name=f"{kind}-bf16", kind=kind, train={"precision": "bf16", "max_steps": 2}
        )
        for kind in KINDS
    },
    "json optimizer": partial(_case, name="json", kind="zero2", launch={"deepspeed_config": ADAMW}),
    "json both": partial(
        _case,
        name="json-both",
        kind="zero2",
        launch={"deepspeed_config": ADAMW | {"scheduler": DECAY}},
    ),
    **{f"{kind} resumed": partial(_resumed, kind=kind) for kind in KINDS},
    **{
        f"{model} {kind}": partial(_real, model=model, distributed=kind)
        for model, kinds in DISTRIBUTED.items()
        for kind in kinds
    },
    "divided": _divided,
}
"""All cases by name; each takes the directory of the models and that of the runs."""
