"""Writer of the events of an imagined training."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOKENS_PER_ITERATION = 32


class EventLog:
    """An event file that grows as in training, one second per event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempt = 1
        self.time = 1_700_000_000.0

    def write(self, kind: str, iteration: int, **values: Any) -> None:
        """Append an event."""
        self.time += 1
        event = {
            "kind": kind,
            "time": self.time,
            "attempt": self.attempt,
            "iteration": iteration,
            **values,
        }
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def start(self, iteration: int = 0, **values: Any) -> None:
        """Append the event of an attempt's start."""
        facts = {
            "ranks": 2,
            "hosts": ["node-a"],
            "device": "cpu",
            "precision": "fp32",
            "parameters": 38_784,
            "changes": [],
        }
        self.write("start", iteration, **facts | values)

    def step(self, iteration: int, loss: float = 5.0, **values: Any) -> None:
        """Append a step event with the fields that these tests need."""
        tokens = iteration * TOKENS_PER_ITERATION
        self.write(
            "step",
            iteration,
            consumed_tokens=tokens,
            lm_loss=loss,
            **{"lr": 1e-3, "grad_norm": 1.0} | values,
        )

    def evaluation(self, iteration: int, loss: float = 5.0, **by_source: float | None) -> None:
        """Append a validation event, with losses by source of a blend."""
        tokens = iteration * TOKENS_PER_ITERATION
        self.write(
            "evaluation",
            iteration,
            consumed_tokens=tokens,
            lm_loss=loss,
            samples=8,
            **sources(by_source),
        )

    def perplexity(
        self,
        iteration: int,
        loss: float | None = 5.0,
        by_position: Sequence[float | None] = (),
        **by_source: float | None,
    ) -> None:
        """Append the event of a checkpoint's measured perplexity."""
        self.write(
            "perplexity",
            iteration,
            consumed_tokens=iteration * TOKENS_PER_ITERATION,
            valid_loss=loss,
            valid_ppl=None if loss is None else math.exp(loss),
            samples=8,
            seconds=0.1,
            by_position=[
                {"start": 4 * number, "loss": each, "tokens": 32}
                for number, each in enumerate(by_position)
            ],
            **sources(by_source),
        )

    def checkpoint(self, iteration: int, loss: float | None = 5.0) -> None:
        """Append the event of a saved checkpoint."""
        self.write(
            "checkpoint",
            iteration,
            consumed_tokens=iteration * TOKENS_PER_ITERATION,
            path=f"checkpoints/iter_{iteration:07d}",
            size_bytes=1000 + iteration,
            seconds=0.1,
            validation_loss=loss,
        )

    def deleted(self, iteration: int) -> None:
        """Append the event of a checkpoint that retention removed."""
        self.write("checkpoint_deleted", iteration, path=f"checkpoints/iter_{iteration:07d}")


def sources(losses: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the field of an event with losses by source, if there are any."""
    rows = [{"source": name, "loss": loss, "tokens": 32} for name, loss in losses.items()]
    return {"by_source": rows} if rows else {}
