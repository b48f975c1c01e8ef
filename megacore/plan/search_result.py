"""Result of a search: the layouts with their predictions, and why others were refused."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from rich.table import Table

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.deepspeed import zero_of
from megacore.config.parallel import ZERO_STAGES
from megacore.config.run import RunConfig
from megacore.config.train import Recompute
from megacore.observe.flops import TransformerShape, step_flops
from megacore.parallel.rank_layout import RankLayout
from megacore.plan.iteration import Iteration
from megacore.plan.machine import Machine
from megacore.plan.memory import GIB
from megacore.plan.prediction import Prediction
from megacore.plan.throughput import SECONDS_PER_DAY

Partition = Literal["balanced", "uniform"]
FRONT = 1.5
"""Time, relative to the fastest layout, to which the Pareto front of a search is complete."""
_ERRORS = {"A100": 0.06, "H100": 0.074}
"""Mean errors of predicted times against published runs, by a word of the device's name: A100 on
one host and on many, H100 without any run in the fit. docs/planning.md has the tables."""

CHOSEN = (
    "train.micro_batch_size",
    "train.recompute",
    "train.recompute_num_layers",
    "parallel.tensor_model_parallel_size",
    "parallel.sequence_parallel",
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size",
    "parallel.pipeline_partition",
    "parallel.context_parallel_size",
    "parallel.delay_weight_gradients",
    "parallel.data_parallel_sharding",
    "deepspeed.zero_stage",
)
"""Dotted keys that `Choice.values` may set."""


@dataclass(frozen=True)
class Choice:
    """Values of a configuration that the search chooses."""

    tensor: int
    pipeline: int
    virtual: int
    data: int
    micro_batch: int
    zero: int
    """ZeRO stage."""
    recompute: Recompute
    sequence_parallel: bool
    partition: Partition
    context: int = 1
    delayed: bool = False
    """True if weight gradients are delayed."""

    @classmethod
    def of(cls, config: RunConfig, layout: RankLayout) -> Self:
        """Return the values of a configuration with this layout; a listed partition is left out."""
        parallel, train = config.parallel, config.train
        partition = parallel.pipeline_partition
        return cls(
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            virtual=parallel.virtual_pipeline_model_parallel_size,
            data=layout.data,
            micro_batch=train.micro_batch_size,
            zero=zero_of(config).stage,
            recompute=train.recompute,
            sequence_parallel=parallel.sequence_parallel,
            partition="balanced" if isinstance(partition, tuple) else partition,
            context=layout.context,
            delayed=parallel.delay_weight_gradients,
        )

    @property
    def layout(self) -> RankLayout:
        """Sizes of the kinds of parallelism."""
        return RankLayout(
            tensor=self.tensor,
            pipeline=self.pipeline,
            virtual=self.virtual,
            data=self.data,
            context=self.context,
        )

    @property
    def name(self) -> str:
        """Short name for a chart, such as `tp 8, pp 16, v 2, dp 8, b 1, ZeRO-1, full`."""
        parts = [f"tp {self.tensor}{' sp' if self.sequence_parallel else ''}"]
        parts += [f"cp {self.context}"] * (self.context > 1)
        parts += [f"pp {self.pipeline}"] * (self.pipeline > 1)
        parts += [f"v {self.virtual}"] * (self.virtual > 1)
        parts += ["delayed"] * self.delayed
        parts += [f"dp {self.data}", f"b {self.micro_batch}"]
        parts += [f"ZeRO-{self.zero}"] * (self.zero > 0)
        parts += [self.recompute] * (self.recompute != "none")
        return ", ".join(parts)

    def values(self, config: RunConfig) -> dict[str, Any]:
        """Return the dotted values with which `config` gets this layout."""
        values: dict[str, Any] = {
            "train.micro_batch_size": self.micro_batch,
            "train.recompute": self.recompute,
            "parallel.tensor_model_parallel_size": self.tensor,
            "parallel.sequence_parallel": self.sequence_parallel,
            "parallel.pipeline_model_parallel_size": self.pipeline,
            "parallel.virtual_pipeline_model_parallel_size": self.virtual,
            "parallel.pipeline_partition": self.partition,
        }
        if self.context != config.parallel.context_parallel_size:
            values["parallel.context_parallel_size"] = self.context
        if self.delayed != config.parallel.delay_weight_gradients:
            values["parallel.delay_weight_gradients"] = self.delayed
        if self.recompute == "none" and config.train.recompute_num_layers is not None:
            values["train.recompute_num_layers"] = None
        if config.engine == "native":
            values["parallel.data_parallel_sharding"] = ZERO_STAGES[self.zero]
        elif config.deepspeed.config is None:
            values["parallel.data_parallel_sharding"] = "none"
            values["deepspeed.zero_stage"] = self.zero
        return values

    def applied(self, config: RunConfig) -> RunConfig:
        """Return `config` with this layout, which the caller checks."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.values(config).items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        return config.model_copy(
            update={
                name: getattr(config, name).model_copy(update=values)
                for name, values in sections.items()
            }
        )


