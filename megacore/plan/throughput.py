"""Operations of a run, and its predicted duration."""

from collections.abc import Sequence
from dataclasses import dataclass

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.run import RunConfig
from megacore.hardware import Hardware
from megacore.observe.flops import TransformerShape, step_flops
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of
from megacore.plan.activations import recomputed
from megacore.plan.iteration import Iteration
from megacore.plan.machine import Machine, machine_of
from megacore.plan.prediction import Prediction

SECONDS_PER_DAY = 86_400.0


def training_flops(config: RunConfig, vocab_size: int) -> int:
    """Return the operations of the run over all ranks (Narayanan et al. 2021).

    Includes validations, and the perplexity of each checkpoint over `evaluate.max_samples` samples.
    """
    shape = TransformerShape.of(config, config.model.padded_vocab_size(vocab_size))
    train = config.train
    consumed = BatchSchedule.of(train).consumed_after(train.train_iters)
    layers = recomputed_layers(chunks_of(config, vocab_size), train.recompute_num_layers)
    iterations = step_flops(shape, consumed, train.recompute, *layers)
    samples = config.eval_rounds * train.eval_iters * train.global_batch_size
    samples += config.checkpoint_rounds * (config.evaluate.max_samples or 0)
    return iterations + step_flops(shape, samples, "none") // 3


def recomputed_layers(chunks: Sequence[ModelChunk], limit: int | None) -> tuple[int, int]:
    """Return the number of recomputed layers of the model, with T5's decoder separately.

    `limit` is the number of layers at the start of each chunk that recompute; None for all.
    """
    encoder, decoder = zip(*(recomputed(chunk, limit) for chunk in chunks), strict=True)
    return sum(encoder), sum(decoder)


@dataclass(frozen=True)
class RunTime:
    """Predicted duration of a run."""

    iteration: Prediction
    """Seconds of one iteration with the whole batch, by part."""
    hardware: str
    """Name of the hardware that was assumed."""
    seconds: float
    """Seconds of all iterations and validations."""

    @property
    def days(self) -> float:
        """The run's duration in days."""
        return self.seconds / SECONDS_PER_DAY

    @property
    def duration(self) -> str:
        """The run's duration in days, hours or minutes, with the unit."""
        if self.days >= 1:
            return f"{self.days:,.1f} days" if self.days < 100 else f"{self.days:,.0f} days"
        minutes = self.seconds / 60
        return f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.1f} minutes"


def planned_iteration(
    config: RunConfig,
    vocab_size: int,
    hardware: Hardware,
    layout: RankLayout,
    threads: int,
    machine: Machine | None = None,
    ranks_per_host: int | None = None,
) -> Iteration:
    """Return the iteration of a run on its hosts, which are assumed to be equal to `hardware`.

    A `machine` of None is that of the hardware's devices. Without `ranks_per_host`, the ranks have
    all devices of a host with GPUs, and share one host without. Raises ConfigError if the hardware
    file is missing or wrong.
    """
    precision = hardware.resolve_precision(config.train.precision)
    machine = machine_of(hardware, precision) if machine is None else machine
    cores = 1.0
    together = ranks_per_host or (
        machine.devices_per_node if machine.device == "cuda" else layout.world_size
    )
    if machine.device == "cpu":
        cores = min(threads, machine.devices_per_node / together)
    machine = machine.model_copy(update={"devices_per_node": together})
    return Iteration(config, vocab_size, machine, layout, precision, cores)


def predict_run(iteration: Iteration) -> RunTime:
    """Predict the duration of a run from its iteration with the whole batch.

    Smaller batches of a ramp-up and validations take time in proportion to their operations. Raises
    the errors of `Iteration.predict`, and ConfigError for an unknown rate of the precision.
    """
    config, vocab_size, train = iteration.config, iteration.vocab_size, iteration.config.train
    prediction = iteration.predict()
    shape = TransformerShape.of(config, config.model.padded_vocab_size(vocab_size))
    layers = recomputed_layers(chunks_of(config, vocab_size), train.recompute_num_layers)
    operations = step_flops(shape, train.global_batch_size, train.recompute, *layers)
    seconds = prediction.seconds * training_flops(config, vocab_size) / operations
    return RunTime(prediction, iteration.machine.name, seconds)
