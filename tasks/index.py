"""Stage `index`: the order in which samples are drawn from the tokens."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from prefect import get_run_logger

from megacore.artifact import Artifact, Manifest, StageKey, open_artifact
from megacore.artifact.files import canonical_json
from megacore.config import RunConfig
from megacore.config.batch_schedule import BatchSchedule
from megacore.config.blend_schedule import blend_steps
from megacore.config.data import WeightedSource
from megacore.config.keys import key_parameters
from megacore.data.blend import temperature_weights
from megacore.data.index_options import SPLIT_NAMES, IndexOptions, Member, Mixture, WeightStep
from megacore.errors import ArtifactError
from megacore.plan.epochs import Epochs, measured_epochs
from megacore.token_files.indexed_dataset import IndexedDataset, token_prefixes
from tasks._cache import StageResult, artifact_directory, build, stage_task
from tasks._mlflow import Dataset
from tasks._resume import resumed_state

Item = TypeVar("Item")

SAMPLES_OF = {"masked_lm": "bert", "span_corruption": "t5"}
"""Sections of `data` that determine the samples of a single family; keys of other families leave
them out."""
_HELD_OUT = "held_out"
"""Count of maps that continue others: the digest of those, which have the same held-out splits."""
_TRAINING_ONLY = (
    "fim",
    "weights",
    "blend_temperature",
    "reset_position_ids",
    "reset_attention_mask",
)
"""Values that determine samples, but not which tokens of a held-out split are predicted."""


@dataclass(frozen=True)
class RunData(Generic[Item]):
    """Artifacts from which a run is trained and scored, or in a dry run the names of the stages."""

    tokens: Item
    tokenizer: Item
    index: Item


def requested_samples(config: RunConfig) -> tuple[int, int, None]:
    """Return the number of samples of the train and validation split.

    The test split is one epoch of each source, so its number is None.
    """
    train = config.train
    return consumed_samples(config), train.eval_iters * train.global_batch_size, None


def consumed_samples(config: RunConfig) -> int:
    """Return the number of samples consumed at the end of the training.

    It includes those before the checkpoint of another run from which the training resumes, whose
    global batches may have had another size.
    """
    schedule, iterations = BatchSchedule.of(config.train), config.train.train_iters
    state = resumed_state(config)
    if state is None:
        return schedule.consumed_after(iterations)
    return schedule.consumed_after(max(0, iterations - state.iteration), state.consumed_samples)


def index_split(config: RunConfig) -> str | None:
    """Return the weights that divide each data set; None if each belongs to a single split."""
    return None if config.data.split_blends is not None else config.data.split_weights


def index_options(config: RunConfig) -> IndexOptions:
    """Return the options that determine the maps, in addition to tokens and number of samples."""
    from megacore.data.build import sentence_options

    data = config.data
    return IndexOptions(
        split=index_split(config),
        seq_length=data.seq_length,
        seed=config.seed,
        style=data.index_style,
        packing=data.packing,
        add_extra_token=data.add_extra_token,
        drop_last_partial=data.drop_last_partial,
        sentences=sentence_options(config.family, config.model, data),
    )


def mixture(config: RunConfig, tokens: Artifact) -> Mixture:
    """Return the data sets of each split, with their weights."""
    data = config.data
    prefixes = dict(zip(data.sources, token_prefixes(tokens.directory), strict=True))

    def members(blend: tuple[WeightedSource, ...]) -> tuple[Member, ...]:
        names = [prefixes[member.source] for member in blend]
        weights: Sequence[float | None] = [member.weight for member in blend]
        if data.blend_temperature is not None:
            datasets = [IndexedDataset(name) for name in names]
            sizes = [max(1, each.count_tokens(0, len(each))) for each in datasets]
            weights = temperature_weights(sizes, data.blend_temperature)
        return tuple(
            Member(name, weight, member.max_epochs)
            for name, weight, member in zip(names, weights, blend, strict=True)
        )

    steps = tuple(WeightStep(*step) for step in blend_steps(data))
    if data.split_blends is not None:
        blends = data.split_blends
        return Mixture.per_split(
            members(blends.train), members(blends.valid), members(blends.test), steps=steps
        )
    if data.blend is not None:
        return Mixture.blend(members(data.blend), steps)
    return Mixture.single(*prefixes.values())


def read_steps(config: RunConfig, samples: int) -> dict[str, Any]:
    """Return the blend's later weights within `samples` samples as a value of a key, if any."""
    steps = blend_steps(config.data)
    read = [[first, list(weights)] for first, weights in steps if first < samples]
    return {"blend_schedule": read} if read else {}


