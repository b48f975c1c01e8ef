"""Preparation of the hosts of a job: every host must have the files that its ranks read.

`shared`: all hosts see the same path. Tokens prove this: each host reads a token that this host
wrote, and writes an answer that this host reads. `node_local`: every host has separate files. They
are compared by their manifests and copied from this host if they differ.
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
from megacore.cluster.hosts.ssh import (
    SSH_FAILED,
    HostResult,
    Ssh,
    check_ssh,
    python,
    run_on_hosts,
)
from megacore.cluster.placement.files import Copier, Item, Transfer, check_rsync
from megacore.cluster.placement.reads import (
    JOB_FILES_ROLE,
    PlacedJob,
    items_of,
    loaded_checkpoints,
)
from megacore.config.hostfile import hosts_of, is_only_here, is_this_machine
from megacore.config.launch import LaunchConfig
from megacore.errors import HostLostError, LaunchError
from megacore.jobs.model import ModelJob
from megacore.jobs.run import TrainJob
from megacore.paths import exists, glob, is_file

_SHORT = 60.0
"""Seconds for a host to check the sizes of files."""
_LONG = 12 * 3600.0
"""Seconds for a host to compute digests; ssh notices a host that is gone."""
_CLEAN_UP = 15.0
"""Seconds for a host to remove unfinished copies; otherwise the next start removes them."""
_SETTLES = 5.0
"""Seconds until a file share shows the files of another host on this host."""
_TOKEN = ".placement-"
_TOKEN_LIVES = 3600.0

_log = logging.getLogger(__name__)


def prepare_hosts(job: PlacedJob, launch: LaunchConfig) -> None:
    """Check that every host has the files that the job's ranks read there, or copy them.

    Call this before any rank starts, when the job's file is written. Nothing is to be done for a
    job on this host only.

    Raises:
        LaunchError: a host lacks a file that cannot be copied there, or does not share a directory,
            or ssh is not installed. The message contains the host, the path, the problem and
            advice.
        HostLostError: a host no longer answers.
        WorkspaceError: a token cannot be written on this host.
    """
    hosts = job.hosts or hosts_of(launch)
    if is_only_here(hosts):
        return
    check_ssh(hosts)
    exit_directory, checkpoints = Path(job.exit_directory).absolute(), loaded_checkpoints(job)
    run_directory, known = exit_directory.parent, False
    if not isinstance(job, ModelJob):
        run_directory, known = Path(job.run_directory).absolute(), job.attempt > 1
    root = run_directory / CHECKPOINTS_NAME if isinstance(job, TrainJob) else None
    keep = next((path.name for path in checkpoints if path.parent == root), "")
    files = _Files(items_of(job, checkpoints), exit_directory, run_directory, root, keep)
    others = [host for host in hosts if not is_this_machine(host)]
    if launch.data_placement == "shared":
        _prove_shared(files, others, Ssh.of(launch), known)
        return
    first = next(iter(hosts))
    if not is_this_machine(first):
        raise LaunchError(
            f"launch.data_placement is node_local and the first host is {first}, not this machine "
            f"({socket.gethostname()}), which writes the checkpoints: start the run on {first}, or "
            "put this machine first in launch.hostfile"
        )
    _bring(files, others, Ssh.of(launch), known)


@dataclass(frozen=True)
class _Files:
    """Files and directories of the ranks."""

    items: list[Item]
    """Files that the ranks read."""
    exit_directory: Path
    """Directory of the ranks' exit reasons."""
    run_directory: Path
    """Directory that the first rank writes to."""
    root: Path | None
    """Directory of a training's checkpoints; None for other jobs."""
    keep: str
    """Name of the checkpoint in `root` to resume from, or ""."""


def _prove_shared(files: _Files, hosts: Sequence[str], ssh: Ssh, known: bool) -> None:
    """Prove that the hosts share the files and directories; see `prepare_hosts`."""
    # The job files need no check: the token proves that their directory is shared.
    items = [item for item in files.items if item.role != JOB_FILES_ROLE]
    directories = sorted({files.run_directory, files.exit_directory.parent})
    with _tokens(directories) as token:
        answers = {host: f"{token}-{number}" for number, host in enumerate(hosts)}
        questions = {
            host: _question(
                "look",
                items,
                proofs=[_proof(directory, token, answer) for directory in directories],
            )
            for host, answer in answers.items()
        }
        try:
            for host, result in _ask(ssh, questions, _SHORT, known=known).items():
                if result["missing"]:
                    raise LaunchError(_not_shared(host, *result["missing"]))
                for directory, problem in zip(directories, result["proofs"], strict=True):
                    _check_proof(host, problem, directory / answers[host], token)
        finally:
            _remove_answers(
                ssh,
                {
                    host: [directory / answer for directory in directories]
                    for host, answer in answers.items()
                },
            )


