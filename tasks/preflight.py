"""Checks before a pretraining: feasibility on this host, cached stages and expected cost."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from megacore.artifact import Artifact, StageKey, Workspace
from megacore.cluster.executors import check_executor
from megacore.cluster.hosts.hardware import hardware_of
from megacore.cluster.start import check_launcher
from megacore.config import RunConfig, load_config
from megacore.config.curate import compares_sources
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
from tasks._plan import PlannedStage, launch_lines, planned_row, show_config, show_plan
from tasks._resume import check_resumed, warn_of_other_runs
from tasks._stage_runner import numbered
from tasks.collect import collect_key, needs_punkt, punkt_key
from tasks.contamination import contamination_key, decontaminate_key, search_key
from tasks.convert import convert_key
from tasks.curate import curate_key
from tasks.evaluate import Target, evaluate_key, kept_checkpoints, score_key
from tasks.index import RunData, consumed_samples, epochs_of, index_key
from tasks.lm_eval import lm_eval_key
from tasks.publish import publication_problem, publish_key
from tasks.push import check_push, planned_push
from tasks.tokenize import blend_key, tokenize_key, tokenizer_key
from tasks.train import (
    check_pretrained,
    planned_order,
    run_directory,
    train_key,
    training_problem,
)
from tasks.zeroshot import text_digests, zeroshot_key

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
    check_tasks(config.evaluate.lm_eval)
    check_push(config.export)
    vocab_size = expected_vocab_size(config.data.tokenizer)
    try:
        hardware = hardware_of(config.launch)
    except HostsSilentError as error:
        return f"memory and days are not checked: {error}"
    return preflight(config, vocab_size, hardware).report()


def planned_training(config: RunConfig) -> list[PlannedStage]:
    """Return the stages of `pretrain` for this configuration, up to the training, in order."""
    sources = config.data.sources

    def names(stage: str) -> tuple[str, ...]:
        return tuple(numbered(stage, number) for number in range(len(sources)))

    corpora = names("collect")
    planned = [
        PlannedStage(name, partial(collect_key, source=source))
        for name, source in zip(corpora, sources, strict=True)
    ]
    if config.data.curate:
        curated, across = names("curate"), compares_sources(config.data.curate)
        planned += [
            PlannedStage(name, curate_key, (corpus, curated[: number if across else 0]))
            for number, (name, corpus) in enumerate(zip(curated, corpora, strict=True))
        ]
        corpora = curated
    searches = names("search") if config.evaluate.contamination else ()
    planned += [
        PlannedStage(name, search_key, (corpus,))
        for name, corpus in zip(searches, corpora, strict=bool(searches))
    ]
    if config.evaluate.contamination == "remove":
        cleaned = names("decontaminate")
        planned += [
            PlannedStage(name, partial(decontaminate_key, number=number), (corpus, searches))
            for number, (name, corpus) in enumerate(zip(cleaned, corpora, strict=True))
        ]
        corpora = cleaned
    planned.append(PlannedStage("tokenizer", tokenizer_key, (corpora,)))
    punkt = "punkt" if needs_punkt(config) else None
    if punkt:
        planned.append(PlannedStage(punkt, punkt_key))
    members, data = names("tokenize"), _planned_data(config)
    planned += [
        PlannedStage(name, tokenize_key, (corpus, "tokenizer", punkt))
        for name, corpus in zip(members, corpora, strict=True)
    ]
    if data.tokens == "blend":
        planned.append(PlannedStage("blend", blend_key, (members,)))
    planned.append(PlannedStage("index", _index_key, (data.tokens, "tokenizer")))
    if searches:
        inputs = (searches, data.tokens, "index")
        planned.append(PlannedStage("contamination", contamination_key, inputs))
    train_stage = PlannedStage(
        "train", train_key, (data,), problem=training_problem, directory=_run_directory
    )
    return [*planned, train_stage]


def _planned_data(config: RunConfig) -> RunData[str]:
    tokens = "blend" if len(config.data.sources) > 1 else "tokenize"
    return RunData(tokens, "tokenizer", "index")


def planned_publication(config: RunConfig, trained: Artifact | None) -> list[PlannedStage]:
    """Return the stages of `pretrain` after the training, in order.

    The checkpoints are known when the training is finished (`trained`). Before that, one row of
    each kind stands for all of them.
    """
    data = _planned_data(config)
    kept: tuple[Target, ...] = ()
    if trained is not None:
        with kept_checkpoints(trained.directory) as kept:
            pass  # only their names and digests are needed
    models = (*kept, Target(UNIGRAM))
    scores = tuple(f"evaluate {target.name}" for target in models)
    zero_shot = _planned_zero_shot(config, kept)
    lm_eval = _planned_lm_eval(config, kept, data)
    scored = (*zero_shot, *(planned for planned in lm_eval if planned.stage == "lm-eval"))
    return [
        *(
            PlannedStage(name, partial(score_key, target=target), ("index",))
            for name, target in zip(scores, models, strict=True)
        ),
        PlannedStage("evaluate", evaluate_key, ("train", scores[-1], scores[:-1])),
        *zero_shot,
        PlannedStage("convert", convert_key, ("train", "evaluate", data)),
        *lm_eval,
        PlannedStage(
            "publish",
            publish_key,
            (
                *("train", "evaluate", "convert", data),
                tuple(planned.name for planned in scored),
                "contamination" if config.evaluate.contamination else None,
            ),
            problem=publication_problem,
        ),
        *planned_push(config.export, "train", "convert", "publish"),
    ]


def _planned_zero_shot(config: RunConfig, kept: tuple[Target, ...]) -> list[PlannedStage]:
    zero_shot = config.evaluate.zero_shot
    if not zero_shot.requested:
        return []
    if kept and zero_shot.checkpoints == "all":
        return [
            PlannedStage(
                f"zeroshot {target.name}", partial(zeroshot_key, target=target), ("tokenizer",)
            )
            for target in kept
        ]

    def key_of_best(config: RunConfig, evaluation: Artifact, tokenizer: Artifact) -> StageKey:
        (best,) = (target for target in kept if target.name == evaluation.counts["best"])
        return zeroshot_key(config, tokenizer, best)

    return [PlannedStage("zeroshot", key_of_best, ("evaluate", "tokenizer"))]


def _planned_lm_eval(
    config: RunConfig, kept: tuple[Target, ...], data: RunData[str]
) -> list[PlannedStage]:
    options = config.evaluate.lm_eval
    if not options.tasks:
        return []
    if not kept or options.checkpoints == "best":
        return [PlannedStage("lm-eval", lm_eval_key, ("convert",))]
    names = [target.name for target in kept]
    exports = [
        PlannedStage(
            f"convert {name}",
            partial(convert_key, checkpoint=name),
            ("train", "evaluate", data),
        )
        for name in names
    ]
    return exports + [
        PlannedStage(f"lm-eval {name}", lm_eval_key, (f"convert {name}",)) for name in names
    ]


def dry_run_report(conf: str, overrides: Mapping[str, Any] | None) -> None:
    """Print (and store) the configuration, each stage's key and state, and the cost; run nothing.

    A key is unknown until its inputs exist. An error of the checks is shown too, then raised.
    """
    config = load_checked_config(conf, overrides, trains=False)
    show_config(config)
    refusal: MegacoreError | None = None
    try:
        cost = check_machine(config)
    except MegacoreError as error:
        refusal, cost = error, str(error)
    artifacts: dict[str, Artifact] = {}
    rows = [planned_row(planned, config, artifacts) for planned in planned_training(config)]
    rows += [
        planned_row(planned, config, artifacts)
        for planned in planned_publication(config, artifacts.get("train"))
    ]
    epochs = planned_epochs(config, artifacts)
    lines = [f"training: {cost}", epochs.sentence() if epochs else EPOCHS_UNKNOWN]
    show_plan(
        config.name,
        rows,
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
    source, or from the bytes of a collected one. `artifacts` are by names of `planned_training`.
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
    tokens = artifacts.get(_planned_data(config).tokens)
    directory = Workspace.of().folder("train") / "<key>"
    if tokens is not None and "tokenizer" in artifacts:
        directory = run_directory(config, tokens, artifacts["tokenizer"])
    ranks = resolve_launch(config, hardware_of(config.launch))
    return launch_lines(config, "megacore.ranks.pretrain", directory, *ranks)


def _index_key(config: RunConfig, tokens: Artifact, tokenizer: Artifact) -> StageKey:
    """Return the key of the maps, which continue the order of a run that has begun."""
    return index_key(config, tokens, planned_order(config, tokens, tokenizer))


def _run_directory(config: RunConfig, data: RunData[Artifact]) -> Path:
    """Return a training's directory, which is not its key's: the key depends on train_iters."""
    return run_directory(config, data.tokens, data.tokenizer)
