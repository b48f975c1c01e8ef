"""Perplexities of a run's checkpoints in Prefect: a table that grows, and an event for each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.events import emit_event

from megacore.artifact.workspace import EVENTS_FILE
from megacore.observe.events import EventReader
from megacore.observe.logging import short_number
from megacore.paths import exists
from tasks._logging import shown_in_prefect

KEY = "perplexity"
"""Key of the table among Prefect's artifacts."""
EVALUATED = "megacore.checkpoint.evaluated"
"""Event of Prefect on which an automation can act, with both perplexities in its payload."""


@dataclass
class Measured:
    """Perplexities of one checkpoint; None where they are not measured."""

    tokens: int | None = None
    """Tokens consumed before the checkpoint."""
    valid_ppl: float | None = None
    test_ppl: float | None = None
    time: float | None = None
    """Time of the measurement in training, in Unix seconds."""

    def cells(self, iteration: int) -> dict[str, Any]:
        """Return the row of the table."""
        return {
            "iteration": iteration,
            "tokens": "-" if self.tokens is None else f"{self.tokens:,}",
            "valid PPL": _text(self.valid_ppl),
            "test PPL": _text(self.test_ppl),
            "measured": "-"
            if self.time is None
            else datetime.fromtimestamp(self.time).isoformat(" ", "seconds"),
        }


class PerplexityTable:
    """Table artifact with one row for each measured checkpoint of a run.

    A table that cannot be stored is reported as a warning: a display must not end a training.
    """

    def __init__(self, run_directory: Path) -> None:
        """Begin with the checkpoints that earlier attempts measured."""
        self._run = run_directory.name
        self._rows: dict[int, Measured] = {}
        self._artifact: Any = None
        events = run_directory / EVENTS_FILE
        if exists(events):
            for event, _ in EventReader(events, kinds=("perplexity",)):
                self._set(event)

    def measured(self, event: Mapping[str, Any]) -> None:
        """Show a `perplexity` event of the training."""
        self._set(event)
        self._publish(int(event["iteration"]))

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Show what the stage `evaluate` measured for one checkpoint."""
        self.known(row)
        self._publish(int(row["iteration"]))

    def known(self, row: Mapping[str, Any]) -> None:
        """Add what an earlier flow run measured, to be shown with the next measurement."""
        measured = self._rows.setdefault(int(row["iteration"]), Measured())
        measured.valid_ppl, measured.test_ppl = row["valid_ppl"], row["test_ppl"]

    def _set(self, event: Mapping[str, Any]) -> None:
        self._rows[int(event["iteration"])] = Measured(
            tokens=event["consumed_tokens"], valid_ppl=event["valid_ppl"], time=event["time"]
        )

    def _publish(self, iteration: int) -> None:
        with shown_in_prefect("the table of perplexities"):
            row = self._rows[iteration]
            table = [self._rows[each].cells(each) for each in sorted(self._rows)]
            emit_event(
                EVALUATED,
                resource={
                    "prefect.resource.id": f"megacore.checkpoint.{self._run}.{iteration}",
                    "prefect.resource.name": f"{self._run} iter_{iteration:07d}",
                },
                payload={
                    "run": self._run,
                    "iteration": iteration,
                    "valid_ppl": row.valid_ppl,
                    "test_ppl": row.test_ppl,
                },
            )
            if self._artifact is None:
                self._artifact = create_table_artifact(
                    table, key=KEY, description=f"perplexity of the checkpoints of {self._run}"
                )
            else:
                with get_client(sync_client=True) as client:
                    client.update_artifact(self._artifact, ArtifactUpdate(data=json.dumps(table)))


def _text(ppl: float | None) -> str:
    return "-" if ppl is None else short_number(ppl)
