"""Before a start on several machines: each has, or sees, the files that the ranks there will read.

`shared`: one path that all see, proven by tokens written on this machine and read on each, and the
other way round. `node_local`: every machine has files of its own, compared by their manifests and
copied from here where they differ.
"""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.artifact.files import workspace_errors
from megacore.artifact.manifest import file_digest
from megacore.artifact.workspace import CHECKPOINTS_NAME
from megacore.checkpoint.format import complete_checkpoints
from megacore.cluster.hosts.ssh import SSH_FAILED, HostResult, Ssh, python, run_on_hosts
from megacore.cluster.placement.files import Copier, Item, Transfer, check_rsync
from megacore.cluster.placement.reads import (
    JOB_FILES_ROLE,
    directory_items,
    items_of,
    loaded_checkpoints,
    model_items_of,
)
from megacore.config.hostfile import is_this_machine
from megacore.config.launch import LaunchConfig
from megacore.errors import HostLostError, LaunchError
from megacore.jobs.finetune import FinetuneJob
from megacore.jobs.model import ModelJob
from megacore.jobs.run import Job, TrainJob

__all__ = ["loaded_checkpoints", "prepare_finetune_hosts", "prepare_hosts", "prepare_model_hosts"]

_SHORT = 60.0
"""Seconds in which a machine looks at sizes."""
_LONG = 12 * 3600.0
"""Seconds in which it hashes what there is; a machine that is gone is noticed by ssh."""
_CLEAN_UP = 15.0
"""Seconds in which it removes what was broken off; else the next start does."""
_SETTLES = 5.0
"""Seconds until a file share shows this machine what another wrote."""
_TOKEN = ".placement-"
_TOKEN_LIVES = 3600.0

_log = logging.getLogger(__name__)


def prepare_hosts(
    job: Job, hosts: Mapping[str, int], ssh: Ssh, *, checkpoints: Sequence[Path]
) -> None:
    """Prove or bring about that every host has what the job's ranks read there.

    Call it before any process starts.

    Args:
        job: what the ranks will do; its file is written already.
        hosts: that take part, in their order.
        ssh: how they are reached.
        checkpoints: that the ranks load (`loaded_checkpoints`).

    Raises:
        LaunchError: a host lacks something and it cannot be copied there, or does not share a
            directory; names host, path, what is wrong and what to do.
        HostLostError: a host does not answer any more.
        WorkspaceError: a token cannot be written on this machine.
    """
    if all(map(is_this_machine, hosts)):
        return
    run_directory = Path(job.run_directory).absolute()
    root = run_directory / CHECKPOINTS_NAME if isinstance(job, TrainJob) else None
    keep = next((path.name for path in checkpoints if path.absolute().parent == root), "")
    files = _Files(
        items_of(job, checkpoints), Path(job.exit_directory).absolute(), run_directory, root, keep
    )
    _prepare(files, hosts, ssh, job.config.launch, known=job.attempt > 1)


def prepare_model_hosts(
    job: ModelJob, hosts: Mapping[str, int], ssh: Ssh, launch: LaunchConfig
) -> None:
    """As `prepare_hosts`, for a job with a finished model."""
    if all(map(is_this_machine, hosts)):
        return
    exit_directory = Path(job.exit_directory).absolute()
    files = _Files(model_items_of(job), exit_directory, exit_directory.parent, None, "")
    _prepare(files, hosts, ssh, launch, known=False)


def prepare_finetune_hosts(job: FinetuneJob, hosts: Mapping[str, int], ssh: Ssh) -> None:
    """As `prepare_hosts`, for a fine-tuning: its directories are always shared."""
    if all(map(is_this_machine, hosts)):
        return
    run_directory, exit_directory = (
        Path(job.run_directory).absolute(),
        Path(job.exit_directory).absolute(),
    )
    reads = {
        "pretrained model": Path(job.pretrained_directory),
        "examples": Path(job.examples_directory),
    }
    newest = next(reversed(complete_checkpoints(run_directory / CHECKPOINTS_NAME)), None)
    checkpoints = [] if newest is None else [newest]
    items = directory_items(reads, checkpoints, exit_directory, full=job.config.verify == "full")
    files = _Files(items, exit_directory, run_directory, None, "")
    _prepare(files, hosts, ssh, job.config.launch, known=job.attempt > 1)


