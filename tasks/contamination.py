"""Stages `search`, `decontaminate` and `contamination`: evaluation sets in the training corpus.

The search runs before the tokenization and removes nothing by itself, so that its result does not
depend on what is done about it. The stage `contamination` joins the results with those on the
held-out splits; the limit and the publication are decided by what reads them.
"""

from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from megacore.artifact import Artifact, StageKey
from megacore.artifact.files import read_object, write_json
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.corpus.curate_job import CurateOptions
from tasks._cache import StageResult, build, build_in_shards, stage_task
from tasks._logging import shown_in_prefect
from tasks._stage_runner import StageRunner
from tasks.index import held_out_digest, index_options, mixture
from tasks.lm_eval import task_digests
from tasks.zeroshot import text_digests

REPORT = "contamination.json"
SPLITS = ("valid", "test")
_SHOWN = 5
"""Number of examples of each evaluation set in the page of the stage."""


def search_key(config: RunConfig, corpus: Artifact) -> StageKey:
    """Return the key of a search: the corpus, and the content of the evaluation sets.

    Raises ConfigError.
    """
    from megacore.corpus.contamination import VERSION
    from megacore.zeroshot.harness import ITEMS_VERSION

    digests: dict[str, Any] = {
        f"evaluate.zero_shot.{name}": digest for name, digest in text_digests(config).items()
    }
    if config.evaluate.lm_eval.tasks:
        digests |= {f"evaluate.lm_eval.{name}": each for name, each in task_digests(config).items()}
        digests["evaluate.lm_eval.items"] = ITEMS_VERSION
    return StageKey.of("search", VERSION, key_parameters(config, "search", digests), corpus=corpus)


@stage_task("search", search_key)
def search(config: RunConfig, corpus: Artifact) -> StageResult:
    """Search the evaluation sets of the run in the documents of a corpus."""
    from megacore.corpus.contamination import search_corpus

    def fill(directory: Path, work: Path) -> dict[str, Any]:
        return search_corpus(
            corpus.directory,
            directory,
            work,
            _benchmarks(config),
            config.evaluate.contamination_ngram,
            _options(config),
        )

    return build_in_shards(config, search_key(config, corpus), fill)


def _benchmarks(config: RunConfig) -> list[Any]:
    from megacore.corpus.contamination import Benchmark
    from megacore.zeroshot import harness, texts

    zero_shot, lm_eval = config.evaluate.zero_shot, config.evaluate.lm_eval
    sets = []
    if zero_shot.wikitext is not None:
        sets.append(Benchmark("wikitext", texts.wikitext_items(Path(zero_shot.wikitext))))
    if zero_shot.lambada is not None:
        sets.append(Benchmark("lambada", texts.lambada_items(Path(zero_shot.lambada))))
    if lm_eval.tasks:
        items, groups = harness.task_items(lm_eval.tasks, lm_eval.include_path, lm_eval.limit)
        items |= {
            name: tuple(text for member in members for text in items[member])
            for name, members in groups.items()
        }
        sets += [Benchmark(f"lm_eval/{name}", texts) for name, texts in items.items()]
    return sets


def decontaminate_key(
    config: RunConfig, corpus: Artifact, searches: tuple[Artifact, ...], number: int
) -> StageKey:
    """Return the key of a corpus without the documents that the searches found."""
    from megacore.corpus.contamination import VERSION

    inputs = {f"search_{each}": search for each, search in enumerate(searches)}
    return StageKey.of("decontaminate", VERSION, {"number": number}, corpus=corpus, **inputs)


@stage_task("decontaminate", decontaminate_key)
def decontaminate(
    config: RunConfig, corpus: Artifact, searches: tuple[Artifact, ...], number: int
) -> StageResult:
    """Remove the documents that share an n-gram with an evaluation set, and copies."""
    from megacore.corpus.contamination import remove_documents

    def fill(directory: Path, work: Path) -> dict[str, Any]:
        return remove_documents(
            corpus.directory,
            [each.directory for each in searches],
            number,
            directory,
            work,
            _options(config),
        )

    key = decontaminate_key(config, corpus, searches, number)
    return build_in_shards(config, key, fill, writes=lambda: corpus.counts["bytes"])


def _options(config: RunConfig) -> CurateOptions:
    return CurateOptions(
        on_bad_line=config.data.on_bad_line,
        document_bytes=config.data.max_document_bytes,
        workers=config.data.curate_workers,
    )


def contamination_key(
    config: RunConfig, searches: tuple[Artifact, ...], tokens: Artifact, index: Artifact
) -> StageKey:
    """Return the key of the shares: the searches, and the tokens with their splits."""
    from megacore.corpus.contamination import VERSION

    inputs = {f"search_{number}": each for number, each in enumerate(searches)}
    removed = {"removed": config.evaluate.contamination == "remove"}
    parameters = key_parameters(config, "contamination", removed)
    splits = index.model_copy(update={"digest": held_out_digest(index)})
    return StageKey.of("contamination", VERSION, parameters, tokens=tokens, index=splits, **inputs)


@stage_task("contamination", contamination_key)
def contamination(
    config: RunConfig, searches: tuple[Artifact, ...], tokens: Artifact, index: Artifact
) -> StageResult:
    """Compute the share of contaminated items of each evaluation set of the run."""
    from megacore.corpus.contamination import shares
    from megacore.data.copies import split_copies

    def fill(directory: Path) -> dict[str, Any]:
        rows = split_copies(mixture(config, tokens), index_options(config), SPLITS)
        rows |= shares(each.directory for each in searches)
        removed = config.evaluate.contamination == "remove"
        for name, row in rows.items():
            if removed and name not in SPLITS and row["share"] is not None:
                # Nothing of what was found is left.
                row["removed"], row["contaminated"], row["share"] = row["contaminated"], 0, 0.0
        write_json(directory / REPORT, {"removed": removed, "benchmarks": rows})
        return {name: row["share"] for name, row in rows.items()}

    result = build(config, contamination_key(config, searches, tokens, index), fill)
    text = contamination_summary(config, result.artifact) + _examples(result.artifact)
    with shown_in_prefect("the contamination"):
        create_markdown_artifact(
            text, key="contamination", description=f"contaminated items of {config.name}"
        )
    return result


