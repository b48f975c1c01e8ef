"""Specification of a batch job, and the beat of its follower.

The process that starts the job writes the specification. The job's follower and the node process of
each node read it. The beat is a small file on the shared workspace with a counter that the
follower increases. Each node measures with its own clock how long the counter stands still, because
the clocks of several hosts differ.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from megacore.artifact.files import read_json, reason_of, replace_file, workspace_errors
from megacore.cluster.hosts.plan import after_retry
from megacore.config.base import Section
from megacore.config.launch import LaunchConfig
from megacore.errors import ConfigError, FileAccessError
from megacore.hardware import SHARED_PACKAGES

FOLDER = "batch"
"""Name of the batch job's directory, next to the job file."""
STOP_MARGIN = 10.0
"""Seconds for a cancelled batch job to end, in addition to the stop grace of its ranks."""
FOLLOWER_LIMIT = 300.0
"""Seconds without a beat of its follower after which a batch job ends itself."""
INTERVAL = 2.0
"""Seconds between two beats."""
_BEAT_NAME = "follower.json"


class BatchSpec(Section):
    """Specification of a batch job, the same for all of its nodes."""

    module: str
    """Entry point of each rank."""
    job_file: str
    """Path of the job's JSON file, a RankJob."""
    exit_directory: str
    """Directory of the ranks' exit reasons."""
    launch: LaunchConfig
    environment: dict[str, str]
    """Variables of the ranks: forwarded variables, those of launch.env_file, and the job's."""
    directory: str
    """Working directory of the processes."""
    python: str
    """Path of the Python interpreter, the same on Slurm's nodes."""
    workspace: str
    """Directory that all nodes share, with the job file in it."""
    follower_limit: float
    """Seconds without a beat of the follower after which the job ends itself."""
    packages: tuple[str, ...] = SHARED_PACKAGES
    """Packages whose versions must be the same on all nodes."""

    @property
    def folder(self) -> Path:
        """Directory of this specification, the script and the job's output."""
        return Path(self.job_file).parent / FOLDER

    @property
    def path(self) -> Path:
        """Path of this specification's file."""
        return self.folder / "spec.json"

    @property
    def again(self) -> str:
        """Verb phrase on a retry of the job, to follow a subject."""
        return after_retry(self.module)

    @property
    def nodes(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes."""
        return self.launch.node_range or (1, 1)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of each node."""
        return ranks_per_node(self.launch)

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs to request for each node."""
        requested = self.launch.job_gpus
        return self.ranks_per_node if requested == "auto" else requested

    @property
    def cpus_per_node(self) -> int:
        """Number of CPU cores to request for each node."""
        requested = self.launch.kubernetes.cpus if self.launch.kind == "kubernetes" else None
        return requested or self.ranks_per_node * (self.launch.threads_per_rank or 1)

    @property
    def grace(self) -> int:
        """Whole seconds for the processes of a node to end after SIGTERM."""
        return math.ceil(self.launch.stop_grace) + 10

    def write(self) -> None:
        """Write the specification, readable only by this user: variables may be secrets.

        Raises WorkspaceError.
        """
        with workspace_errors(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = self.model_dump_json(indent=2) + "\n"
            replace_file(self.path, text.encode(), durable=False, mode=0o600)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a specification. Raises ConfigError or FileAccessError."""
        try:
            return cls.model_validate(read_json(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is no batch job written by this version of megacore, or cannot be read "
                f"here: {reason_of(error)}"
            ) from error


def ranks_per_node(launch: LaunchConfig) -> int:
    """Return the number of ranks of each node of a scheduler.

    Raises:
        ConfigError: `launch.nproc_per_node` is auto.
    """
    if launch.nproc_per_node == "auto":
        raise ConfigError(
            f"launch.nproc_per_node is auto, and which machines {launch.kind} will give is not "
            "known: set it to the number of ranks of each, one per GPU"
        )
    return launch.nproc_per_node


class FollowerBeat:
    """Writer of the beat, in the follower."""

    def __init__(
        self, folder: Path, token: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare to write the beat to `folder`.

        `token` identifies the submission; another follower does not know it.
        """
        self.save = False
        """True to ask the ranks to save and end, like SIGUSR1."""
        self.over = False
        """True if the job has ended according to the scheduler; a lost node may still run its part.
        """
        self._path, self._token, self._clock = folder / _BEAT_NAME, token, clock
        self._count, self._requests = 0, (False, False)
        self._at: float | None = None

    def beat(self) -> None:
        """Write the beat if it is due or if `save` or `over` has changed.

        An error, such as a full disk, is ignored; the next beat tries again.
        """
        now = self._clock()
        requests = (self.save, self.over)
        if self._at is not None and now - self._at < INTERVAL and self._requests == requests:
            return
        self._at, self._requests = now, requests
        self._count += 1
        content = {"token": self._token, "count": self._count, "save": self.save, "over": self.over}
        with contextlib.suppress(OSError):
            replace_file(self._path, json.dumps(content).encode(), durable=False)


class FollowerWatch:
    """Reader of the beat, on a node."""

    def __init__(
        self, folder: Path, token: str, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch the beat of submission `token` in `folder`; `limit` is in seconds."""
        self.save = False
        """True if the follower asks the ranks to save and end."""
        self.over = False
        """True if the job has ended according to the follower."""
        self._path, self._token, self._limit, self._clock = folder / _BEAT_NAME, token, limit, clock
        self._count, self._since = -1, clock()

    def lost(self) -> bool:
        """Read the beat and return True if it has not changed for longer than the limit.

        The time of the reading does not count.
        """
        now = self._clock()
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FileAccessError):
            content = read_json(self._path)
            if content["token"] == self._token and content["count"] != self._count:
                self._count, self._since = content["count"], now
                self.save, self.over = self.save or bool(content["save"]), bool(content["over"])
        # While a file share stands still, the follower cannot write its beat either.
        self._since += self._clock() - now
        return now - self._since > self._limit
