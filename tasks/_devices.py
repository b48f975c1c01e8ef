"""Reservation of this host's devices: a global concurrency limit of Prefect for each kind."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any
from uuid import UUID

from httpx import HTTPStatusError, TransportError
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import VariableCreate, VariableUpdate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.urls import url_for

from megacore.config.hostfile import hosts_of
from megacore.config.launch import LaunchConfig
from megacore.errors import LaunchError
from megacore.hardware import Hardware
from megacore.redact import page_address

LEASE = 60.0
"""Seconds for which the server keeps a reservation that is not renewed: Prefect's minimum."""
RENEWAL = 15.0
"""Seconds between renewals."""
POLL = 2.0
"""Seconds between two attempts to reserve devices that another run holds."""
_TAKEN = 423
"""Status of Prefect's answer when a limit has no free slot."""
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a server that may take the same request later."""


def limit_name(kind: str) -> str:
    """Return the name of this host's limit for a kind of devices, such as "cuda"."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    return f"devices-{host}-{kind}"


def limit_names() -> list[str]:
    """Return the names of the limits of this host, one for each kind of its devices."""
    return [limit_name(kind) for kind in sorted({"cpu", Hardware.detect().device_type})]


@contextmanager
def devices(launch: LaunchConfig, *, trains: bool) -> Iterator[None]:
    """Reserve this host's devices for the ranks that the body starts, waiting until they are free.

    Nothing is reserved without the limit on the server, and for ranks that a hostfile or a
    scheduler places. Jobs that only evaluate share CPUs with a training, but not accelerators.

    Raises LaunchError if the server refuses the reservation.
    """
    kind = Hardware.detect().device_type
    elsewhere = launch.has_scheduler or bool(hosts_of(launch))
    if elsewhere or not PREFECT_API_URL.value() or (kind == "cpu" and not trains):
        yield
        return
    reservation = _Reservation(kind)
    if not reservation.take():
        yield
        return
    try:
        yield
    finally:
        reservation.release()


class _Reservation:
    """One slot of a limit, held by a lease that a thread renews."""

    def __init__(self, kind: str) -> None:
        self.kind, self.name = kind, limit_name(kind)
        self._lease: UUID | None = None
        self._ended = threading.Event()
        self._renewer = threading.Thread(
            target=copy_context().run, args=(self._renew,), name="device-lease", daemon=True
        )
        self._holder = {"name": flow_run.get_name(), "id": flow_run.get_id()}
        self._log = get_run_logger()

    def take(self) -> bool:
        """Wait for the slot and take it; return False if the server has no such limit."""
        shown = None
        while not self._acquire():
            if self._ended.is_set():
                return False
            reason = self._reason() or shown or "the Prefect server does not answer"
            if reason != shown:
                self._log.info(
                    "waits for the %s devices of %s: %s", self.kind, socket.gethostname(), reason
                )
                shown = reason
            time.sleep(POLL)
        if shown is not None:
            self._log.info("has the %s devices of %s now", self.kind, socket.gethostname())
        self._record_holder()
        self._renewer.start()
        return True

    def release(self) -> None:
        """Free the slot; a server that does not answer frees it when the lease expires."""
        self._ended.set()
        self._renewer.join(timeout=POLL)
        assert self._lease is not None
        try:
            with _client(retries=2) as client:
                client.release_concurrency_slots_with_lease(self._lease)
        except (TransportError, HTTPStatusError) as error:
            self._log.warning(
                "limit %s was not freed (%s): the server frees it within %.0f s",
                self.name,
                error,
                LEASE + RENEWAL,
            )

    def _acquire(self) -> bool:
        """Return True if the slot was free and is taken now."""
        try:
            with _client() as client:
                answer = client.increment_concurrency_slots_with_lease(
                    names=[self.name], slots=1, mode="concurrency", lease_duration=LEASE
                ).json()
        except TransportError:
            return False  # the server may come back
        except HTTPStatusError as error:
            if error.response.status_code in {_TAKEN, *_BUSY}:
                return False
            raise LaunchError(
                f"the Prefect server refuses to reserve {self.name}: {error.response.status_code} "
                f"{error.response.text[:200]}: correct or delete the limit (`prefect gcl delete "
                f"{self.name}`)"
            ) from error
        if not answer["limits"]:
            self._ended.set()
            return False
        self._lease = UUID(answer["lease_id"])
        return True

    def _reason(self) -> str | None:
        """Return in one clause who holds the slot; None if the server does not answer.

        A slot of this flow run is freed: an attempt that was killed has not done so.
        """
        try:
            with _client() as client:
                record = client.read_variable_by_name(self.name)
                holder: Any = record.value if record else None
                if not isinstance(holder, dict):
                    return f"another run holds limit {self.name}"
                if holder["id"] == self._holder["id"]:
                    client.release_concurrency_slots_with_lease(UUID(holder["lease"]))
                    return f"a killed attempt of this flow run held limit {self.name}"
                try:
                    state = client.read_flow_run(UUID(holder["id"])).state
                except ObjectNotFound:
                    state = None
        except (TransportError, HTTPStatusError, ValueError, KeyError):
            return None
        if state is None or state.is_final():
            return (
                f"flow run {holder.get('name')!r} has ended without freeing limit {self.name}, "
                f"which the server does within {LEASE + RENEWAL:.0f} s"
            )
        page = url_for("flow-run", obj_id=holder["id"])
        return f"flow run {holder.get('name')!r} holds limit {self.name}" + (
            f" ({page_address(page)})" if page else ""
        )

    def _record_holder(self) -> None:
        """Write this flow run's name into the variable that waiting runs read."""
        value = {**self._holder, "lease": str(self._lease)}
        try:
            with _client() as client:
                try:
                    client.create_variable(
                        VariableCreate(name=self.name, value=value, tags=["megacore"])
                    )
                except ObjectAlreadyExists:
                    client.update_variable(VariableUpdate(name=self.name, value=value))
        except (TransportError, HTTPStatusError) as error:
            self._log.warning("waiting runs do not see this run's name: %s", error)

    def _renew(self) -> None:
        """Renew the lease until the release; reserve again what a stopped server has freed."""
        while not self._ended.wait(RENEWAL):
            assert self._lease is not None
            try:
                with _client() as client:
                    client.renew_concurrency_lease(self._lease, lease_duration=LEASE)
            except HTTPStatusError as error:
                expired = error.response.status_code == 410  # while the server was stopped
                if expired and not self._ended.is_set():
                    self._reserve_again()
            except Exception:  # the next renewal may succeed, and the training goes on without
                continue

    def _reserve_again(self) -> None:
        try:
            if self._acquire():
                self._record_holder()
        except LaunchError as error:
            self._log.warning("%s", error)


@contextmanager
def _client(retries: int = 0) -> Iterator[SyncPrefectClient]:
    """Connect to the server, without Prefect's retries of up to a minute for each call."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: retries}),
        get_client(sync_client=True) as client,
    ):
        yield client
