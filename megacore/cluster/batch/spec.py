"""What a batch job is, and its follower's sign of life.

Whoever starts the job writes its specification; its follower and each machine's node process read
it. The sign of life is a small file on the shared workspace that each machine looks at: it counts
up, and the machines compare what they read with their own clocks, since those of several machines
differ.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from megacore.artifact.files import read_json, replace_file, workspace_errors
from megacore.config.base import Section
from megacore.config.launch import LaunchConfig
from megacore.errors import ConfigError

FOLDER = "batch"
"""Beside the job file: what belongs to the batch job."""
STOP_MARGIN = 10.0
"""Seconds beyond the ranks' own grace in which a batch job should have ended after it was
cancelled."""
FOLLOWER_LIMIT = 300.0
"""Seconds without a sign of its follower after which a batch job ends itself."""
INTERVAL = 2.0
"""Seconds between two signs."""
_BEAT_NAME = "follower.json"


class BatchSpec(Section):
    """A batch job, the same for all of its machines."""

    module: str
    """Entry point of each rank."""
    job_file: str
    """What the ranks do, a RankJob as JSON."""
    exit_directory: str
    """Where each rank writes why it ended."""
    launch: LaunchConfig
    environment: dict[str, str]
    """Variables of the ranks: those that are forwarded, those of launch.env_file, and those of the
    job."""
    directory: str
    """Where the processes run."""
    python: str
    """The interpreter, at this path on Slurm's machines too."""
    workspace: str
    """Directory that every machine sees, with the job file in it."""
    follower_limit: float
    """Seconds without a sign of the follower after which the job ends itself."""

    @property
    def folder(self) -> Path:
        """Where this file, the script and the job's output lie."""
        return Path(self.job_file).parent / FOLDER

    @property
    def path(self) -> Path:
        """Where this specification is written."""
        return self.folder / "spec.json"

    @property
    def nodes(self) -> tuple[int, int]:
        """Least and largest number of machines."""
        return self.launch.node_range or (1, 1)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each machine."""
        return ranks_per_node(self.launch)

    @property
    def gpus_per_node(self) -> int:
        """GPUs that are asked of each machine."""
        asked = self.launch.slurm.gpus_per_node if self.launch.kind == "slurm" else "auto"
        return (0 if self.launch.allow_cpu else self.ranks_per_node) if asked == "auto" else asked

    @property
    def cpus_per_node(self) -> int:
        """CPU cores that are asked of each machine."""
        own = self.launch.kubernetes.cpus if self.launch.kind == "kubernetes" else None
        return own or self.ranks_per_node * (self.launch.threads_per_rank or 1)

    @property
    def grace(self) -> int:
        """Whole seconds in which the processes of a machine have ended after they were asked to."""
        return math.ceil(self.launch.stop_grace) + 10

    def write(self) -> None:
        """Write it, readable by this user alone: variables may be secrets.

        Raises WorkspaceError.
        """
        with workspace_errors(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = self.model_dump_json(indent=2) + "\n"
            replace_file(self.path, text.encode(), durable=False, mode=0o600)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read it back. Raises ConfigError."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is no batch job written by this version of megacore, or cannot be read "
                f"here: {error}"
            ) from error


def ranks_per_node(launch: LaunchConfig) -> int:
    """Ranks of each machine that a scheduler gives.

    Raises ConfigError where nothing says how many.
    """
    if launch.nproc_per_node == "auto":
        raise ConfigError(
            f"launch.nproc_per_node is auto, and which machines {launch.kind} will give is not "
            "known: set it to the number of ranks of each, one per GPU"
        )
    return launch.nproc_per_node


class FollowerBeat:
    """The follower's side."""

    def __init__(
        self, folder: Path, token: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to count in `folder`.

        `token` names the submission, which another follower does not know.
        """
        self.save = False
        """Whether the ranks are to save and end, as SIGUSR1 asks."""
        self.over = False
        """Whether the job has ended, as the scheduler says: a machine that it has lost may still
        run its part."""
        self._path, self._token, self._clock = folder / _BEAT_NAME, token, clock
        self._count, self._told = 0, (False, False)
        self._at: float | None = None

    def beat(self) -> None:
        """Write the sign if it is time, or if there is something new to say.

        A full disk is met again later.
        """
        now = self._clock()
        told = (self.save, self.over)
        if self._at is not None and now - self._at < INTERVAL and self._told == told:
            return
        self._at, self._told = now, told
        self._count += 1
        said = {"token": self._token, "count": self._count, "save": self.save, "over": self.over}
        with contextlib.suppress(OSError):
            replace_file(self._path, json.dumps(said).encode(), durable=False)


class FollowerWatch:
    """A machine's side."""

    def __init__(
        self, folder: Path, token: str, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch the sign of submission `token` in `folder`; `limit` is in seconds."""
        self.save = False
        """Whether the follower asks the ranks to save and end."""
        self.over = False
        """Whether the follower says that the job has ended."""
        self._path, self._token, self._limit, self._clock = folder / _BEAT_NAME, token, limit, clock
        self._count, self._since = -1, clock()

    def lost(self) -> bool:
        """Look at the sign: whether it stood still for longer than the limit."""
        now = self._clock()
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            said = read_json(self._path)
            if said["token"] == self._token and said["count"] != self._count:
                self._count, self._since = said["count"], now
                self.save, self.over = self.save or bool(said["save"]), bool(said["over"])
        return now - self._since > self._limit
