"""What flows and their machinery need of a configuration, whatever its flow does."""

from typing import Any, Literal, Protocol

from megacore.config.launch import LaunchConfig
from megacore.config.train import TrackingConfig


class FlowConfig(Protocol):
    """A pretraining's or a fine-tuning's configuration."""

    @property
    def name(self) -> str:
        """Name of the run."""

    @property
    def verify(self) -> Literal["quick", "full"]:
        """How a cached artifact is checked."""

    @property
    def launch(self) -> LaunchConfig:
        """Processes, their supervision and their retries."""

    @property
    def tracking(self) -> TrackingConfig:
        """MLflow."""

    @property
    def registered_model(self) -> str:
        """Name in the model registry, resolved."""

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]:
        """All values, as JSON has them with mode json."""