@dataclass(frozen=True)
class _Files:
    """What ranks read and write."""

    items: list[Item]
    """What they read."""
    exit_directory: Path
    """Where they say why they ended."""
    run_directory: Path
    """Where the first one writes."""
    root: Path | None
    """Of a training's checkpoints."""
    keep: str
    """The one of them that it goes on from, or ""."""


def _prepare(
    files: _Files, hosts: Mapping[str, int], ssh: Ssh, launch: LaunchConfig, *, known: bool
) -> None:
    others = [host for host in hosts if not is_this_machine(host)]
    if launch.data_placement == "shared":
        _prove_shared(files, others, ssh, known)
        return
    first = next(iter(hosts))
    if not is_this_machine(first):
        raise LaunchError(
            f"launch.data_placement is node_local and the first host is {first}, not this machine "
            f"({socket.gethostname()}), which writes the checkpoints: start the run on {first}, or "
            "put this machine first in launch.hostfile"
        )
    _bring(files, others, ssh, known)


def _prove_shared(files: _Files, hosts: Sequence[str], ssh: Ssh, known: bool) -> None:
    """See `prepare_hosts`."""
    # they lie where the token does
    items = [item for item in files.items if item.role != JOB_FILES_ROLE]
    places = sorted({files.run_directory, files.exit_directory.parent})
    with _tokens(places) as token:
        answers = {host: f"{token}-{number}" for number, host in enumerate(hosts)}
        asked = {
            host: _question(
                "look", items, proofs=[_proof(place, token, answer) for place in places]
            )
            for host, answer in answers.items()
        }
        try:
            for host, said in _ask(ssh, asked, _SHORT, known=known).items():
                if said["missing"]:
                    raise LaunchError(_not_shared(host, *said["missing"]))
                for place, problem in zip(places, said["proofs"], strict=True):
                    _check_proof(host, problem, place / answers[host], token)
        finally:
            _remove_answers(
                ssh,
                {host: [place / answer for place in places] for host, answer in answers.items()},
            )


def _proof(place: Path, token: str, answer: str) -> dict[str, str]:
    return {"directory": str(place), "name": token, "answer": answer}


def _check_proof(host: str, problem: str | None, answer: Path, token: str) -> None:
    """Raise LaunchError unless the host has seen our token and we see its answer."""
    if problem is not None:
        raise LaunchError(_not_shared(host, problem))
    deadline = time.monotonic() + _SETTLES
    while not (answer.is_file() and answer.read_text(encoding="ascii") == token):
        if time.monotonic() > deadline:
            raise LaunchError(
                _not_shared(host, f"{answer.name}, written there, is not in {answer.parent} here")
            )
        time.sleep(0.1)


def _not_shared(host: str, problem: str, *more: str) -> str:
    others = f" (and {len(more)} more)" if more else ""
    return (
        f"host {host}: {problem}{others}, though launch.data_placement is shared: mount the same "
        "file system there at the same path, or set launch.data_placement to node_local, which "
        "copies what is missing"
    )


def _remove_answers(ssh: Ssh, answers: Mapping[str, Sequence[Path]]) -> None:
    """Remove what the hosts wrote; over ssh where it is not seen here."""
    unseen = {}
    for host, files in answers.items():
        seen = [file for file in files if file.exists()]
        for file in seen:
            with suppress(OSError):
                file.unlink()
        if len(seen) < len(files):
            unseen[host] = _question("clean", (), token="", files=[str(file) for file in files])
    run_on_hosts(ssh, list(unseen), python(_CHECK), stdin=unseen, timeout=_CLEAN_UP)


