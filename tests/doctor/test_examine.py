"""The doctor on three network namespaces, some of them broken, and its parts without hosts."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.hosts.ssh import HostResult
from megacore.config.launch import LaunchConfig
from megacore.doctor.between import endpoint_of
from megacore.doctor.examine import _requests, contact_of, environment_of
from megacore.doctor.subject import RunData, Subject
from tests.hosts._rig import Rig, hosts, require_rig

MEGACORE = [sys.executable, "-c", "from megacore.cli import main; main()"]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Provide the hosts a, b and c."""
    require_rig()
    with hosts(tmp_path_factory.mktemp("doctor"), tuple("abc")) as rig:
        yield rig


def doctor(rig: Rig, workspace: Path, *options: str) -> "tuple[int, dict[str, Any]]":
    """Run the doctor on host a and return its exit code and its JSON report."""
    if "--hostfile" not in options:
        options = (*options, "--hostfile", str(rig.hostfile()), "--ssh-config", str(rig.ssh_config))
    command = [*MEGACORE, "doctor"]
    result = rig.run("a", [*command, "--workspace", str(workspace), "--json", *options], timeout=80)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def check(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in report["checks"] if item["check"] == name)


def limit_bandwidth(rig: Rig, host: str) -> None:
    """Limit the outgoing packets of a host to 500 Mbit/s."""
    tc_command = [
        "tc",
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        "500mbit",
        "burst",
        "256kb",
        "latency",
        "50ms",
    ]
    result = subprocess.run(
        ["ip", "netns", "exec", rig.hosts[host].namespace, *tc_command],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        pytest.skip(f"links cannot be slowed down here: {result.stderr.strip()}")


@pytest.mark.slow
def test_slow_link_is_a_warning_and_other_checks_pass(rig: Rig) -> None:
    if shutil.which("tc") is None:
        pytest.skip("links are slowed down by tc, which is not installed")
    limit_bandwidth(rig, "c")
    try:
        code, report = doctor(rig, rig.shared / "workspace")
    finally:
        command = [
            "ip",
            "netns",
            "exec",
            rig.hosts["c"].namespace,
            "tc",
            "qdisc",
            "del",
            "dev",
            "eth0",
            "root",
        ]
        subprocess.run(command, check=True)
    assert code == 0, [item for item in report["checks"] if item["verdict"] == "error"]
    bandwidth = check(report, "bandwidth")
    assert (bandwidth["verdict"], bandwidth["hosts"]) == ("warning", ["c"])
    assert "the link of c is slow" in bandwidth["advice"]
    assert report["mode"] == "full"
    assert [pair["hosts"] for pair in report["pairs"]] == [["b", "c"], ["a", "c"], ["a", "b"]]
    assert all(pair["latency_us"] > 0 and pair["mb_1_ms"] > 0 for pair in report["pairs"])
    rates = {tuple(pair["hosts"]): pair["mb_64_gb_s"] for pair in report["pairs"]}
    assert rates["a", "c"] < 0.065 < rates["a", "b"]
    for name in ("ssh", "packages", "clocks", "interface", "ports", "workspace", "disk", "kernels"):
        assert check(report, name)["verdict"] == "ok", check(report, name)
    # Debian's installer writes 127.0.1.1 to /etc/hosts.
    assert check(report, "names")["verdict"] == "warning"
    assert report["seconds"] < 60
    assert list((rig.shared / "workspace").iterdir()) == []  # the proof is removed


def test_broken_hosts_are_named_and_other_hosts_are_checked(rig: Rig, tmp_path: Path) -> None:
    workspace = rig.shared / "mounted" / "workspace"
    workspace.mkdir(parents=True)
    break_host(rig, "b", workspace, tmp_path)
    hostfile, config = tmp_path / "hosts", tmp_path / "ssh_config"
    hostfile.write_text("a slots=1\nb slots=1\ngone slots=1\n")
    config.write_text(f"Host gone\n  HostName 127.0.0.1\n  Port 9\n\n{rig.ssh_config.read_text()}")
    code, report = doctor(
        rig, workspace, "--quick", "--hostfile", str(hostfile), "--ssh-config", str(config)
    )
    assert (code, report["verdict"], report["mode"]) == (11, "error", "quick")
    errors = {
        item["check"]: item["hosts"] for item in report["checks"] if item["verdict"] == "error"
    }
    assert errors == {"ssh": ["gone"], "packages": ["b"], "workspace": ["b"]}
    assert report["checks"][0]["verdict"] == "error"  # problems come first
    version = metadata.version("numpy")
    assert f"numpy is 0.0.7 on b and {version} on a" in check(report, "packages")["advice"]
    assert f"{workspace} does not exist on b" in check(report, "workspace")["advice"]
    clock = check(report, "clocks")
    assert (clock["verdict"], clock["hosts"]) == ("warning", ["b"])
    assert "behind this machine's" in clock["advice"]
    assert set(check(report, "ports")["found"]) == {"a", "b"}
    assert report["pairs"] == []


def break_host(rig: Rig, host: str, workspace: Path, directory: Path) -> None:
    """Give a host a different numpy version, a wrong clock and no workspace."""
    metadata_file = next(
        file for file in metadata.files("numpy") or () if file.name == "METADATA"
    ).locate()
    lines = Path(str(metadata_file)).read_text(encoding="utf-8").splitlines()
    changed_file = directory / "METADATA"
    changed_file.write_text(
        "\n".join("Version: 0.0.7" if line.startswith("Version:") else line for line in lines)
    )
    clock = directory / "date"
    clock.write_text("#!/bin/sh\necho 1000000000.5\n")
    clock.chmod(0o755)
    date = shutil.which("date")
    assert date is not None
    for command in (
        ["mount", "--bind", str(changed_file), str(metadata_file)],
        ["mount", "--bind", str(clock), date],
        ["mount", "-t", "tmpfs", "none", str(workspace.parent)],
    ):
        result = rig.run(host, command)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("output", "offset"),
    [(b"1000.75\n", 0.25), (b"999.0\n", -1.5), (b"Sun Nov 22\n", None)],
    ids=["ahead", "behind", "text"],
)
def test_clock_is_compared_with_the_middle_of_the_round_trip(
    output: bytes, offset: float | None
) -> None:
    contact = contact_of(HostResult("b", 0, output, ""), 1000.0, 1.0)
    assert (contact.problem, contact.offset) == (None, offset)
    assert contact.uncertainty == (0.0 if offset is None else 0.5)


