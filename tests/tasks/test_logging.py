"""Filters of Prefect's log."""

import logging

import pytest
from prefect.events import utilities

from tasks._logging import shorten_user_errors


@pytest.mark.parametrize(
    ("event", "reason", "lines"),
    [
        ("prefect.flow-run.heartbeat", "Cannot put items in a stopped service instance.", 0),
        ("prefect.flow-run.heartbeat", "the database is full", 1),
        ("prefect.flow-run.Failed", "Cannot put items in a stopped service instance.", 1),
    ],
)
def test_only_a_heartbeat_after_the_end_of_a_run_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, event: str, reason: str, lines: int
) -> None:
    def fail() -> None:
        raise RuntimeError(reason)

    shown: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", shown.append)
    shorten_user_errors()
    monkeypatch.setattr(utilities, "should_emit_events", lambda: True)
    monkeypatch.setattr(utilities.EventsWorker, "instance", fail)
    utilities.logger.addHandler(handler)
    try:
        utilities.emit_event(event, {"prefect.resource.id": "x"})
    finally:
        utilities.logger.removeHandler(handler)
    assert [record.getMessage() for record in shown] == [f"Error emitting event: {event}"] * lines