def resolved_samples(config: RunConfig) -> dict[str, Any]:
    """Return the values that determine a run's samples, besides plain configuration values."""
    data = config.data
    resolved: dict[str, Any] = {"split": index_split(config)}
    if config.family == "bert":
        resolved["masked_lm.pairs"] = config.model.bert_binary_head
    if data.split_blends is not None:
        blends = data.split_blends
        by_split = {"train": blends.train, "valid": blends.valid, "test": blends.test}
        resolved["weights"] = {name: _weights(config, blend) for name, blend in by_split.items()}
    elif data.blend is not None:
        resolved["weights"] = _weights(config, data.blend)
    return resolved


def without_other_families(config: RunConfig, samples: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of samples without the sections of other families."""
    other = {name for name, family in SAMPLES_OF.items() if family != config.family}
    return {name: value for name, value in samples.items() if name not in other}


def split_data(config: RunConfig) -> dict[str, Any]:
    """Return what determines the samples of a held-out split, besides its tokens."""
    resolved = {f"samples.{name}": value for name, value in resolved_samples(config).items()}
    samples = without_other_families(config, key_parameters(config, "run", resolved)["samples"])
    return {
        "family": config.family,
        "samples": {name: value for name, value in samples.items() if name not in _TRAINING_ONLY},
    }


def split_digests(config: RunConfig, tokens: Artifact, split: str) -> list[str]:
    """Return the digest of the tokens of each member of a split."""
    members = mixture(config, tokens).of(split)
    return [Manifest.read(Path(member.prefix).parent).digest for member in members]


def split_datasets(config: RunConfig, data: RunData[Artifact]) -> dict[str, Dataset]:
    """Return the splits by name, as MLflow records them with a run and its perplexities.

    The digest of a split does not depend on the number of iterations.
    """
    tokens, datasets = data.tokens, {}
    for split in SPLIT_NAMES:
        content = [split, split_data(config), split_digests(config, tokens, split)]
        datasets[split] = Dataset(
            name=f"{split}-{tokens.key}",
            digest=hashlib.sha256(canonical_json(content)).hexdigest(),
            uri=tokens.path,
            profile=data.index.counts.get(split, {}),
        )
    return datasets


def epochs_of(config: RunConfig, index: Artifact) -> Epochs:
    """Return the epochs of the training that reads these maps."""
    return measured_epochs(config, index.counts["train"], consumed_samples(config))


def report_epochs(config: RunConfig, index: Artifact) -> str:
    """Log a warning if the data is repeated too often, and return the flow's summary of epochs."""
    warning = epochs_of(config, index).warning()
    if warning:
        get_run_logger().warning("%s", warning)
    return epochs_summary(config, index)


def epochs_summary(config: RunConfig, index: Artifact) -> str:
    """Return the epochs of the training as markdown, with a warning if they are too many.

    For samples of whole documents it includes the share of padding.
    """
    epochs = epochs_of(config, index)
    warning = epochs.warning()
    sentence, warning = (
        re.sub(r"([*_`\[\]<>])", r"\\\1", text or "") for text in (epochs.sentence(), warning)
    )
    padding = index.counts["train"].get("padding")
    if padding is not None:
        sentence += f"; {100 * padding:.3g} % of the tokens of its samples are padding"
    return f"{sentence}\n" + (f"\n**Warning:** {warning}\n" if warning else "")


def _weights(config: RunConfig, blend: tuple[WeightedSource, ...]) -> list[list[float | None]]:
    """Return (number among the sources, weight) of each member; null with a temperature."""
    return [[config.data.sources.index(member.source), member.weight] for member in blend]


def index_key(
    config: RunConfig,
    tokens: Artifact,
    planned_before: int | None,
    requested: tuple[int, int, None] | None = None,
) -> StageKey:
    """Return the key of the maps, by default with the samples that the run requests.

    It contains the plan of the maps, so more iterations within an epoch do not change it. A run
    that is extended or resumes from another one keeps the order of the samples that were planned
    before, `planned_before` of them; further epochs follow after those.
    """
    from megacore.data.index_maps import VERSION, index_plan
    from megacore.data.sentence_maps import sentence_plan

    requested = requested or requested_samples(config)
    plan_of = index_plan if config.family == "gpt" else sentence_plan
    plan = plan_of(
        mixture(config, tokens), index_options(config), requested, planned_before=planned_before
    )
    steps = read_steps(config, max(requested[0], planned_before or 0))
    resolved = resolved_samples(config) | steps | {"plan": plan}
    parameters = key_parameters(config, "index", resolved)
    return StageKey.of("index", VERSION, without_other_families(config, parameters), tokens=tokens)


def held_out_digest(index: Artifact) -> str:
    """Return the digest of the maps for keys of stages that do not depend on the train maps.

    It is that of the maps that an extension continues, whose held-out splits are the same, so that
    an extension does not measure again what was measured before.
    """
    digest: str = index.counts.get(_HELD_OUT, {}).get("digest", index.digest)
    return digest


@stage_task("index", index_key)
def build_index(config: RunConfig, tokens: Artifact, planned_before: int | None) -> StageResult:
    """Build the document, sample and shuffle index of each split, or its sentence map.

    See `index_key` for `planned_before`.
    """
    from megacore.data.index_maps import build_index_maps
    from megacore.data.sentence_maps import build_sentence_maps

    build_maps = build_index_maps if config.family == "gpt" else build_sentence_maps

    def fill(directory: Path) -> dict[str, Any]:
        counts = build_maps(
            mixture(config, tokens),
            directory,
            index_options(config),
            requested_samples(config),
            planned_before=planned_before,
        )
        return counts | _continued(config, tokens, planned_before)

    key = index_key(config, tokens, planned_before)
    return build(config, key, fill, writes=lambda: _map_bytes(config, tokens, planned_before))


def _continued(
    config: RunConfig, tokens: Artifact, planned_before: int | None
) -> dict[str, dict[str, str]]:
    """Return the digest of the maps that an extension continues, for `held_out_digest`.

    It is empty if the maps continue no others, or if those do not exist any more.
    """
    train, valid, test = requested_samples(config)
    if planned_before is None or planned_before >= train:
        return {}
    key = index_key(config, tokens, planned_before, (planned_before, valid, test))
    try:
        return {_HELD_OUT: {"digest": open_artifact(artifact_directory(key)).digest}}
    except ArtifactError:
        return {}


def _map_bytes(config: RunConfig, tokens: Artifact, planned_before: int | None) -> int:
    """Return about how many bytes the maps take.

    An entry of GPT's maps has 4 bytes for a document, and 12 for a sample: its position in the
    documents, and its place in the shuffled order. BERT and T5 have 12 bytes for a sample.
    """
    train, valid, _ = requested_samples(config)
    train = max(train, planned_before or 0)
    if config.family != "gpt":
        return 12 * (train + valid)
    counts: dict[str, int] = tokens.counts
    in_epoch = max(1, counts["tokens"] // config.data.seq_length)
    epochs = -(-train // in_epoch)
    # Best fit has another entry for each full piece of a document.
    sample = 16 if config.data.packing == "best_fit" else 12
    return epochs * (4 * counts["documents"] + sample * in_epoch)
