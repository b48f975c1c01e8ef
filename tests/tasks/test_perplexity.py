"""The table of perplexities, and the event of each measurement."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tasks import _perplexity
from tasks._perplexity import EVALUATED, PerplexityTable
from tests.tasks.events import EventLog


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace Prefect by a record of the table and of the events."""
    record: dict[str, Any] = {"events": [], "tables": 0}

    def create(table: list[dict[str, Any]], *, key: str, description: str) -> str:
        record.update(table=table, key=key, tables=record["tables"] + 1)
        return "id"

    class Client:
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *error: object) -> None: ...

        def update_artifact(self, identifier: str, update: Any) -> None:
            record["table"] = json.loads(update.data)

    def emit(name: str, *, resource: dict[str, str], payload: dict[str, Any]) -> None:
        record["events"].append((name, resource["prefect.resource.id"], payload))

    monkeypatch.setattr(_perplexity, "create_table_artifact", create)
    monkeypatch.setattr(_perplexity, "get_client", lambda sync_client: Client())
    monkeypatch.setattr(_perplexity, "emit_event", emit)
    return record


def measure(log: EventLog, table: PerplexityTable, iteration: int, loss: float) -> None:
    log.perplexity(iteration, loss)
    table.measured(json.loads(log.path.read_text().splitlines()[-1]))


def test_each_checkpoint_has_one_row_in_one_table(
    log: EventLog, run_directory: Path, shown: dict[str, Any]
) -> None:
    measure(log, PerplexityTable(run_directory), 10, loss=2.0)
    table = PerplexityTable(run_directory)  # of the next attempt, which repeats an iteration
    measure(log, table, 10, loss=1.0)
    measure(log, table, 20, loss=0.5)
    table.known({"iteration": 10, "valid_ppl": 2.718, "test_ppl": 3.0})
    assert shown["table"][0]["test PPL"] == "-"
    table.evaluated({"iteration": 20, "valid_ppl": 1.649, "test_ppl": 2.0})
    assert [list(row.values())[:4] for row in shown["table"]] == [
        [10, "320", "2.72", "3.00"],
        [20, "640", "1.65", "2.00"],
    ]
    assert (shown["key"], shown["tables"]) == ("perplexity", 2)


def test_each_measurement_is_an_event_with_numbers(
    log: EventLog, run_directory: Path, shown: dict[str, Any]
) -> None:
    table = PerplexityTable(run_directory)
    measure(log, table, 10, loss=0.0)
    table.evaluated({"iteration": 10, "valid_ppl": 1.0, "test_ppl": 3.0})
    table.known({"iteration": 20, "valid_ppl": 2.0, "test_ppl": 3.0})
    resource = f"megacore.checkpoint.{run_directory.name}.10"
    common = {"run": run_directory.name, "iteration": 10, "valid_ppl": 1.0}
    assert shown["events"] == [
        (EVALUATED, resource, common | {"test_ppl": None}),
        (EVALUATED, resource, common | {"test_ppl": 3.0}),
    ]


def test_table_that_cannot_be_stored_is_a_warning(
    log: EventLog,
    run_directory: Path,
    shown: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*values: object, **options: object) -> None:
        raise OSError("no server")

    monkeypatch.setattr(_perplexity, "create_table_artifact", fail)
    monkeypatch.setattr("prefect.get_run_logger", lambda: logging.getLogger("test"))
    measure(log, PerplexityTable(run_directory), 10, loss=1.0)
    assert "the table of perplexities was not stored: no server" in caplog.text