@dataclass(frozen=True)
class Candidate:
    """Layout that fits in memory, with its prediction."""

    choice: Choice
    iteration: Iteration
    prediction: Prediction
    memory: float
    """Bytes of the rank that needs most."""

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.prediction.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        config = self.iteration.config
        return config.train.global_batch_size * config.data.seq_length / self.seconds

    @property
    def utilisation(self) -> float:
        """Share of the vendor's peak rate that the model's operations reach (MFU)."""
        iteration = self.iteration
        config, machine = iteration.config, iteration.machine
        shape = TransformerShape.of(config, config.model.padded_vocab_size(iteration.vocab_size))
        operations = step_flops(shape, config.train.global_batch_size, "none")
        peak = machine.peak(iteration.precision) * iteration.cores * iteration.layout.world_size
        return operations / (self.seconds * peak)

    @property
    def days(self) -> float:
        """Days of `train.train_iters` iterations; a growing batch counts by its samples."""
        train = self.iteration.config.train
        samples = BatchSchedule.of(train).consumed_after(train.train_iters)
        return samples / train.global_batch_size * self.seconds / SECONDS_PER_DAY

    @property
    def device_hours(self) -> float:
        """Hours of all devices in these days."""
        return self.days * 24 * self.iteration.layout.world_size


class Refused(NamedTuple):
    """Candidates that were refused for one reason."""

    candidates: int
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """Fastest layouts of a configuration on a machine."""

    machine: Machine
    ranks: int
    total: int
    """Number of candidates."""
    best: tuple[Candidate, ...]
    """Fastest candidates, the fastest first."""
    evaluated: tuple[Candidate, ...]
    """All candidates that were simulated, the fastest first."""
    refused: tuple[Refused, ...]

    @property
    def front(self) -> tuple[Candidate, ...]:
        """Simulated candidates of which no other is as fast with as little memory (Pareto)."""
        front: list[Candidate] = []
        for candidate in self.evaluated:
            if not front or candidate.memory < front[-1].memory:
                front.append(candidate)
        return tuple(front)

    @property
    def error(self) -> float | None:
        """Mean error of predictions for such devices; None if they were not validated."""
        return next((error for word, error in _ERRORS.items() if word in self.machine.name), None)

    def table(self, price: float | None = None) -> Table:
        """Return a table with a row per layout.

        `cp` has a column if a layout divides sequences, and so have delayed weight gradients.

        Args:
            price: price of a device for an hour, in any currency.
        """
        table, divided = Table(), any(each.choice.context > 1 for each in self.best)
        delays = any(each.choice.delayed for each in self.best)
        for column in (
            *("", "tp", *["cp"] * divided, "pp", "v", *["delayed"] * delays, "dp"),
            *("ZeRO", "b", "recompute", "sequence", "partition"),
            *("s/iteration", "tokens/s", "MFU", "memory/GiB", "days", "GPU-hours"),
            *["cost"] * (price is not None),
        ):
            table.add_column(
                column,
                justify="left"
                if column in ("delayed", "recompute", "sequence", "partition")
                else "right",
            )
        for number, each in enumerate(self.best, 1):
            choice = each.choice
            table.add_row(
                *map(str, (number, choice.tensor, *[choice.context] * divided)),
                *map(str, (choice.pipeline, choice.virtual)),
                *["yes" if choice.delayed else "no"] * delays,
                str(choice.data),
                *map(str, (choice.zero, choice.micro_batch, choice.recompute)),
                "divided" if choice.sequence_parallel else "whole",
                choice.partition,
                f"{each.seconds:.4g}",
                f"{each.tokens_per_second:,.0f}",
                f"{each.utilisation:.1%}",
                f"{each.memory / GIB:.1f} of {self.machine.memory_gib:.0f}",
                f"{each.days:,.2f}" if each.days < 10 else f"{each.days:,.1f}",
                f"{each.device_hours:,.0f}",
                *([] if price is None else [f"{each.device_hours * price:,.0f}"]),
            )
        return table

    def summary(self) -> str:
        """Return lines with the range of error and the reasons why the rest was refused."""
        name = self.machine.name
        error = (
            f"times on {name} are not validated against measured runs"
            if self.error is None
            else f"times are within {self.error:.1%} of measured ones on average "
            f"({self.best[0].seconds * (1 - self.error):.4g} to "
            f"{self.best[0].seconds * (1 + self.error):.4g} s for the first)"
        )
        lines = [
            f"{error}; the efficiencies of {name} are from: {self.machine.fitted_on}",
            f"{self.total:,} candidates on {self.ranks:,} devices, {len(self.evaluated)} simulated",
            *(f"{each.candidates:>12,}  {each.reason}" for each in self.refused),
        ]
        return "\n".join(lines)
