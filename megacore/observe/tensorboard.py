"""TensorBoard files beside a run, with the tags of Megatron-LM."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
        """Write into `directory`, from the first values on. Raises ConfigError when the package is missing."""
        check_tensorboard()
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def scalars(self, values: Mapping[str, float | None], iteration: int) -> None:
        """Write values by tag; None is left out."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A run that resumed repeats iterations: what an earlier file has from here on is hidden.
            self._writer = SummaryWriter(log_dir=str(self._directory), purge_step=iteration)
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
