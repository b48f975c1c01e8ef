"""Reservation of a host's devices on a real Prefect server."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

from megacore.config.launch import LaunchConfig
from tasks import _devices
from tasks._devices import devices, limit_name
from tests._limits import HANG


@pytest.mark.slow
@pytest.mark.usefixtures("workspace")
def test_second_flow_run_waits_for_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_devices.socket, "gethostname", lambda: "Host.of-this-test")
    monkeypatch.setattr(_devices, "POLL", 0.1)
    held, finished = threading.Event(), threading.Event()
    monkeypatch.setattr(_devices, "RENEWAL", 0.2)
    name = limit_name(_devices.Hardware.detect().device_type)
    assert name.startswith("devices-host-of-this-test-")
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))

    def active_slots() -> int:
        with get_client(sync_client=True) as client:
            return client.read_global_concurrency_limit_by_name(name).active_slots

    @flow(name="holder", flow_run_name="first")
    def hold() -> None:
        with devices(LaunchConfig(), trains=True):
            held.set()
            assert finished.wait(HANG)

    @flow(name="waiter", flow_run_name="second")
    def wait() -> int:
        with devices(LaunchConfig(), trains=True):
            assert finished.is_set()
            return active_slots()

    def end_when_waited_for() -> None:
        deadline = time.monotonic() + HANG
        while "waits for the" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # the first run renews its lease
        finished.set()

    from prefect.context import SettingsContext

    settings: Any = SettingsContext.get()

    def hold_in_thread() -> None:
        with settings.model_copy():
            hold()

    first, watcher = (
        threading.Thread(target=hold_in_thread),
        threading.Thread(target=end_when_waited_for),
    )
    first.start()
    assert held.wait(HANG)
    watcher.start()
    assert wait() == 1
    watcher.join()
    first.join()
    assert "flow run 'first' holds limit" in caplog.text
    assert active_slots() == 0
