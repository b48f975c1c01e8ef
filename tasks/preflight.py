"""Checks before a pretraining: feasibility on this host, cached stages and expected cost."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from megacore.artifact import Artifact, Workspace
from megacore.cluster.executors import check_executor
from megacore.cluster.hosts.hardware import hardware_of
from megacore.cluster.start import check_launcher
from megacore.config import RunConfig, load_config
from megacore.config.data import HubSource, Source, SourceTreeSource, TextSource
from megacore.convert.counterparts import exportable
from megacore.corpus.curate import check_steps, needed_bytes
from megacore.corpus.curate_job import check_installed
from megacore.errors import HostsSilentError, MegacoreError
from megacore.plan.epochs import (
    BYTES_PER_TOKEN,
    Epochs,
    counts_tokens,
    estimated_epochs,
    train_sources,
)
from megacore.plan.preflight import preflight, resolve_launch
from megacore.plan.vocabulary import expected_vocab_size
from megacore.ranks.evaluate import UNIGRAM
from megacore.zeroshot.harness import check_tasks
from tasks._plan import DryRun, UnbuiltArtifact, launch_lines, show_config, show_plan
from tasks._resume import check_resumed, warn_of_other_runs
from tasks._stage_runner import StageRunner, numbered
from tasks.convert import convert
from tasks.evaluate import Target, evaluate, evaluate_checkpoint, kept_checkpoints
from tasks.index import RunData, consumed_samples, epochs_of
from tasks.lm_eval import lm_eval
from tasks.publish import publish
from tasks.push import check_push, push_stage
from tasks.train import check_pretrained, run_directory, train
from tasks.zeroshot import text_digests, zeroshot_checkpoint

EPOCHS_UNKNOWN = "epochs: known after the stage index"
CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


def load_checked_config(
    conf: str, overrides: Mapping[str, Any] | None, *, trains: bool = True
) -> RunConfig:
    """Load `conf`, apply `overrides`, and refuse a configuration that cannot work on its hosts.

    Raises ConfigError, ParallelLayoutError, WorkspaceError, LaunchError or ConversionError before
    any stage starts.
    """
    config = load_config(conf, overrides, conf_dir=CONF_DIR)
    Workspace.of()
    if config.data.curate:
        check_steps(config.data.curate)
        check_executor(config.data.curate_executor)
    if config.evaluate.contamination:
        check_installed("evaluate.contamination")
    if trains:
        get_run_logger().info("preflight: %s", check_machine(config))
        warn_of_other_runs(config)
    return config


def check_machine(config: RunConfig) -> str:
    """Check the configuration on its hosts; return its memory per rank and days in one sentence.

    A second line names a lighter recomputation that fits, if any. Hosts that do not answer are not
    an error here, because all of their stages may be cached: memory and days are then not checked.

    Raises ConfigError, ParallelLayoutError, LaunchError or ConversionError when it cannot work.
    """
    check_pretrained(config)
    check_resumed(config)
    check_launcher(config.launch)
    exportable(config.family, config.model, config.data)
    text_digests(config)
    check_tasks(config.evaluate.lm_eval, config.max_position_embeddings)
    check_push(config.export)
    vocab_size = expected_vocab_size(config.data.tokenizer)
    try:
        hardware = hardware_of(config.launch)
    except HostsSilentError as error:
        return f"memory and days are not checked: {error}"
    return preflight(config, vocab_size, hardware).report()


def plan_publication(plan: DryRun[RunConfig], trained: Artifact, data: RunData[Artifact]) -> None:
    """Plan the stages of `pretrain` after the training, in order.

    The checkpoints are known when the training is finished (`trained`). Before that, one row of
    each kind stands for all of them.
    """
    kept: tuple[Target, ...] = ()
    if not isinstance(trained, UnbuiltArtifact):
        with kept_checkpoints(trained.directory) as kept:
            pass  # only their names and digests are needed
    scores = [
        plan.checkpoint_stage(evaluate_checkpoint, target.name, data.index, target).artifact
        for target in (*kept, Target(UNIGRAM))
    ]
    evaluation = plan.stage(evaluate, trained, scores[-1], tuple(scores[:-1]))
    zero_shot = _plan_zero_shot(plan, kept, evaluation, data.tokenizer)
    exported = plan.stage(convert, trained, evaluation, data)
    scored = (*zero_shot, *_plan_lm_eval(plan, kept, trained, evaluation, exported, data))
    published = plan.stage(publish, trained, evaluation, exported, data, scored, plan.contamination)
    push_stage(plan, trained, exported, published)


def _plan_zero_shot(
    plan: DryRun[RunConfig], kept: tuple[Target, ...], evaluation: Artifact, tokenizer: Artifact
) -> list[Artifact]:
    zero_shot = plan.config.evaluate.zero_shot
    if not zero_shot.requested:
        return []
    if kept and zero_shot.checkpoints == "all":
        return [
            plan.checkpoint_stage(zeroshot_checkpoint, target.name, tokenizer, target).artifact
            for target in kept
        ]

    if isinstance(evaluation, UnbuiltArtifact):  # which tells the best checkpoint
        return [plan.stage(zeroshot_checkpoint, evaluation)]
    (best,) = (target for target in kept if target.name == evaluation.counts["best"])
    return [plan.stage(zeroshot_checkpoint, tokenizer, best)]


def _plan_lm_eval(
    plan: DryRun[RunConfig],
    kept: tuple[Target, ...],
    trained: Artifact,
    evaluation: Artifact,
    exported: Artifact,
    data: RunData[Artifact],
) -> list[Artifact]:
    options = plan.config.evaluate.lm_eval
    if not options.tasks:
        return []
    if not kept or options.checkpoints == "best":
        return [plan.stage(lm_eval, exported)]
    names = [target.name for target in kept]
    exports = [
        plan.checkpoint_stage(convert, name, trained, evaluation, data, name).artifact
        for name in names
    ]
    return [
        plan.checkpoint_stage(lm_eval, name, export).artifact
        for name, export in zip(names, exports, strict=True)
    ]


def dry_run_report(
    conf: str,
    overrides: Mapping[str, Any] | None,
    data_stages: Callable[[StageRunner[RunConfig]], RunData[Artifact]],
) -> None:
    """Print (and store) the configuration, each stage's key and state, and the cost; run nothing.

    `data_stages` runs the stages of the data, of which a dry run only looks up the artifacts.
    A key is unknown until its inputs exist. An error of the checks is shown too, then raised.
    """
    config = load_checked_config(conf, overrides, trains=False)
    show_config(config)
    refusal: MegacoreError | None = None
    try:
        cost = check_machine(config)
    except MegacoreError as error:
        refusal, cost = error, str(error)
    plan = DryRun(config)
    data = data_stages(plan)
    plan_publication(plan, plan.stage(train, data), data)
    artifacts = plan.artifacts
    epochs = planned_epochs(config, artifacts)
    lines = [f"training: {cost}", epochs.sentence() if epochs else EPOCHS_UNKNOWN]
    show_plan(
        config.name,
        plan.planned,
        "\n".join([*lines, *_planned_curation(config, artifacts)]),
        refusal,
        lambda: launch_commands(config, artifacts),
        warning=epochs.warning() if epochs else None,
    )


def _planned_curation(config: RunConfig, artifacts: Mapping[str, Artifact]) -> list[str]:
    """Return a sentence on the disk that the next curations need, if their corpora exist."""
    missing = [
        corpus.counts["bytes"]
        for number in range(len(config.data.sources))
        if (corpus := artifacts.get(numbered("collect", number))) is not None
        and numbered("curate", number) not in artifacts
    ]
    if not config.data.curate or not missing:
        return []
    needed = needed_bytes(max(missing), config.data.curate)
    return [f"curate: takes about {needed / 2**30:,.2f} GiB of disk, most of it temporarily"]


def planned_epochs(config: RunConfig, artifacts: Mapping[str, Artifact]) -> Epochs | None:
    """Return the epochs of the training, or None if the size of a source is not known yet.

    They are estimated if the index maps do not exist and samples are packed: from the tokens of a
    source, or from the bytes of a collected one. `artifacts` are those of a dry run.
    """
    if "index" in artifacts:
        return epochs_of(config, artifacts["index"])
    if not counts_tokens(config):
        return None
    sizes = [_tokens(config, source, artifacts) for source in train_sources(config.data)]
    tokens = [size for size, _ in sizes if size is not None]
    if len(tokens) < len(sizes):
        return None
    counted = all(is_counted for _, is_counted in sizes)
    estimate = "data.split" if counted else f"{BYTES_PER_TOKEN} bytes of text per token"
    return estimated_epochs(config, tokens, estimate, consumed_samples(config))


def _tokens(
    config: RunConfig, source: Source, artifacts: Mapping[str, Artifact]
) -> tuple[int | None, bool]:
    """Return the tokens of a source, or None, and whether they were counted."""
    number = config.data.sources.index(source)
    tokens = artifacts.get(numbered("tokenize", number))
    if tokens is not None:
        return tokens.counts["tokens"], True
    if config.data.curate:
        curated = artifacts.get(numbered("curate", number))
        return (
            (None, False)
            if curated is None
            else (curated.counts["bytes"] // BYTES_PER_TOKEN, False)
        )
    corpus = artifacts.get(numbered("collect", number))
    # The files of other sources may be compressed, or hold more than the text.
    if corpus is None or not isinstance(source, HubSource | SourceTreeSource | TextSource):
        return None, False
    return corpus.counts["bytes"] // BYTES_PER_TOKEN, False


def launch_commands(config: RunConfig, artifacts: Mapping[str, Artifact]) -> list[str]:
    """Return the commands that start the training on each host.

    If its inputs do not exist yet, the run's key is `<key>`.
    """
    tokens = artifacts.get("blend" if len(config.data.sources) > 1 else "tokenize")
    directory = Workspace.of().folder("train") / "<key>"
    if tokens is not None and "tokenizer" in artifacts:
        directory = run_directory(config, tokens, artifacts["tokenizer"])
    ranks = resolve_launch(config, hardware_of(config.launch))
    return launch_lines(config, "megacore.ranks.pretrain", directory, *ranks)
