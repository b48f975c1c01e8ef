"""Stage `curate`: documents of a corpus that the steps of `data.curate` keep."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from megacore.artifact import Artifact, Manifest, StageKey, Workspace
from megacore.artifact.files import read_object
from megacore.artifact.manifest import MANIFEST_NAME
from megacore.cluster.executors import executor_of
from megacore.config import RunConfig
from megacore.corpus.curate import REPORT_NAME, curate_corpus, needed_bytes
from megacore.corpus.curate_job import VERSION, CurateOptions, fingerprint
from megacore.corpus.curate_report import report_text
from megacore.errors import ArtifactError
from megacore.paths import glob
from megacore.token_files.indexed_dataset import token_prefixes
from tasks._cache import StageResult, build_in_shards, stage_task
from tasks._logging import shown_in_prefect


def curate_key(config: RunConfig, corpus: Artifact, earlier: tuple[Artifact, ...] = ()) -> StageKey:
    """Return the key of a curated corpus: the steps with the content of the files they name.

    `earlier` holds the curated corpora of the sources whose duplicates are removed. Raises
    ConfigError.
    """
    data = config.data
    parameters = {
        "steps": fingerprint(data.curate),
        "shard_mb": data.curate_shard_mb,
        "on_bad_line": data.on_bad_line,
    }
    inputs = {f"earlier_{number}": each for number, each in enumerate(earlier, 1)}
    return StageKey.of("curate", VERSION, parameters, corpus=corpus, **inputs)


@stage_task("curate", curate_key)
def curate(config: RunConfig, corpus: Artifact, earlier: tuple[Artifact, ...] = ()) -> StageResult:
    """Curate the documents of a corpus in shards."""
    data = config.data
    executor = executor_of(data.curate_executor, data.curate_workers, get_run_logger().info)
    options = CurateOptions(
        shard_bytes=data.curate_shard_mb * 10**6,
        on_bad_line=data.on_bad_line,
        document_bytes=data.max_document_bytes,
        workers=data.curate_workers,
    )

    def fill(directory: Path, work: Path) -> dict[str, Any]:
        return curate_corpus(
            corpus.directory,
            directory,
            work,
            data.curate,
            options,
            earlier=[each.directory for each in earlier],
            executor=executor,
        )

    def needed() -> int:
        compared = sum(each.counts["bytes"] for each in earlier)
        return needed_bytes(corpus.counts["bytes"], data.curate, compared)

    result = build_in_shards(config, curate_key(config, corpus, earlier), fill, writes=needed)
    _show_report(result.artifact)
    return result


def _show_report(curated: Artifact) -> None:
    """Show the report with the task run: a table of the steps, and all of it as markdown."""
    report = read_object(curated.directory / REPORT_NAME)
    rows = [
        {
            "step": row["step"],
            "removed": f"{row['removed']:,}",
            "changed": f"{row['changed']:,}",
            "reasons": ", ".join(f"{name} {count:,}" for name, count in row["reasons"].items()),
        }
        for row in report["steps"]
    ]
    text = report_text(report)
    with shown_in_prefect("the report of the curation"):
        create_table_artifact(rows, key="curate-steps", description=f"steps of {curated.key}")
        create_markdown_artifact(text, key="curate-report", description=f"curation {curated.key}")


def curation_metrics(tokens: Artifact) -> dict[str, float]:
    """Return what the curation of the tokens' sources kept and removed, for MLflow.

    Sources are summed. A curated corpus that was deleted meanwhile or is damaged does not count.
    """
    digests = {
        Manifest.read(Path(prefix).parent).inputs.get("corpus")
        for prefix in token_prefixes(tokens.directory)
    }
    for _, manifest in _artifacts("decontaminate"):
        if manifest.digest in digests:
            digests.add(manifest.inputs["corpus"])
    metrics: Counter[str] = Counter()
    for directory, manifest in _artifacts("curate"):
        if manifest.digest not in digests:
            continue
        with suppress(ArtifactError):
            report = read_object(directory / REPORT_NAME)
            for name in ("documents", "words", "bytes"):
                for state in ("read", "kept"):
                    metrics[f"curate/{name}_{state}"] += report[name][state]
            for row in report["steps"]:
                metrics[f"curate/removed_{row['step'].replace(' ', '_')}"] += row["removed"]
    return dict(metrics)


def _artifacts(stage: str) -> Iterator[tuple[Path, Manifest]]:
    """Yield the artifacts of a stage in the workspace, also of other runs, that can be read."""
    for path in sorted(glob(Workspace.of().folder(stage), f"*/{MANIFEST_NAME}")):
        with suppress(ArtifactError):
            yield path.parent, Manifest.read(path.parent)
