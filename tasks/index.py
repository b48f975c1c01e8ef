"""Stage `index`: the order in which samples are drawn from the tokens."""

from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey
from megacore.config import RunConfig
from megacore.tokenizer.tokenize import tokens_prefix
from megacore.train.batch_schedule import BatchSchedule
from tasks._cache import StageResult, build, stage_task


def wanted_samples(config: RunConfig) -> tuple[int, int, None]:
    """Samples of the train and validation split; the test split is one epoch, whatever its size."""
    train = config.train
    return BatchSchedule.of(config).consumed_after(train.train_iters), train.eval_iters * train.global_batch_size, None


def index_key(config: RunConfig, tokens: Artifact) -> StageKey:
    """The key of the maps: what decides them, so that more iterations within an epoch change nothing."""
    from megacore.data.index_maps import VERSION, index_plan

    data = config.data
    prefix = tokens_prefix(tokens.directory)
    parameters = {
        "split": data.split_weights,
        "seq_length": data.seq_length,
        "seed": config.seed,
        "plan": index_plan(prefix, data.split_weights, data.seq_length, wanted_samples(config)),
    }
    return StageKey.of("index", VERSION, parameters, tokens=tokens)


@stage_task("index", index_key)
def build_index(config: RunConfig, tokens: Artifact) -> StageResult:
    """Build the document, sample and shuffle index of each split."""
    from megacore.data.index_maps import build_index_maps

    def fill(directory: Path) -> dict[str, Any]:
        return build_index_maps(
            tokens_prefix(tokens.directory),
            directory,
            split=config.data.split_weights,
            seq_length=config.data.seq_length,
            seed=config.seed,
            samples=wanted_samples(config),
        )

    return build(config, index_key(config, tokens), fill)
