"""Hardware of the hosts on which a job's ranks run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.hosts import hardware
from megacore.cluster.hosts.hardware import hardware_of
from megacore.cluster.hosts.ssh import HostResult
from megacore.config.launch import LaunchConfig
from megacore.errors import HostsSilentError
from megacore.hardware import Gpu, Hardware
from tests.cluster._hosts import Hosts

GPUS = Hardware(
    cores=96,
    memory=2**40,
    gpus=(Gpu("NVIDIA H100", 80 * 2**30, 132), Gpu("NVIDIA H100", 80 * 2**30)),
    cpu_flags=frozenset({"avx2", "avx512f"}),
    native_bf16=True,
)
ANSWER = b"Welcome\n" + json.dumps(GPUS.to_json()).encode() + b"\n"


@pytest.fixture(autouse=True)
def nothing_asked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    hardware._first_answer.cache_clear()
    yield
    hardware._first_answer.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the hosts that are asked; `silent` ones do not answer, `odd` ones answer nonsense.

    After an entry "cut off", no host answers.
    """
    names: list[str] = []

    def answer(ssh: Any, hosts: list[str], words: Any, *, timeout: float) -> list[HostResult]:
        cut_off = "cut off" in names
        names.extend(hosts)
        return [
            HostResult(host, 255, b"", "No route to host")
            if cut_off or host.startswith("silent")
            else HostResult(host, 0, b"Hello\n" if host.startswith("odd") else ANSWER, "")
            for host in hosts
        ]

    monkeypatch.setattr(hardware, "run_on_hosts", answer)
    return names


def launch(tmp_path: Path, *hosts: str, **values: Any) -> LaunchConfig:
    (tmp_path / "hosts").write_text("".join(f"{host} slots=2\n" for host in hosts))
    return LaunchConfig(hostfile=str(tmp_path / "hosts"), nproc_per_node="auto", **values)


def test_first_of_other_hosts_is_asked_once(tmp_path: Path, asked: list[str]) -> None:
    config = launch(tmp_path, "worker-1", "worker-2")
    found = hardware_of(config)
    assert found.host == "worker-1"
    assert found.owner == "host worker-1"
    assert (found.gpus, found.cpu_flags, found.cores) == (GPUS.gpus, GPUS.cpu_flags, 96)
    assert found.resolve_precision("auto") == "bf16"
    assert hardware_of(config) is found
    assert asked == ["worker-1"]


def test_another_host_answers_for_a_silent_one(tmp_path: Path, asked: list[str]) -> None:
    found = hardware_of(launch(tmp_path, "silent-1", "odd-2", "worker-3", "worker-4"))
    assert found.host == "worker-3"
    assert asked == ["silent-1", "odd-2", "worker-3", "worker-4"]


def test_hosts_that_do_not_answer_are_named(tmp_path: Path, asked: list[str]) -> None:
    message = (
        r"GPUs and memory.*\(silent-1: ssh cannot reach it: No route to host; odd-2: its answer is "
        r"b'Hello\\n'\): correct launch\.hostfile or ssh"
    )
    with pytest.raises(HostsSilentError, match=message):
        hardware_of(launch(tmp_path, "silent-1", "odd-2"))


def test_last_answer_counts_if_no_host_answers(
    tmp_path: Path, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = launch(tmp_path, "silent-1", "worker-2")
    told = hardware_of(config)
    asked.append("cut off")
    hardware._first_answer.cache_clear()
    assert hardware_of(config) == told
    assert hardware_of(config).host == "worker-2"
    assert asked[3:] == ["silent-1", "worker-2"], "they are asked once more, and only once"
    (message,) = [record.getMessage() for record in caplog.records]
    assert "(silent-1: ssh cannot reach it: No route to host; worker-2: ssh cannot" in message
    assert "the hardware that worker-2 told on 20" in message
    others = [{"ssh_config": str(tmp_path / "config")}, {"exclude": ["worker-2"]}]
    (tmp_path / "config").touch()
    for values in others:  # another host may have the name there, or has not answered yet
        with pytest.raises(HostsSilentError):
            hardware_of(launch(tmp_path, "silent-1", "worker-2", **values))


def test_newest_answer_of_the_hosts_counts(tmp_path: Path, asked: list[str]) -> None:
    for host in ("worker-1", "worker-3", "worker-2"):
        hardware_of(launch(tmp_path, host))
    asked.append("cut off")
    assert hardware_of(launch(tmp_path, "worker-1", "worker-2", "worker-4")).host == "worker-2"


def test_damaged_answers_are_replaced_with_a_warning(
    tmp_path: Path, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    answers = tmp_path / "host_hardware.json"
    for text, warned in (("{", True), ('{"worker-1": {"ssh_config": null}}', False), ("[]", False)):
        answers.write_text(text)
        with pytest.raises(HostsSilentError):
            hardware_of(launch(tmp_path, "silent-1"))
        hardware._first_answer.cache_clear()
        hardware_of(launch(tmp_path, "worker-1"))
        hardware._first_answer.cache_clear()
        assert ("host_hardware.json cannot be read" in caplog.text) is warned
        caplog.clear()
    asked.append("cut off")
    assert hardware_of(launch(tmp_path, "worker-1")).gpus == GPUS.gpus


@pytest.mark.parametrize(
    "values",
    [{}, {"kind": "slurm", "nproc_per_node": 2}, {"hosts": ("localhost",)}],
    ids=["no hostfile", "slurm", "this machine"],
)
def test_no_host_is_asked_if_this_one_takes_part_or_none_is_known(
    tmp_path: Path, asked: list[str], values: dict[str, Any]
) -> None:
    hosts = values.pop("hosts", ())
    config = launch(tmp_path, *hosts) if hosts else LaunchConfig(**values)
    assert hardware_of(config) == Hardware.detect()
    assert not asked


def test_host_is_asked_through_ssh(tmp_path: Path, hosts: Hosts) -> None:
    found = hardware_of(launch(tmp_path, "gone", "two", ssh_config=str(hosts.ssh_config)))
    here = Hardware.detect()
    assert found.host == "two"
    assert (found.memory, found.gpus, found.cpu_flags) == (here.memory, here.gpus, here.cpu_flags)
