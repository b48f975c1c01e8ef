"""The exceptions a user can meet.

Each message says what is wrong, where, the value found, and what to do.

`retryable` tells an orchestrator whether the same work may succeed when it is started again;
`exit_code` is what a command line exits with.
"""

from megacore.redact import redact


class MegacoreError(Exception):
    """Base of every error that is raised on purpose; its message never holds a credential."""

    retryable: bool = False
    exit_code: int = 1

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            *(redact(argument) if isinstance(argument, str) else argument for argument in arguments)
        )


class ConfigError(MegacoreError):
    """A value in a configuration file or an override cannot work."""

    exit_code = 2


class ParallelLayoutError(ConfigError):
    """Batch sizes, ranks and model dimensions do not divide as they must."""


class DataFormatError(MegacoreError):
    """A data file is missing, damaged, empty, or not of the form it claims."""

    exit_code = 3


class DownloadError(MegacoreError):
    """A remote source could not be reached or broke off; a retry may reach it."""

    retryable = True
    exit_code = 10


class ArtifactError(MegacoreError):
    """A stage's output cannot be written or does not match its manifest."""

    exit_code = 4


class WorkspaceError(ArtifactError):
    """The workspace cannot be written: permissions, a full disk, a read-only mount."""


class CheckpointError(MegacoreError):
    """A checkpoint is incomplete, damaged, or of another model."""

    exit_code = 5


class ConversionError(MegacoreError):
    """A model has no counterpart in the other form, or the exported model differs from ours."""

    exit_code = 6


class TrainingError(MegacoreError):
    """Training itself failed (loss is NaN, out of memory): starting again would fail again."""

    exit_code = 7


class MemoryExhaustedError(TrainingError):
    """A rank needed more memory than there is, by its own word or the kernel's."""


class LossError(TrainingError):
    """A loss or a gradient is not finite, or a loss jumped."""


class TrainingStoppedError(MegacoreError):
    """Training stopped before its end because it was asked to.

    A complete checkpoint holds where it stands.
    """

    exit_code = 75  # sysexits.h: try again later


class PreemptedError(TrainingStoppedError):
    """A signal asked for it, as a scheduler does that takes a machine back.

    Starting again goes on.
    """

    retryable = True


class LaunchError(MegacoreError):
    """A process could not be started or ended in a way that is not the training's own fault."""

    exit_code = 8


class RankLostError(LaunchError):
    """A rank died of a signal or without a reason.

    A retry resumes from the last complete checkpoint.
    """

    retryable = True


class RankStalledError(RankLostError):
    """A rank made no progress for longer than `launch.stall_limit`."""


class HostLostError(RankLostError):
    """A machine of the job died, froze or was cut off.

    A retry resumes from the last complete checkpoint.
    """


class WorkerLostError(LaunchError):
    """A process that prepared data died; a retry does only its part again."""

    retryable = True


class StageTimeoutError(LaunchError):
    """A stage ran longer than its configured limit and was ended."""


class TrackingError(MegacoreError):
    """The tracking server did not take what it was sent."""

    retryable = True
    exit_code = 9


ERROR_TYPES: dict[str, type[MegacoreError]] = {
    cls.__name__: cls
    for cls in (
        MegacoreError,
        ConfigError,
        ParallelLayoutError,
        DataFormatError,
        DownloadError,
        ArtifactError,
        WorkspaceError,
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
        HostLostError,
        WorkerLostError,
        StageTimeoutError,
        TrackingError,
    )
}
"""By name: an error crosses a process boundary as its class name and its message."""
