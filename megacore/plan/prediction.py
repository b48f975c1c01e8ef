"""Predicted time of an iteration by part, under the names with which a run measures its time."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one iteration by part."""

    compute: float
    """Forward and backward passes without communication, the mean of the pipeline stages."""
    tensor: float
    """Exposed communication of tensor and sequence parallelism, likewise."""
    context: float
    """Exposed communication of context parallelism, likewise."""
    bubble: float
    """Waiting for other pipeline stages, likewise: for the first and last micro batches, and for
    slower stages."""
    messages: float
    """Exposed messages between pipeline stages."""
    data: float
    """Exposed communication of data parallelism: gradients, and weights of ZeRO."""
    embedding: float
    """Sum of a tied embedding's gradient on the first and last pipeline stage."""
    optimizer: float
    """Update of the weights."""
    other: float
    """Waiting for slower hosts."""

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        seconds: float = sum(getattr(self, part.name) for part in fields(self))
        return seconds

    @property
    def phase_ms(self) -> dict[str, float]:
        """Milliseconds by the phases that a run measures; `compute` includes the update."""
        seconds = {
            "compute": self.compute + self.optimizer,
            "tensor-parallel wait": self.tensor,
            "context-parallel wait": self.context,
            "pipeline-parallel wait": self.bubble + self.messages,
            "data-parallel wait": self.data,
            "embedding-parallel wait": self.embedding,
            "world wait": self.other,
        }
        return {phase: 1000.0 * value for phase, value in seconds.items()}
