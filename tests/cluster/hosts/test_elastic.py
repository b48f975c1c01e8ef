"""Choice of the hosts of one attempt of an elastic run."""

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.hosts import elastic
from megacore.cluster.hosts.elastic import choose_hosts
from megacore.cluster.hosts.ssh import HostResult
from megacore.errors import HostLostError, LaunchError, ParallelLayoutError
from tests.cluster._hosts import Hosts
from tests.train import _runs


def choose(
    tmp_path: Path, nnodes: Any, slots: tuple[int, ...] = (1, 1, 1, 1), attempt: int = 1
) -> dict[str, int]:
    lines = [f"worker-{number} slots={count}\n" for number, count in enumerate(slots, start=1)]
    (tmp_path / "hosts").write_text("".join(lines))
    launch = {"hostfile": str(tmp_path / "hosts"), "nnodes": nnodes, "nproc_per_node": "auto"}
    return choose_hosts(_runs.config(launch=launch), attempt=attempt)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Provide a set of hosts that do not answer."""
    silent_hosts: set[str] = set()

    def answer(ssh: Any, hosts: list[str], words: Any, *, timeout: float) -> list[HostResult]:
        return [
            HostResult(host, 255 if host in silent_hosts else 0, b"", "No route to host")
            for host in hosts
        ]

    monkeypatch.setattr(elastic, "run_on_hosts", answer)
    return silent_hosts


def test_first_hosts_that_answer_are_chosen(
    tmp_path: Path, silent: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(tmp_path, "1:2") == {"worker-1": 1, "worker-2": 1}
    silent.add("worker-1")
    with caplog.at_level(logging.INFO):
        assert choose(tmp_path, "1:2") == {"worker-2": 1, "worker-3": 1}
    assert (
        "hosts of this attempt: worker-2 (1 rank), worker-3 (1 rank); not needed: worker-4; "
        "cannot take part: "
    ) in (caplog.text)
    assert "worker-1: ssh cannot reach it: No route to host" in caplog.text


def test_host_that_lost_a_gpu_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = {"worker-1": 2, "worker-2": 1, "worker-3": 2, "worker-4": 0}

    def answer(ssh: Any, hosts: list[str], words: Any, *, timeout: float) -> list[HostResult]:
        assert words[1:] == ["-m", "megacore.hardware"]
        lines = [json.dumps({"gpus": [{"name": "H100"}] * gpus[host]}) for host in hosts]
        return [
            HostResult(host, 0, f"welcome\n{line}\n".encode(), "")
            for host, line in zip(hosts, lines, strict=True)
        ]

    monkeypatch.setattr(elastic, "run_on_hosts", answer)
    slots = (2, 2, 2, 2)
    with caplog.at_level(logging.WARNING):
        assert choose(tmp_path, "1:4", slots) == {"worker-1": 2, "worker-3": 2}
    assert (
        "cannot take part: worker-2: 1 of the GPUs of its 2 slots can be used; worker-4: 0 of the "
        "GPUs of its 2 slots can be used"
    ) in caplog.text
    gpus.update(dict.fromkeys(gpus, 0))  # hosts that compute on CPUs
    assert choose(tmp_path, "1:4", slots) == {"worker-1": 2, "worker-2": 2}  # they divide the batch


def test_this_host_is_left_out_too_if_it_lost_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = socket.gethostname()
    (tmp_path / "hosts").write_text(f"{here} slots=2\nworker-1 slots=2\n")
    launch = {"hostfile": str(tmp_path / "hosts"), "nnodes": "1:2", "nproc_per_node": "auto"}
    gpus = {here: 1, "worker-1": 2}

    def answer(ssh: Any, hosts: list[str], words: Any, *, timeout: float) -> list[HostResult]:
        lines = [json.dumps({"gpus": [{"name": "H100"}] * gpus[host]}) for host in hosts]
        return [
            HostResult(host, 0, line.encode(), "") for host, line in zip(hosts, lines, strict=True)
        ]

    monkeypatch.setattr(elastic, "run_on_hosts", answer)
    assert choose_hosts(_runs.config(launch=launch)) == {"worker-1": 2}


def test_host_without_a_gpu_of_the_selected_slots_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = socket.gethostname()
    (tmp_path / "hosts").write_text(f"{here} slots=3\nworker-1 slots=3\n")
    launch = {
        "hostfile": str(tmp_path / "hosts"),
        "include": (f"{here}:1,2", "worker-1:1,2"),
        "nnodes": "1:2",
        "nproc_per_node": "auto",
    }

    def answer(ssh: Any, hosts: list[str], words: Any, *, timeout: float) -> list[HostResult]:
        line = json.dumps({"gpus": [{"name": "H100"}] * 2})  # the third one is lost
        return [HostResult(host, 0, line.encode(), "") for host in hosts]

    monkeypatch.setattr(elastic, "run_on_hosts", answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")  # here it is not, and two are visible
    assert choose_hosts(_runs.config(launch=launch)) == {here: 2}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(LaunchError, match="worker-1: 1 of the GPUs of its 2 slots can be used"):
        choose_hosts(_runs.config(launch=launch))


def test_number_of_chosen_hosts_divides_the_batch(tmp_path: Path, silent: set[str]) -> None:
    # A batch of 8 in micro batches of 2 is not divisible among 3 ranks.
    assert choose(tmp_path, "1:4") == {f"worker-{number}": 1 for number in range(1, 5)}
    silent.add("worker-3")
    assert choose(tmp_path, "1:4") == {"worker-1": 1, "worker-2": 1}
    with pytest.raises(ParallelLayoutError, match="micro_batch_size 2 x 3 data-parallel ranks = 6"):
        choose(tmp_path, "3:4")


def test_too_few_hosts_are_refused_and_retryable_after_the_first_attempt(
    tmp_path: Path, silent: set[str]
) -> None:
    silent |= {"worker-1", "worker-2", "worker-4"}
    message = (
        r"launch\.nnodes is 2:4 and 1 of 4 hosts can take part \(worker-1: ssh cannot reach it: No "
        r"route to host; "
    )
    with pytest.raises(LaunchError, match=message) as caught:
        choose(tmp_path, "2:4")
    assert not caught.value.retryable
    with pytest.raises(HostLostError, match=message):  # an earlier attempt had them
        choose(tmp_path, "2:4", attempt=2)


def test_fixed_number_of_hosts_is_chosen_without_probing(tmp_path: Path, silent: set[str]) -> None:
    silent.add("worker-1")
    assert choose(tmp_path, 2) == {"worker-1": 1, "worker-2": 1}
    assert choose_hosts(_runs.config()) == {}


def test_real_hosts_are_probed_through_ssh(hosts: Hosts) -> None:
    launch = {
        "hostfile": str(hosts.hostfile("gone", "one", "two")),
        "nnodes": "1:3",
        "nproc_per_node": "auto",
    }
    config = _runs.config(launch={**launch, "ssh_config": str(hosts.ssh_config)})
    assert choose_hosts(config) == {"one": 1, "two": 1}
