"""Epochs of a training: its tokens divided by those of the train split.

BERT and T5, and documents that are not packed, count samples instead, because their samples have
different lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.blend_schedule import blend_steps
from megacore.config.data import DataConfig, Source
from megacore.config.run import RunConfig
from megacore.corpus.collect import describe
from megacore.data.blend import phases, targets, temperature_weights
from megacore.data.index_options import WeightStep, parse_split

MOST_EPOCHS = 4
"""Epochs up to which repeated data is nearly as good as new (Muennighoff et al. 2023, "Scaling
Data-Constrained Language Models", arXiv:2305.16264)."""
BYTES_PER_TOKEN = 4
"""Assumed bytes of text per token where only the text is known; GPT-2's BPE has 4.2 to 4.6 on
English text."""


@dataclass(frozen=True)
class Epochs:
    """Size of a training relative to its data."""

    trained: int
    """Tokens consumed at the end of the training: its samples times data.seq_length; or samples."""
    size: int
    """Tokens of the train split of all sources; or the samples of one pass over it."""
    sources: tuple[tuple[str, float], ...]
    """Name of each source, and the epochs over its train split."""
    unit: Literal["tokens", "samples"] = "tokens"
    estimate: str = ""
    """Basis of the estimate of `size`; empty if it was counted."""

    @property
    def epochs(self) -> float:
        """Number of passes over the train split."""
        return self.trained / self.size

    def sentence(self) -> str:
        """Return the epochs with the two numbers that they are the quotient of, on one line."""
        about = "about " if self.estimate else ""
        text = (
            f"epochs: {about}{self.epochs:.3g} ({self.trained:,} {self.unit} of training over "
            f"{about}{self.size:,} {self.unit} of the train split"
            f"{f', estimated from {self.estimate}' if self.estimate else ''})"
        )
        if len(self.sources) == 1:
            return text
        parts = (f"{epochs:.3g} over {name}" for name, epochs in self.sources)
        return f"{text}; {', '.join(parts)}"

    def warning(self) -> str | None:
        """Return one sentence if a source is repeated more than MOST_EPOCHS times, else None."""
        about = "about " if self.estimate else ""
        many = [
            f"{about}{epochs:.3g} epochs over {name}"
            for name, epochs in self.sources
            if epochs > MOST_EPOCHS
        ]
        if not many:
            return None
        return (
            f"the training makes {', '.join(many)}: repeated data is nearly as good as new "
            f"only up to {MOST_EPOCHS} epochs (arXiv:2305.16264): add data, or lower "
            "train.train_iters"
        )


def counts_tokens(config: RunConfig) -> bool:
    """Return True if all samples have the same number of tokens, so that tokens are counted."""
    return config.family == "gpt" and config.data.packing == "packed"


def measured_epochs(
    config: RunConfig, train: Mapping[str, Any], samples: int | None = None
) -> Epochs:
    """Return the epochs of a training, by the index stage's counts for the train split.

    `samples` are those at the end of the training, with those before the checkpoint of another run
    from which it resumes; None means that it begins at sample 0.
    """
    by_tokens = counts_tokens(config)
    samples = _samples(config) if samples is None else samples
    length = config.data.seq_length if by_tokens else 1
    members = train.get("members") or [{**train, "drawn": train["samples"]}]
    sizes = [
        member["tokens"] if by_tokens else member["samples"] // member["epochs"]
        for member in members
    ]
    steps = tuple(WeightStep(*step) for step in blend_steps(config.data))
    if steps and samples < train["samples"]:
        # The training ends before the maps, so it reads less of what the later weights add.
        weights = _weights(config.data, [member["tokens"] for member in members])
        drawn = [part * length for part in targets(phases(weights, steps, samples))]
    else:
        # A blend has a few more samples than the training, which it reads in a random order.
        drawn = [samples * length * member["drawn"] / train["samples"] for member in members]
    return _epochs(
        config, samples * length, sizes, drawn, unit="tokens" if by_tokens else "samples"
    )


def estimated_epochs(
    config: RunConfig, tokens: Sequence[int], estimate: str, samples: int | None = None
) -> Epochs:
    """Return the epochs that a training will have, before its index maps exist.

    `tokens` are those of each of `train_sources`, before they are divided into splits; `estimate`
    says what they come from, for the sentence. For `samples` see `measured_epochs`.
    """
    data = config.data
    samples = _samples(config) if samples is None else samples
    share = 1.0 if data.split_blends is not None else parse_split(data.split_weights)[0]
    length = data.seq_length
    steps = tuple(WeightStep(*step) for step in blend_steps(data))
    parts = phases(_weights(data, tokens), steps, samples)
    drawn = [part * length for part in targets(parts)]
    sizes = [int(share * each) for each in tokens]
    return _epochs(config, samples * length, sizes, drawn, estimate=estimate)


def train_sources(data: DataConfig) -> tuple[Source, ...]:
    """Return the sources of the train split, in the order of their blend."""
    if data.source is not None:
        return (data.source,)
    return tuple(member.source for member in data.train_blend)


def _weights(data: DataConfig, tokens: Sequence[int]) -> list[float]:
    if data.blend_temperature is not None:
        return list(temperature_weights([max(1, each) for each in tokens], data.blend_temperature))
    return [member.weight or 0.0 for member in data.train_blend] or [1.0]


def _samples(config: RunConfig) -> int:
    return BatchSchedule.of(config.train).consumed_after(config.train.train_iters)


def _epochs(
    config: RunConfig, trained: int, sizes: Sequence[int], drawn: Sequence[float], **values: Any
) -> Epochs:
    names = [describe(source) for source in train_sources(config.data)]
    epochs = tuple(
        (name, part / max(1, size)) for name, part, size in zip(names, drawn, sizes, strict=True)
    )
    return Epochs(trained, max(1, sum(sizes)), epochs, **values)
