"""Exceptions that a user can meet.

Each message states what is wrong, where, the value found, and what to do.

`retryable` tells an orchestrator whether a retry of the same work may succeed. `exit_code` is the
exit status of the command line.
"""

import re
from collections.abc import Iterable, Sequence

from megacore.redact import redact

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def dotted(location: Iterable[str | int]) -> str:
    """Return the name of a value as messages write it, such as `data.blend[0].weight`."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in location
    ).removeprefix(".")


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names for a message, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def one_line(text: object, most: int | None = None) -> str:
    """Return the first `most` characters of another program's text, without line breaks."""
    return " ".join(str(text).split())[:most]


class MegacoreError(Exception):
    """Base class of megacore's errors; its message never contains a credential."""

    retryable: bool = False
    exit_code: int = 1

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            *(redact(argument) if isinstance(argument, str) else argument for argument in arguments)
        )


class ConfigError(MegacoreError):
    r"""Invalid value in a configuration file or an override.

    Its message is one line: control characters of the value are written as escapes, such as `\n`.
    """

    exit_code = 2

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            *(
                _CONTROL.sub(lambda match: repr(match[0])[1:-1], argument)
                if isinstance(argument, str)
                else argument
                for argument in arguments
            )
        )


class AdoptionError(MegacoreError):
    """Files of another program with features that do not exist here."""

    exit_code = 13


class ParallelLayoutError(ConfigError):
    """Batch sizes, ranks and model dimensions that do not divide evenly."""


class DataFormatError(MegacoreError):
    """Data file that is missing, damaged, empty, or in another format than it claims."""

    exit_code = 3


class DamagedFileError(DataFormatError):
    """Data file whose content is cut off, damaged, or in another format than its name says.

    Another copy of the file may be sound.
    """


class DownloadError(MegacoreError):
    """Remote source that was unreachable or broke the connection; a retry may succeed."""

    retryable = True
    exit_code = 10


class ArtifactError(MegacoreError):
    """Stage output that cannot be written or does not match its manifest."""

    exit_code = 4


class WorkspaceError(ArtifactError):
    """Workspace that cannot be written: permissions, a full disk, a read-only mount."""


class FileAccessError(MegacoreError):
    """File that the system cannot read or write now: a failing disk, a lost mount, a full table.

    The file itself may be sound; it must not be deleted or made again for this error.
    """

    exit_code = 4


class TransientFileError(FileAccessError):
    """File that the system could not read or write for a cause that may pass.

    A disk's connection failed, or a file server did not answer; a retry may succeed.
    """

    retryable = True


class CheckpointError(MegacoreError):
    """Checkpoint that is incomplete, damaged, or of another model."""

    exit_code = 5


class ConversionError(MegacoreError):
    """Model without a counterpart in the other format, or export that differs from our model."""

    exit_code = 6


class TrainingError(MegacoreError):
    """Failure of training itself (NaN loss, out of memory), which a restart would repeat."""

    exit_code = 7


class MemoryExhaustedError(TrainingError):
    """Rank out of memory, reported by the rank itself or by the kernel."""


class LossError(TrainingError):
    """Loss or gradient that is not finite, or a loss spike."""


class LeakError(TrainingError):
    """Attention in which a document sees another one although masks should separate them."""


class TrainingStoppedError(MegacoreError):
    """Training that stopped early on request.

    A complete checkpoint contains its state.
    """

    exit_code = 75  # sysexits.h: try again later


class PreemptedError(TrainingStoppedError):
    """Training that stopped on a signal, such as a scheduler's when it reclaims a host.

    A restart resumes it.
    """

    retryable = True


class LaunchError(MegacoreError):
    """Process that could not be started, or that ended for reasons outside of training."""

    exit_code = 8


class HostsSilentError(LaunchError):
    """Hosts of a hostfile of which none answers."""


class RankLostError(LaunchError):
    """Rank that died of a signal or without a reported reason.

    A retry resumes from the last complete checkpoint.
    """

    retryable = True


class RankStalledError(RankLostError):
    """Rank without progress for longer than `launch.stall_limit`."""


class GpuFailedError(RankLostError):
    """GPU that failed under a rank, such as by a memory error or a crashed kernel.

    A retry resumes from the last complete checkpoint; a GPU that stays broken fails again at once.
    """


class HostLostError(RankLostError):
    """Host of the job that died, froze or lost its connection.

    A retry resumes from the last complete checkpoint.
    """


class WorkerLostError(LaunchError):
    """Data preparation process that died; a retry repeats only its part."""

    retryable = True


class StageTimeoutError(LaunchError):
    """Stage that ran longer than its configured limit and was ended."""


class TrackingError(MegacoreError):
    """Tracking server that did not accept a request."""

    retryable = True
    exit_code = 9


class HubError(MegacoreError):
    """Hugging Face hub that did not accept an upload; a retry may succeed."""

    retryable = True
    exit_code = 12


ERROR_TYPES: dict[str, type[MegacoreError]] = {
    cls.__name__: cls
    for cls in (
        MegacoreError,
        ConfigError,
        AdoptionError,
        ParallelLayoutError,
        DataFormatError,
        DamagedFileError,
        DownloadError,
        ArtifactError,
        WorkspaceError,
        FileAccessError,
        TransientFileError,
        CheckpointError,
        ConversionError,
        TrainingError,
        MemoryExhaustedError,
        LossError,
        TrainingStoppedError,
        PreemptedError,
        LaunchError,
        RankLostError,
        RankStalledError,
        GpuFailedError,
        HostLostError,
        WorkerLostError,
        StageTimeoutError,
        TrackingError,
        HubError,
    )
}
"""Error classes by name: an error crosses a process boundary as class name and message."""
