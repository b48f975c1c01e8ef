"""Configuration fields that every flow and its machinery use."""

from typing import Any, Protocol

from megacore.artifact.manifest import Verification
from megacore.config.launch import LaunchConfig
from megacore.config.train import TrackingConfig


class FlowConfig(Protocol):
    """Configuration of a pretraining or a fine-tuning."""

    @property
    def name(self) -> str:
        """Name of the run."""

    @property
    def verify(self) -> Verification:
        """Depth of the check of a cached artifact."""

    @property
    def launch(self) -> LaunchConfig:
        """Options of processes, their supervision and their retries."""

    @property
    def tracking(self) -> TrackingConfig:
        """Options of MLflow."""

    @property
    def registered_model(self) -> str:
        """Resolved name in the model registry."""

    def model_dump(self, *, mode: str = "python", exclude_unset: bool = False) -> dict[str, Any]:
        """Return all values, or those that were given; `mode="json"` converts to JSON types."""