def test_host_that_does_not_answer_has_a_problem() -> None:
    contact = contact_of(HostResult("b", 255, b"", "Permission denied (publickey)."), 1000.0, 1.0)
    assert contact.problem == "ssh cannot reach it: Permission denied (publickey)."


def test_probes_get_the_environment_variables_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PASSWORD_OF_MINE", "x")
    (tmp_path / "env").write_text("GLOO_SOCKET_IFNAME=eth7\n")
    launch = LaunchConfig(forward_env=("NCCL_*",), env_file=str(tmp_path / "env"))
    variables = environment_of(Subject({}, tmp_path, launch))
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["GLOO_SOCKET_IFNAME"] == "eth7"
    assert "PASSWORD_OF_MINE" not in variables


def test_slow_checks_are_requested_last() -> None:
    """A slow import of torch must not delay the checks of network and workspace."""
    data = RunData(("t",), 10, "/i")
    subject = Subject({"a": 1, "b": 1}, Path("/w"), LaunchConfig(hostfile="h"), data=data)
    for request in _requests(subject, ["a", "b"], None, {}, {}, full=True).values():
        checks = list(request.checks)
        assert len(set(checks)) == len(checks)
        assert {"packages", "limits", "memory", "disk", "gpus"} < set(checks)
        assert checks[-6:] == ["torch", "toolchain", "speed", "storage", "operators", "tokens"]
        assert max(map(checks.index, ("workspace", "network", "index"))) < checks.index("gpus")


def test_endpoint_is_split_into_host_and_port() -> None:
    assert endpoint_of(None) == (None, None)
    assert endpoint_of("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert endpoint_of("head") == ("head", None)