def contamination_stage(
    pipeline: StageRunner[RunConfig],
    searches: tuple[Artifact, ...],
    tokens: Artifact,
    index: Artifact,
) -> Artifact | None:
    """Compute the shares and log the warnings, also of an earlier run; None without searches."""
    if not searches:
        return None
    artifact = pipeline.stage(contamination, searches, tokens, index)
    pipeline.report(_log_warnings, artifact)
    return artifact


def _log_warnings(config: RunConfig, artifact: Artifact) -> None:
    for sentence in warnings(config, artifact):
        get_run_logger().warning("%s", sentence)


def searched(
    pipeline: StageRunner[RunConfig], corpora: tuple[Artifact, ...]
) -> tuple[tuple[Artifact, ...], tuple[Artifact, ...]]:
    """Search the corpora if the configuration asks for it; return the searches and the corpora.

    With `evaluate.contamination: remove` the corpora are those without what was found.
    """
    if pipeline.config.evaluate.contamination is None:
        return (), corpora
    # One at a time: its shards are searched side by side.
    searches = pipeline.stages(search, [(corpus,) for corpus in corpora])
    if pipeline.config.evaluate.contamination == "remove":
        inputs = [(corpus, searches, number) for number, corpus in enumerate(corpora)]
        corpora = pipeline.stages(decontaminate, inputs)
    return searches, corpora


def read_contamination(artifact: Artifact | None) -> dict[str, dict[str, Any]]:
    """Return the row of each evaluation set by its name; none without the stage."""
    if artifact is None:
        return {}
    rows: dict[str, dict[str, Any]] = read_object(artifact.directory / REPORT)["benchmarks"]
    return rows


def over_limit(config: RunConfig, artifact: Artifact | None) -> dict[str, float]:
    """Return the shares above `evaluate.contamination_limit` by evaluation set."""
    limit = config.evaluate.contamination_limit
    rows = read_contamination(artifact)
    return {name: row["share"] for name, row in rows.items() if (row["share"] or 0.0) > limit}


def withheld(config: RunConfig, artifact: Artifact | None) -> frozenset[str]:
    """Return the evaluation sets whose scores are not published.

    Never the splits: their perplexities belong to the training, which chooses checkpoints by them.
    """
    if config.evaluate.contamination != "refuse":
        return frozenset()
    return frozenset(over_limit(config, artifact).keys() - set(SPLITS))


def contamination_metrics(artifact: Artifact | None) -> dict[str, float]:
    """Return the shares by their names in MLflow: `contamination/wikitext`."""
    rows = read_contamination(artifact)
    return {
        f"contamination/{name}": row["share"]
        for name, row in rows.items()
        if row["share"] is not None
    }


def warnings(config: RunConfig, artifact: Artifact | None) -> list[str]:
    """Return a sentence for each evaluation set that is contaminated, or cannot be searched."""
    limit, hidden = config.evaluate.contamination_limit, withheld(config, artifact)
    rows = read_contamination(artifact)
    sentences = [
        f"{share:.2%} of the searched items of {name} occur in the training corpus, more than "
        f"evaluate.contamination_limit of {limit:.2%}: "
        + ("its scores are not published" if name in hidden else "its scores may be too good")
        for name, share in over_limit(config, artifact).items()
    ]
    return sentences + [
        f"none of the {row['items']:,} items of {name} has the words of an n-gram, so that it "
        "cannot be searched: lower evaluate.contamination_ngram"
        for name, row in rows.items()
        if row["share"] is None and row["items"]
    ]


def contamination_rows(config: RunConfig, artifact: Artifact | None) -> list[tuple[str, ...]]:
    """Return evaluation set, items, searched, contaminated, share and note, as text."""
    hidden, high = withheld(config, artifact), over_limit(config, artifact)
    return [
        (
            name,
            f"{row['items']:,}",
            f"{row['searched']:,}",
            f"{row['contaminated']:,}",
            "–" if row["share"] is None else f"{row['share']:.2%}",
            "not published"
            if name in hidden
            else "above the limit"
            if name in high
            else f"{row['removed']:,} found and removed"
            if row.get("removed")
            else "",
        )
        for name, row in read_contamination(artifact).items()
    ]


def contamination_summary(config: RunConfig, artifact: Artifact | None) -> str:
    """Return the shares as markdown with the warnings, or an empty string without the stage."""
    rows = contamination_rows(config, artifact)
    if not rows:
        return ""
    lines = [
        "",
        "| evaluation set | items | searched | contaminated | share | |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    lines += [line for text in warnings(config, artifact) for line in ("", f"**Warning:** {text}")]
    return "\n".join(lines) + "\n"


def _examples(artifact: Artifact) -> str:
    """Return examples as markdown: item, file and line of a document, and what they share."""
    lines = [
        f"- {name}, item {each['item']}, in `{each['document']}`: {each['ngram']}"
        for name, row in read_contamination(artifact).items()
        for each in row["examples"][:_SHOWN]
        if "ngram" in each
    ]
    return "\n".join(["", *lines]) + "\n" if lines else ""
