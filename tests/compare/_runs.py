"""Records of runs as a training writes them, and planted differences."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacore.config.run import RunConfig
from megacore.observe.events import EventWriter
from tests.train._runs import config, job

STEPS = 20
KERNELS = {"attention": "sdpa", "optimizer": "torch"}
VERSIONS = {"megacore": "1.0", "torch": "2.9.0", "python": "3.11.7"}


@dataclass
class Written:
    """Content of one run's record."""

    sections: dict[str, Any] = field(default_factory=dict)
    """Changes of the configuration, by section."""
    steps: int = STEPS
    noise: Callable[[int], float] = lambda step: 0.0
    """Relative difference of loss and gradient norm by step."""
    starts: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    """Values of each attempt's start that differ from the defaults."""
    values: Callable[[int], Mapping[str, Any]] = lambda step: {}
    """Other values of a step."""
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Further events."""
    job: dict[str, Any] = field(default_factory=dict)
    """Other values of run.json."""
    end: str | None = "finished"
    """Reason of the end; None without an end."""


def write(directory: Path, run: Written, data: Path) -> Path:
    """Write the record of a run as a training writes it."""
    directory.mkdir(parents=True)
    sections = {key: value for key, value in run.sections.items() if isinstance(value, dict)}
    engine = str(run.sections.get("engine", "native"))
    values = config(engine, **sections).model_dump(mode="json")
    settings = RunConfig.model_validate(values | {"seed": run.sections.get("seed", 1234)})
    content = json.loads(job(settings, data, directory, **run.job).model_dump_json())
    (directory / "run.json").write_text(json.dumps(content), encoding="utf-8")
    interval = settings.train.log_interval
    with EventWriter(directory / "events.jsonl", 1) as writer:
        boundaries = [int(start.get("iteration", 0)) for start in run.starts]
        for number, start in enumerate(run.starts):
            defaults = {
                "iteration": 0,
                "ranks": 1,
                "hosts": ["here"],
                "device": "cpu",
                "precision": settings.train.precision,
                "kernels": KERNELS,
                "versions": VERSIONS,
                "hardware": "cpu, 2 cores",
                "changes": [],
                "train_iters": settings.train.train_iters,
            }
            writer.write("start", **defaults | start)
            last = [*boundaries, run.steps][number + 1]
            for step in range(boundaries[number] + 1, last + 1):
                if step % interval == 0 or step == run.steps:
                    writer.write("step", **_step(step, run, settings))
        for kind, values in run.events:
            writer.write(kind, **values)
        if run.end is not None:
            writer.write("exit", reason=run.end, iteration=run.steps)
    return directory


def _step(step: int, run: Written, settings: Any) -> dict[str, Any]:
    factor = 1 + run.noise(step)
    batch = settings.train.global_batch_size
    interval = settings.train.log_interval
    steps = range((step - 1) // interval * interval + 1, step + 1)
    loss = sum((4.0 * math.exp(-each / 10) + 1) for each in steps) / len(steps)
    values = {
        "iteration": step,
        "consumed_samples": step * batch,
        "consumed_tokens": step * batch * 16,
        "ms_per_iteration": 10.0 + step % 3,
        "lr": 1e-2 * min(1.0, step / 2),
        "global_batch_size": batch,
        "lm_loss": loss * factor,
        "grad_norm": (1.0 + 1 / step) * factor,
        "loss_scale": 1.0,
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "interval_iterations": len(steps),
    }
    return values | dict(run.values(step))


def since(step: int, size: float = 1e-2) -> Callable[[int], float]:
    """Return a relative difference that begins at a step and grows."""
    return lambda each: 0.0 if each < step else size * 1.2 ** (each - step)


@dataclass(frozen=True)
class Planted:
    """Two records that differ, and the reason that the comparison must name."""

    name: str
    b: Written
    reason: str | None
    """First of the reasons; None if the results do not differ."""
    step: int | None = 1
    """First step with another result; None if there is none."""
    a: Written = field(default_factory=Written)
    cause: str | None = None
    """Cause that must be among the differences, if the results do not differ."""


def lr_from(step: int) -> Callable[[int], Mapping[str, Any]]:
    """Return steps with another learning rate from one step on."""
    return lambda each: {"lr": 4e-3} if each >= step else {}


PLANTED = (
    Planted("seed", Written({"seed": 7}, noise=since(1, 0.1)), "seed"),
    Planted(
        "global batch size",
        Written({"train": {"global_batch_size": 16}}, noise=since(1)),
        "batch_size",
    ),
    Planted(
        "micro batch size",
        Written({"train": {"micro_batch_size": 4}}, noise=since(1, 1e-7)),
        "micro_batch_size",
    ),
    Planted(
        "ramp-up",
        Written(
            {"train": {"rampup_batch_size": {"start": 4, "increment": 4, "samples": 40}}},
            noise=since(1),
            values=lambda step: {"global_batch_size": 4 if step < 6 else 8},
        ),
        "batch_size",
    ),
    Planted(
        "learning rate",
        Written({"optim": {"lr": 5e-3}}, noise=since(2), values=lr_from(1)),
        "lr_schedule",
        2,
    ),
    Planted(
        "learning rate, and settings without effect",
        Written(
            {
                "optim": {"lr": 5e-3},
                "train": {"loss_spike_factor": 3.0},
                "resume": {"override": ["optim.lr"]},
            },
            noise=since(2),
            values=lr_from(1),
        ),
        "lr_schedule",
        2,
    ),
    Planted(
        "warm-up",
        Written({"optim": {"lr_warmup_iters": 4}}, noise=since(2, 1e-3), values=lr_from(1)),
        "lr_schedule",
        2,
    ),
    Planted(
        "decay",
        Written({"optim": {"lr_decay_iters": 10}}, noise=since(6, 1e-4), values=lr_from(5)),
        "lr_schedule",
        6,
    ),
    Planted(
        "weight decay",
        Written({"optim": {"weight_decay": 0.0}}, noise=since(2, 1e-4)),
        "optimizer",
        2,
    ),
    Planted(
        "clipping", Written({"optim": {"clip_grad": 0.5}}, noise=since(3, 1e-3)), "optimizer", 3
    ),
    Planted(
        "betas", Written({"optim": {"adam_beta2": 0.95}}, noise=since(3, 1e-3)), "optimizer", 3
    ),
    Planted("dropout", Written({"model": {"hidden_dropout": 0.1}}, noise=since(1)), "dropout"),
    Planted(
        "attention dropout",
        Written({"model": {"attention_dropout": 0.2}}, noise=since(1)),
        "dropout",
    ),
    Planted("width", Written({"model": {"hidden_size": 32}}, noise=since(1, 0.1)), "architecture"),
    Planted(
        "epsilon",
        Written({"model": {"layernorm_epsilon": 1e-6}}, noise=since(1, 1e-5)),
        "architecture",
    ),
    Planted(
        "initial deviation",
        Written({"model": {"init_method_std": 0.01}}, noise=since(1)),
        "initial_weights",
    ),
    Planted(
        "precision", Written({"train": {"precision": "bf16"}}, noise=since(1, 1e-3)), "precision"
    ),
    Planted(
        "precision of the machine",
        Written(starts=[{"precision": "bf16"}], noise=since(1, 1e-3)),
        "precision",
    ),
    Planted(
        "kernels",
        Written(starts=[{"kernels": {**KERNELS, "attention": "flash"}}], noise=since(1, 1e-7)),
        "kernels",
    ),
    Planted(
        "kernels after a resume",
        Written(
            starts=[{}, {"iteration": 10, "kernels": {**KERNELS, "optimizer": "fused"}}],
            noise=since(11, 1e-7),
        ),
        "kernels",
        11,
    ),
    Planted(
        "version of torch",
        Written(starts=[{"versions": VERSIONS | {"torch": "2.10.0"}}], noise=since(1, 1e-7)),
        "versions",
    ),
    Planted(
        "hardware",
        Written(starts=[{"hardware": "H100", "device": "cuda"}], noise=since(1, 1e-6)),
        "hardware",
    ),
    Planted(
        "ranks",
        Written({"launch": {"nproc_per_node": 2}}, starts=[{"ranks": 2}], noise=since(1, 1e-7)),
        "layout",
    ),
    Planted(
        "tensor parallel",
        Written(
            {"parallel": {"tensor_model_parallel_size": 2}, "launch": {"nproc_per_node": 2}},
            starts=[{"ranks": 2}],
            noise=since(1, 1e-7),
        ),
        "layout",
    ),
    Planted(
        "fewer ranks after a resume",
        Written(starts=[{}, {"iteration": 12, "ranks": 2}], noise=since(13, 1e-7)),
        "layout",
        13,
    ),
    Planted(
        "recompute", Written({"train": {"recompute": "full"}}, noise=since(1, 1e-7)), "recompute"
    ),
    Planted("engine", Written({"engine": "deepspeed"}, noise=since(1, 1e-7)), "engine"),
    Planted(
        "skipped samples",
        Written(
            {"train": {"skip_samples": ["40-47"]}},
            noise=since(7),
            values=lambda step: {"skipped_iterations": int(step == 6)},
        ),
        "skipped_iterations",
        7,
    ),
    Planted(
        "skipped for a loss that is not finite",
        Written(
            noise=since(9),
            values=lambda step: (
                {"skipped_iterations": int(step == 8), "nan_iterations": int(step == 8)}
            ),
            events=[("bad_batch", {"iteration": 8})],
        ),
        "skipped_iterations",
        9,
    ),
    Planted(
        "loss scale",
        Written(noise=since(6, 1e-3), values=lambda step: {"loss_scale": 0.5} if step >= 5 else {}),
        "loss_scale",
        6,
    ),
    Planted(
        "pretrained checkpoint",
        Written({"train": {"pretrained_checkpoint": "/there/iter_0000005"}}, noise=since(1, 0.2)),
        "initial_weights",
    ),
    Planted(
        "resumed from another checkpoint",
        Written(
            {"resume": {"checkpoint": "/there/iter_0000010"}},
            starts=[{"iteration": 10, "resumed_from": 10}],
            noise=since(11, 0.1),
        ),
        "resumed_from",
        11,
    ),
    Planted(
        "vocabulary",
        Written(
            {"data": {"tokenizer": {"kind": "train-bpe", "vocab_size": 600}}}, noise=since(1, 0.1)
        ),
        "tokenizer",
    ),
    Planted(
        "source",
        Written(
            {"data": {"source": {"kind": "jsonl", "files": ["other.jsonl"]}}}, noise=since(1, 0.1)
        ),
        "data",
    ),
    Planted(
        "sequence length", Written({"data": {"seq_length": 8}}, noise=since(1, 0.1)), "samples"
    ),
    Planted("split", Written({"data": {"split": "90,5,5"}}, noise=since(1, 0.1)), "samples"),
    Planted(
        "label smoothing", Written({"train": {"label_smoothing": 0.1}}, noise=since(1, 0.1)), "loss"
    ),
    Planted("nothing recorded, rounding", Written(noise=since(12, 1e-7)), "nondeterminism", 12),
    Planted("nothing recorded, large", Written(noise=since(12, 0.3)), "unexplained", 12),
    Planted(
        "after a resume",
        Written(starts=[{}, {"iteration": 10}], noise=since(11, 1e-2)),
        "resume",
        11,
    ),
    Planted(
        "changed at a resume",
        Written(
            {"optim": {"weight_decay": 0.0}},
            starts=[{}, {"iteration": 10, "changes": ["optim.weight_decay: 0.1 -> 0.0"]}],
            noise=since(12, 1e-4),
        ),
        "optimizer",
        12,
    ),
    Planted(
        "log interval",
        Written({"train": {"log_interval": 5}}, noise=since(7, 1e-2)),
        "unexplained",
        10,
    ),
    Planted(
        "log intervals of which none divides the other",
        Written({"train": {"log_interval": 6}}, noise=since(12, 1e-2)),
        "unexplained",
        12,
        a=Written({"train": {"log_interval": 4}}),
    ),
    Planted("stopped early", Written(steps=12, end="signal"), None, None, cause="length"),
    Planted(
        "longer", Written({"train": {"train_iters": 30}}, steps=30), None, None, cause="train_iters"
    ),
)
