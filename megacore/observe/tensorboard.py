"""TensorBoard files beside a run, with the tags of Megatron-LM."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from megacore.errors import ConfigError


def check_tensorboard() -> None:
    """Raise ConfigError when `tracking.tensorboard` is asked for and the package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tracking.tensorboard is true and the package tensorboard is not installed: "
            "install megacore with its extra, `pip install -e .[tensorboard]`, or set it to false"
        )


class TensorBoardWriter:
    """Writes scalars by iteration."""

    def __init__(self, directory: Path) -> None:
        """Write into `directory`. Raises ConfigError when the package is missing."""
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(directory))

    def scalars(self, values: Mapping[str, float | None], iteration: int) -> None:
        """Write values by tag; None is left out."""
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
