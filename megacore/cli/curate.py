"""`megacore curate`: removal and change of documents before they are tokenized."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megacore.cli._options import VariadicCommand, refuse_sealed
from megacore.errors import ConfigError, FileAccessError, WorkspaceError
from megacore.observe.logging import counted
from megacore.paths import exists, is_dir, is_file


class CurateCommand(VariadicCommand):
    """The command `megacore curate`."""

    variadic = ("--input", "--earlier")


def curate(
    input: Annotated[
        list[str],
        typer.Option(help="JSON Lines (plain, .gz, .zst), parquet or WARC files or globs"),
    ],
    steps: Annotated[
        Path, typer.Option(help="YAML file with a list of steps, or with data.curate")
    ],
    output: Annotated[
        Path, typer.Option(help="new directory for documents-*.jsonl and report.json")
    ],
    json_key: Annotated[str, typer.Option(help="field or column that holds the text")] = "text",
    on_bad_line: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="for a line without a document: end the run, or skip and count it"),
    ] = "stop",
    shard_mb: Annotated[
        int, typer.Option(min=1, max=100_000, help="size of a shard in MB (10^6 bytes)")
    ] = 64,
    max_document_mb: Annotated[
        int, typer.Option(min=1, max=2000, help="maximum size of a line or row in MB (10^6 bytes)")
    ] = 100,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes (default: one per core)")
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            help="local, slurm or ray, or with options as YAML: '{kind: slurm, partition: cpu}'"
        ),
    ] = "local",
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            help="directories of curated sources whose duplicates the steps with across_sources "
            "remove, the first source first"
        ),
    ] = None,
) -> None:
    """Remove duplicates and documents of low quality, and mask personal data.

    A command that was killed continues with the shards that are done, which are kept in
    .OUTPUT.curate until a command succeeds.
    """
    from megacore.artifact.build import lock_file
    from megacore.artifact.files import (
        check_output,
        read_json,
        remove_dead_temporaries,
        require_space,
        staged,
        workspace_errors,
    )
    from megacore.cluster.executors import executor_of
    from megacore.config.data import JsonlSource
    from megacore.corpus.curate import REPORT_NAME, curate_segments, needed_bytes
    from megacore.corpus.curate_job import CurateOptions, discarding_job
    from megacore.corpus.curate_report import report_text
    from megacore.corpus.documents import check_unchanged_files, read_sources
    from megacore.corpus.local_files import list_files

    chosen = _read_steps(steps)
    sources = _earlier_sources(chosen, earlier or [])
    execute = executor_of(_read_executor(executor), workers, _say)
    files = list_files(JsonlSource(kind="jsonl", files=tuple(input), key=json_key))
    options = CurateOptions(
        shard_bytes=shard_mb * 10**6,
        on_bad_line=on_bad_line,
        document_bytes=max_document_mb * 10**6,
        workers=workers,
    )
    refuse_sealed(output, "--output")
    started = time.monotonic()
    work = output.absolute().with_name(f".{output.absolute().name}.curate")
    compared = sum(Path(part.path).stat().st_size for parts in sources for part in parts)
    needed = needed_bytes(sum(file.size for file in files), chosen, compared)
    require_space(output, needed, "curate writes about")
    # Another command is at work, or was killed.
    if exists(lock_file(work)) or _is_left_over(output, work):
        with _work_lock(output, work):
            if _is_left_over(output, work):
                _remove(work, output)
    remove_dead_temporaries(output)
    check_output(output)
    with _work_lock(output, work):
        with staged(output) as staging, workspace_errors(work):
            work.mkdir(parents=True, exist_ok=True)
            parts = _parts(files, json_key)
            counts = curate_segments(
                parts, staging, work, chosen, options, earlier=sources, executor=execute
            )
            with discarding_job(work):
                check_unchanged_files(files)
                for each in earlier or []:
                    read_sources(each)
        _remove(work, output)
    seconds = time.monotonic() - started
    sys.stdout.write(report_text(read_json(output / REPORT_NAME)))
    size = counts["bytes_read"] / 1e6
    sys.stdout.write(
        f"\n{output}: {counts['documents']:,} of "
        f"{counted(counts['documents_read'], 'document')} kept, "
        f"{size:,.1f} MB in {seconds:.2f} s ({size / seconds:,.1f} MB/s)\n"
    )


@contextmanager
def _work_lock(output: Path, work: Path) -> Iterator[None]:
    """Hold the lock of a work directory, whose file is removed once the output is complete.

    A process that still waits with the removed file refuses the output.
    """
    from megacore.artifact.build import lock, lock_file

    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        lock_file(work).touch()
    except OSError as error:
        raise WorkspaceError(
            f"--output {output} cannot be made ({error.strerror}): write elsewhere"
        ) from error
    with lock(work):
        try:
            yield
        finally:
            if is_dir(output) and any(output.iterdir()):
                lock_file(work).unlink(missing_ok=True)


def _remove(work: Path, output: Path) -> None:
    """Remove the work directory, under a name that the next command removes after a kill."""
    import shutil

    from megacore.artifact.files import temporary_of

    doomed = temporary_of(output.absolute())
    os.rename(work, doomed)
    shutil.rmtree(doomed)


def _is_left_over(output: Path, work: Path) -> bool:
    """Return True if a command that completed the output was killed before it removed its work.

    The documents of the output are hard links to those in the work directory, or copies where the
    file system has no hard links: then the report and the sizes of all files are the same.
    """
    from megacore.artifact.files import read_json
    from megacore.corpus.curate import REPORT_NAME
    from megacore.corpus.curate_job import DOCUMENTS_FOLDER, Job, document_file

    documents = work / DOCUMENTS_FOLDER
    try:
        if os.path.samefile(output / document_file(0), documents / document_file(0)):
            return True
        names = [path.name for path in documents.iterdir()]
        return read_json(output / REPORT_NAME) == Job.read(work).report() and all(
            (output / name).stat().st_size == (documents / name).stat().st_size for name in names
        )
    except (OSError, ValueError, KeyError, TypeError, FileAccessError):
        return False


def _parts(files: Any, json_key: str) -> Any:
    """Return the segments of the input. Raises ConfigError for web pages among other files."""
    from megacore.corpus.segments import jsonl_segments
    from megacore.corpus.web_pages import file_segments, is_web

    web = [is_web(file.path) for file in files]
    if not any(web):
        return jsonl_segments([file.path for file in files], json_key)
    if not all(web):
        raise ConfigError(
            f"--input has WARC files and others, such as {files[web.index(False)].path}: give each "
            "kind to a command of its own"
        )
    return file_segments(files)


def _read_steps(path: Path) -> Any:
    """Return the steps in a YAML file. Raises ConfigError."""
    from megacore.config.curate import CurateSteps
    from megacore.config.validate import validated
    from megacore.foreign.files import read_yaml

    values = read_yaml(path)
    if isinstance(values, dict):
        values = values.get("data", values)
        values = values.get("curate") if isinstance(values, dict) else None
    if not isinstance(values, list) or not values:
        raise ConfigError(
            f"{path} has no list of steps: give one such as `- step: exact_dedup`, or a "
            "configuration whose section data has the list as curate"
        )
    return validated(CurateSteps, {"curate": values}, str(path)).curate


def _read_executor(text: str) -> Any:
    """Return the executor of a name or of its options as YAML. Raises ConfigError."""
    import yaml

    from megacore.config.curate import ChosenExecutor
    from megacore.config.validate import validated

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--executor is {text!r}, which is no YAML: quote it as one word"
        ) from error
    if isinstance(values, str):
        values = {"kind": values}
    return validated(ChosenExecutor, {"executor": values}, "the command line").executor


def _earlier_sources(steps: Any, directories: list[Path]) -> list[Any]:
    """Return the documents of each directory of a curated source. Raises ConfigError."""
    from megacore.config.curate import compares_sources
    from megacore.corpus.segments import segments

    compares = compares_sources(steps)
    if compares and not directories:
        raise ConfigError(
            "a step has across_sources, but --earlier names no curated source: give its directory, "
            "or leave across_sources out"
        )
    if directories and not compares:
        raise ConfigError(
            f"--earlier is {directories[0]}, but no step compares sources: set across_sources of a "
            "deduplication, or leave --earlier out"
        )
    for directory in directories:
        if not is_file(directory / "report.json"):
            raise ConfigError(
                f"--earlier is {directory}, which is no output of megacore curate (it has no "
                "report.json): correct it"
            )
    return [segments(directory.absolute()) for directory in directories]


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
