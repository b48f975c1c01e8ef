"""Reservation of a host's devices on a Prefect server, which is replaced by one in memory."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from megacore.config.launch import LaunchConfig
from megacore.errors import LaunchError
from tasks import _devices
from tasks._devices import devices, limit_name, limit_names
from tests._limits import HANG

HERE = LaunchConfig()
OTHER_RUN = {"name": "pretrain-other", "id": str(uuid4())}


def refusal(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://server")
    return httpx.HTTPStatusError(
        "refused", request=request, response=httpx.Response(status, request=request, text="why")
    )


class MemoryServer:
    """The calls of Prefect's client that a reservation makes, on a limit of one slot."""

    def __init__(self) -> None:
        self.names = {limit_name("cpu"), limit_name("cuda")}
        self.leases: dict[UUID, str] = {}
        self.holder: Any = None
        self.running = True
        """State of the other run."""
        self.failures: list[Exception] = []
        """Errors of the next requests for a slot."""
        self.renewals = 0

    def increment_concurrency_slots_with_lease(self, names: list[str], **values: Any) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        (name,) = names
        if name in self.leases.values():
            raise refusal(423)
        lease = uuid4()
        if name in self.names:
            self.leases[lease] = name
        limits = [{"name": name}] if name in self.names else []
        return SimpleNamespace(json=lambda: {"lease_id": str(lease), "limits": limits})

    def release_concurrency_slots_with_lease(self, lease: UUID) -> None:
        self.leases.pop(lease, None)

    def renew_concurrency_lease(self, lease: UUID, lease_duration: float) -> None:
        self.renewals += 1
        if lease not in self.leases:
            raise refusal(410)

    def read_variable_by_name(self, name: str) -> Any:
        return None if self.holder is None else SimpleNamespace(value=self.holder)

    def create_variable(self, variable: Any) -> None:
        self.holder = variable.value

    def read_flow_run(self, identity: UUID) -> Any:
        if str(identity) != OTHER_RUN["id"]:
            raise ObjectNotFound(http_exc=refusal(404))
        return SimpleNamespace(state=SimpleNamespace(is_final=lambda: not self.running))

    def hold(self, kind: str = "cpu") -> None:
        """Let the other run hold the devices."""
        self.leases[uuid4()] = limit_name(kind)
        self.holder = OTHER_RUN


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryServer]:
    memory = MemoryServer()

    @contextmanager
    def client(retries: int = 0) -> Iterator[MemoryServer]:
        yield memory

    monkeypatch.setattr(_devices, "_client", client)
    monkeypatch.setattr(_devices, "POLL", 0.01)
    monkeypatch.setattr(_devices, "RENEWAL", 0.01)
    identity = str(uuid4())
    this_run = SimpleNamespace(get_name=lambda: "pretrain-this", get_id=lambda: identity)
    monkeypatch.setattr(_devices, "flow_run", this_run)
    with temporary_settings({PREFECT_API_URL: "http://server/api"}):
        yield memory


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of the run's log."""
    shown: list[str] = []

    def add(text: str, *values: object) -> None:
        shown.append(text % values)

    log = SimpleNamespace(info=add, warning=add)
    monkeypatch.setattr(_devices, "get_run_logger", lambda: log)
    return shown


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the kind of this host's devices."""

    def set_kind(kind: str) -> None:
        hardware = SimpleNamespace(device_type=kind)
        monkeypatch.setattr(_devices, "Hardware", SimpleNamespace(detect=lambda: hardware))

    set_kind("cpu")
    return set_kind


pytestmark = pytest.mark.usefixtures("kind", "lines")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_devices_are_held_during_the_body_only(server: MemoryServer) -> None:
    with devices(HERE, trains=True):
        assert list(server.leases.values()) == [limit_name("cpu")]
        assert server.holder["name"] == "pretrain-this"
    with pytest.raises(KeyError), devices(HERE, trains=True):
        raise KeyError
    assert server.leases == {}


def test_slot_of_a_killed_attempt_of_the_same_flow_run_is_freed(
    server: MemoryServer, lines: list[str]
) -> None:
    killed = _devices._Reservation("cpu")
    assert killed._acquire()
    killed._record_holder()
    with devices(HERE, trains=True):
        assert killed._lease not in server.leases
    assert lines[0].endswith("a killed attempt of this flow run held limit " + limit_name("cpu"))