@contextmanager
def _tokens(places: Sequence[Path]) -> Iterator[str]:
    """A file of one name in every place, for as long as the block runs."""
    token = f"{_TOKEN}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    files = [place / token for place in places]
    try:
        for file in files:
            with workspace_errors(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(token, encoding="ascii")
            _remove_old_tokens(file.parent)
        yield token
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def _remove_old_tokens(place: Path) -> None:
    """Those of preparations that were killed."""
    for path in place.glob(f"{_TOKEN}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _TOKEN_LIVES:
                path.unlink()


def _bring(files: _Files, hosts: Sequence[str], ssh: Ssh, known: bool) -> None:
    """Let every host compare its files with this machine's, and copy there what differs."""
    items = files.items
    with _tokens([files.run_directory]) as token:
        run = {
            "proof": str(files.run_directory / token),
            "exit": str(files.exit_directory),
            "root": "" if files.root is None else str(files.root),
            "keep": files.keep,
        }
        tokens = {
            host: f"{token.removeprefix(_TOKEN)}-{number}" for number, host in enumerate(hosts)
        }
        asked = {host: _question("begin", items, token=tokens[host], run=run) for host in hosts}
        try:
            said = _ask(ssh, asked, _LONG, known=known)
            wrong = {host: _wrong(items, answer) for host, answer in said.items()}
            wrong = {host: names for host, names in wrong.items() if names}
            _copy(items, wrong, said, ssh)
            finishing = {
                host: _finishing(items, tokens[host], names) for host, names in wrong.items()
            }
            _ask(ssh, finishing, _LONG)
        except BaseException:
            _clean_up(items, tokens, ssh)
            raise


def _wrong(items: Sequence[Item], answer: dict[str, Any]) -> dict[int, tuple[str, ...]]:
    """Names of the files to copy, by the item's number."""
    found = {number: tuple(each["wrong"]) for number, each in enumerate(answer["items"])}
    return {number: names for number, names in found.items() if names}


def _copy(
    items: Sequence[Item],
    wrong: Mapping[str, dict[int, tuple[str, ...]]],
    said: Mapping[str, Any],
    ssh: Ssh,
) -> None:
    transfers: dict[str, list[Transfer]] = {}
    for host, numbers in wrong.items():
        check_rsync(host, there=said[host]["rsync"])
        for number, names in numbers.items():
            item, answer = items[number], said[host]["items"][number]
            size = sum(item.entries[name].size for name in names)
            target = Path(answer["temporary"])
            transfers.setdefault(host, []).append(
                Transfer(host, item.directory, names, target, size)
            )
            first = next(iter(answer["wrong"].values()))
            _log.info(
                "host %s: %s: copying %d files, %.1f MiB, there",
                host,
                first,
                len(names),
                size / 2**20,
            )
    began = time.monotonic()
    Copier(ssh).copy(transfers)
    for host, each in transfers.items():
        size = sum(transfer.size for transfer in each)
        _log.info(
            "host %s has the files now: %.1f MiB in %.1f s",
            host,
            size / 2**20,
            time.monotonic() - began,
        )


def _finishing(items: Sequence[Item], token: str, wrong: Mapping[int, tuple[str, ...]]) -> bytes:
    """What is asked once the files are there.

    They are compared by hash, also those of which none was recorded.
    """
    chosen = [items[number] for number in wrong]
    for item, names in zip(chosen, wrong.values(), strict=True):
        for name in names:
            entry = item.entries[name]
            entry.sha256 = entry.sha256 or file_digest(item.directory / name)
    return _question(
        "finish", chosen, token=token, copied=[list(names) for names in wrong.values()]
    )


def _clean_up(items: Sequence[Item], tokens: Mapping[str, str], ssh: Ssh) -> None:
    """Remove what was being copied, on the hosts that answer."""
    asked = {
        host: _question("clean", items, token=token, files=[]) for host, token in tokens.items()
    }
    run_on_hosts(ssh, list(asked), python(_CHECK), stdin=asked, timeout=_CLEAN_UP)


_CHECK = "megacore.cluster.placement.check"


def _question(action: str, items: Sequence[Item], **values: Any) -> bytes:
    return json.dumps(
        {"action": action, "items": [item.to_json() for item in items], **values}
    ).encode()


def _ask(
    ssh: Ssh, questions: Mapping[str, bytes], timeout: float, *, known: bool = True
) -> dict[str, Any]:
    """What each host answers, asked at once.

    `known`: whether all have been there before, and may come back.

    Raises for the first that cannot answer, or cannot write.
    """
    results = run_on_hosts(ssh, list(questions), python(_CHECK), stdin=questions, timeout=timeout)
    return {result.host: _answer(result, known) for result in results}


def _answer(result: HostResult, known: bool) -> dict[str, Any]:
    if result.problem is not None:
        kind = (
            HostLostError
            if known and (result.timed_out or result.code == SSH_FAILED)
            else LaunchError
        )
        raise kind(
            f"host {result.host} does not say which files it has: {result.problem}: look at it, "
            "then start again"
        )
    try:
        # a login script may have said something
        said: dict[str, Any] = json.loads(result.output.splitlines()[-1])
    except (ValueError, IndexError) as error:
        shown = " ".join(result.output.decode(errors="replace").split())[-200:]
        raise LaunchError(
            f"host {result.host} answers {shown!r} instead of what files it has"
        ) from error
    if "problem" in said:
        raise LaunchError(f"host {result.host}: {said['problem']}")
    return said