def _proof(directory: Path, token: str, answer: str) -> dict[str, str]:
    return {"directory": str(directory), "name": token, "answer": answer}


def _check_proof(host: str, problem: str | None, answer: Path, token: str) -> None:
    """Raise LaunchError unless the host sees the token and its answer appears on this host."""
    if problem is not None:
        raise LaunchError(_not_shared(host, problem))
    deadline = time.monotonic() + _SETTLES
    while not (is_file(answer) and answer.read_text(encoding="ascii") == token):
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
    """Remove the hosts' answers, over ssh if they are not visible here."""
    invisible = {}
    for host, files in answers.items():
        visible = [file for file in files if exists(file)]
        for file in visible:
            with suppress(OSError):
                file.unlink()
        if len(visible) < len(files):
            invisible[host] = _question("clean", (), token="", files=[str(file) for file in files])
    run_on_hosts(ssh, list(invisible), python(_CHECK), stdin=invisible, timeout=_CLEAN_UP)


@contextmanager
def _tokens(directories: Sequence[Path]) -> Iterator[str]:
    """Create a token of the same name in every directory for the duration of the block.

    Yields:
        The name of the token, which is also its content.
    """
    token = f"{_TOKEN}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    files = [directory / token for directory in directories]
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


def _remove_old_tokens(directory: Path) -> None:
    """Remove the tokens of preparations that were killed."""
    for path in glob(directory, f"{_TOKEN}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _TOKEN_LIVES:
                path.unlink()


def _bring(files: _Files, hosts: Sequence[str], ssh: Ssh, known: bool) -> None:
    """Let every host compare its files with those of this host, and copy the differing ones."""
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
        questions = {host: _question("begin", items, token=tokens[host], run=run) for host in hosts}
        try:
            answers = _ask(ssh, questions, _LONG, known=known)
            wrong = {host: _wrong(items, answer) for host, answer in answers.items()}
            wrong = {host: names for host, names in wrong.items() if names}
            _copy(items, wrong, answers, ssh)
            finishing = {
                host: _finishing(items, tokens[host], names) for host, names in wrong.items()
            }
            _ask(ssh, finishing, _LONG)
        except BaseException:
            _clean_up(items, tokens, ssh)
            raise


def _wrong(items: Sequence[Item], answer: dict[str, Any]) -> dict[int, tuple[str, ...]]:
    """Return the names of the files to copy, by the number of the item."""
    wrong = {
        number: tuple(item_answer["wrong"]) for number, item_answer in enumerate(answer["items"])
    }
    return {number: names for number, names in wrong.items() if names}


def _copy(
    items: Sequence[Item],
    wrong: Mapping[str, dict[int, tuple[str, ...]]],
    answers: Mapping[str, Any],
    ssh: Ssh,
) -> None:
    transfers: dict[str, list[Transfer]] = {}
    for host, numbers in wrong.items():
        check_rsync(host, there=answers[host]["rsync"])
        for number, names in numbers.items():
            item, answer = items[number], answers[host]["items"][number]
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
    for host, host_transfers in transfers.items():
        size = sum(transfer.size for transfer in host_transfers)
        _log.info(
            "host %s has the files now: %.1f MiB in %.1f s",
            host,
            size / 2**20,
            time.monotonic() - began,
        )


def _finishing(items: Sequence[Item], token: str, wrong: Mapping[int, tuple[str, ...]]) -> bytes:
    """Return the question that finishes a copy, with the digests of all copied files.

    Digests that are not recorded are computed.
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
    """Remove the unfinished copies on the hosts that answer."""
    questions = {
        host: _question("clean", items, token=token, files=[]) for host, token in tokens.items()
    }
    run_on_hosts(ssh, list(questions), python(_CHECK), stdin=questions, timeout=_CLEAN_UP)


_CHECK = "megacore.cluster.placement.check"


def _question(action: str, items: Sequence[Item], **values: Any) -> bytes:
    return json.dumps(
        {"action": action, "items": [item.to_json() for item in items], **values}
    ).encode()


def _ask(
    ssh: Ssh, questions: Mapping[str, bytes], timeout: float, *, known: bool = True
) -> dict[str, Any]:
    """Ask all hosts in parallel and return their answers.

    Raises LaunchError if a host cannot answer, or answers with a problem, and HostLostError if one
    that is known, because it was reachable before, cannot be reached.
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
        answer: dict[str, Any] = result.answer()
    except ValueError as error:
        output = " ".join(result.output.decode(errors="replace").split())[-200:]
        raise LaunchError(
            f"host {result.host} answers {output!r} instead of what files it has"
        ) from error
    if "problem" in answer:
        raise LaunchError(f"host {result.host}: {answer['problem']}")
    return answer