def test_waiting_run_names_the_holder_once_and_then_continues(
    server: MemoryServer, lines: list[str]
) -> None:
    server.hold()

    def end_other_run() -> None:
        wait_until(lambda: bool(lines))
        time.sleep(0.05)
        server.leases.clear()

    other = threading.Thread(target=end_other_run)
    other.start()
    with devices(HERE, trains=True):
        assert len(server.leases) == 1
    other.join()
    waiting, continued = lines
    assert f"flow run 'pretrain-other' holds limit {limit_name('cpu')}" in waiting
    assert OTHER_RUN["id"] in waiting
    assert continued.startswith("has the cpu devices")


def test_holder_that_has_ended_is_said_to_have_ended(
    server: MemoryServer, lines: list[str]
) -> None:
    server.hold()
    server.running = False
    end = threading.Thread(target=lambda: (wait_until(lambda: bool(lines)), server.leases.clear()))
    end.start()
    with devices(HERE, trains=True):
        end.join()
    assert "'pretrain-other' has ended without freeing" in lines[0]


def test_interrupted_wait_holds_nothing(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hold()
    before = dict(server.leases)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_devices, "time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(KeyboardInterrupt), devices(HERE, trains=True):
        pytest.fail("it did not wait")
    assert server.leases == before


@pytest.mark.parametrize(("name", "expected"), [("cpu", 0), ("cuda", 1)])
def test_evaluations_share_only_cpus(
    server: MemoryServer, kind: Callable[[str], None], name: str, expected: int
) -> None:
    kind(name)
    with devices(HERE, trains=False):
        assert len(server.leases) == expected


@pytest.mark.parametrize("elsewhere", ["slurm", "kubernetes", "hostfile"])
def test_ranks_that_others_place_take_nothing_here(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch, elsewhere: str
) -> None:
    kind: Any = "torchrun" if elsewhere == "hostfile" else elsewhere
    hosts = {"worker-1": 2} if elsewhere == "hostfile" else {}
    monkeypatch.setattr(_devices, "hosts_of", lambda launch: hosts)
    with devices(HERE.model_copy(update={"kind": kind}), trains=True):
        assert server.leases == {}


def test_nothing_is_taken_without_the_limit_or_a_server(server: MemoryServer) -> None:
    server.names.clear()
    with devices(HERE, trains=True):
        assert server.holder is None
    server.failures.append(AssertionError("a temporary server was asked"))
    with temporary_settings({PREFECT_API_URL: None}), devices(HERE, trains=True):
        assert server.leases == {}


def test_lease_is_renewed_and_taken_again_after_it_expired(server: MemoryServer) -> None:
    with devices(HERE, trains=True):
        wait_until(lambda: server.renewals > 1)
        (first,) = server.leases
        server.leases.clear()
        wait_until(lambda: len(server.leases) == 1 and first not in server.leases)
    assert server.leases == {}


def test_renewal_that_the_release_overtakes_takes_nothing(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def renew_late(lease: UUID, lease_duration: float) -> None:
        begun.set()
        wait_until(lambda: lease not in server.leases)
        raise refusal(410)

    monkeypatch.setattr(server, "renew_concurrency_lease", renew_late)
    with devices(HERE, trains=True):
        assert begun.wait(HANG)
    wait_until(lambda: "device-lease" not in {thread.name for thread in threading.enumerate()})
    assert server.leases == {}


def test_busy_server_is_waited_for_and_a_refusal_is_not(server: MemoryServer) -> None:
    server.failures = [refusal(503), httpx.ConnectError("refused"), refusal(423)]
    with devices(HERE, trains=True):
        assert len(server.leases) == 1
    server.failures = [refusal(422)]
    with pytest.raises(LaunchError, match="422 why"), devices(HERE, trains=True):
        pytest.fail("it was not refused")


def test_limits_have_one_name_for_each_kind_of_devices(kind: Callable[[str], None]) -> None:
    assert limit_names() == [limit_name("cpu")]
    kind("cuda")
    assert limit_names() == [limit_name("cpu"), limit_name("cuda")]
