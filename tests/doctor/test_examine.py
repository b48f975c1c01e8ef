"""The doctor on three network namespaces, some of them broken, and its parts without hosts."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.hosts.network import free_ports
from megacore.cluster.hosts.ssh import HostResult, Ssh
from megacore.config.launch import LaunchConfig
from megacore.doctor import peers
from megacore.doctor.examine import (
    ALL_PAIRS,
    RANDOM_ROUNDS,
    _requests,
    contact_of,
    environment_of,
    measure_pairs,
    pairs_of,
    rounds_of,
    try_ports,
)
from megacore.doctor.findings import Facts
from megacore.doctor.network import ports
from megacore.doctor.protocol import NOT_BEGUN
from megacore.doctor.subject import RunData, Subject
from tests._limits import HANG
from tests.doctor._made import facts, gpu_host, probe
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
    result = rig.run(
        "a", [*command, "--workspace", str(workspace), "--json", *options], timeout=HANG
    )
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


SECONDS = {"latency": 1e-4, "mb_1": 1e-3, "mb_64": 0.05}


def reply(host: str, *lines: dict[str, Any], code: int = 0, errors: str = "") -> HostResult:
    return HostResult(
        host, code, b"".join(json.dumps(line).encode() + b"\n" for line in lines), errors
    )


def record_requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the requests of each step by host; the hosts answer nothing."""
    requests: list[dict[str, Any]] = []

    def run(
        ssh: Ssh, hosts: list[str], words: list[str], *, stdin: dict[str, bytes], timeout: float
    ) -> list[HostResult]:
        requests.append({host: json.loads(text) for host, text in stdin.items()})
        return [HostResult(host, 1, b"", "") for host in hosts]

    monkeypatch.setattr("megacore.doctor.examine.run_on_hosts", run)
    return requests


def all_reached(*hosts: Any) -> Facts:
    """Return facts in which all hosts reached each other."""
    base = facts(*hosts)
    return Facts(
        **{
            **vars(base),
            "reach": {host: {"value": {"listens": None, "reached": {}}} for host in base.hosts},
        }
    )


def test_pair_has_the_times_of_its_first_host() -> None:
    results = {
        "a": reply("a", {"check": "0", "value": SECONDS, "peer": "b", "rank": 0}),
        "b": reply("b", {"check": "0", "value": SECONDS | {"mb_64": 9.0}, "peer": "a", "rank": 1}),
    }
    (pair,) = pairs_of(results, [("a", "b")], facts(probe("a"), probe("b")))
    assert (pair.latency, pair.mb_64, pair.problem) == (1e-4, 0.05, None)
    assert pair.bandwidth() == pytest.approx(1.28)


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        ((reply("a"), reply("b")), "it ended without a message"),
        (
            (reply("a", code=1, errors="Traceback: no"), reply("b")),
            "the command ended with code 1: Traceback: no",
        ),
        (
            (reply("a", {"check": "store", "problem": "address in use"}), reply("b")),
            "address in use",
        ),
        (
            (reply("a"), reply("b", {"check": "0", "problem": "refused\nby peer", "peer": "a"})),
            "refused by peer",
        ),
        ((HostResult("a", 0, b'a warning\n{"che', ""), reply("b")), "it ended without a message"),
    ],
    ids=["silent", "died", "store", "other side", "cut off"],
)
def test_pair_that_was_not_measured_has_a_problem(
    results: tuple[HostResult, HostResult], problem: str
) -> None:
    hosts = facts(probe("a"), probe("b"))
    (pair,) = pairs_of({result.host: result for result in results}, [("a", "b")], hosts)
    assert (pair.problem, pair.bandwidth()) == (problem, None)


def test_pairs_meet_at_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = record_requests(monkeypatch)
    ends = time.monotonic() + 50
    measured = measure_pairs(
        all_reached(probe("a"), probe("b", network={"address": "10.0.0.2"})),
        Ssh(),
        ends,
        {"X": "1"},
    )
    a, b = requests[0]["a"], requests[0]["b"]
    assert a["rounds"] == [
        {"peer": "b", "address": "10.0.0.9", "port": 4002, "rank": 0, "backend": "gloo"}
    ]
    assert b["rounds"] == [a["rounds"][0] | {"peer": "a", "rank": 1}]
    assert (a["environment"], a["interface"], a["local"]) == ({"X": "1"}, "eth0", False)
    assert [pair.problem for pair in measured.pairs] == [
        "the command ended with code 1: no message"
    ]


def test_gpu_hosts_use_nccl_and_measure_two_local_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = record_requests(monkeypatch)
    hosts = all_reached(gpu_host("a"), gpu_host("b"), probe("c"))
    hosts = Facts(**{**vars(hosts), "hosts": {"a": 8, "b": 8, "c": 1}})
    measured = measure_pairs(hosts, Ssh(), time.monotonic() + 50, {})
    backends = {(pair.first, pair.second): pair.backend for pair in measured.pairs}
    assert backends == {
        ("a", "a"): "nccl",
        ("b", "b"): "nccl",
        ("a", "b"): "nccl",
        ("a", "c"): "gloo",
        ("b", "c"): "gloo",
    }
    assert [requests[0][host]["local"] for host in "abc"] == [True, True, False]


def test_pairs_without_enough_time_are_reported_as_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = record_requests(monkeypatch)
    measured = measure_pairs(all_reached(probe("a"), probe("b")), Ssh(), time.monotonic() + 5, {})
    assert requests == []
    assert [pair.problem for pair in measured.pairs] == [NOT_BEGUN]


def test_hosts_without_torch_are_left_out_of_the_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = record_requests(monkeypatch)
    hosts = all_reached(probe("a"), probe("b"), probe("c", torch=None))
    measured = measure_pairs(hosts, Ssh(), time.monotonic() + 50, {})
    assert set(requests[0]) == {"a", "b"}
    assert [(pair.first, pair.second) for pair in measured.pairs] == [("a", "b")]


def test_ports_without_enough_time_are_a_warning_for_all_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = record_requests(monkeypatch)
    tried = try_ports(facts(probe("a"), probe("b")), Ssh(), time.monotonic() + 5)
    assert requests == []
    assert {host: answer["problem"] for host, answer in tried.reach.items()} == {
        "a": NOT_BEGUN,
        "b": NOT_BEGUN,
    }
    finding = ports(tried)
    assert finding is not None
    assert (finding.verdict, finding.hosts) == ("warning", ("a", "b"))


def test_ports_have_a_shorter_time_limit_than_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that gets no answer must still report the hosts that it reached."""
    requests = record_requests(monkeypatch)
    try_ports(facts(probe("a"), probe("b")), Ssh(), time.monotonic() + 9)
    assert 3.0 < requests[0]["a"]["seconds"] <= 5.0


def test_hosts_connect_to_the_first_and_the_next_host(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = record_requests(monkeypatch)
    names = [f"h{number:02d}" for number in range(20)]
    tried = try_ports(facts(*map(probe, names)), Ssh(), time.monotonic() + 50)
    assert set(requests[0]["h05"]["targets"]) == {"h00", "h06"}
    assert set(requests[0]["h00"]["targets"]) == {"h01"}
    assert set(requests[0]["h19"]["targets"]) == {"h00"}
    assert (requests[0]["h00"]["expected"], requests[0]["h05"]["expected"]) == (19, 1)
    assert tried.master == "h00"
    assert set(tried.reach) == set(names)


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        (None, ["10.0.0.1", 4001]),
        ("10.0.0.9:29500", ["10.0.0.9", 29500]),
        ("head", ["head", 4001]),
        ("[fd00::1]:29500", ["fd00::1", 29500]),
        ("[fd00::1]", ["fd00::1", 4001]),
    ],
)
def test_hosts_connect_to_the_rendezvous_endpoint_of_the_first(
    endpoint: str | None, target: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, launch = record_requests(monkeypatch), LaunchConfig(rdzv_endpoint=endpoint)
    hosts = facts(probe("a"), probe("b"), launch=launch)
    hosts.probes["a"].values["network"]["address"] = "10.0.0.1"
    try_ports(hosts, Ssh(), time.monotonic() + 50)
    assert requests[0]["b"]["targets"]["a"] == target
    assert requests[0]["a"]["port"] == target[1]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_ports_are_reached_at_an_ipv6_address() -> None:
    lines: dict[str, Any] = {}
    (port,) = free_ports(1)
    answers = {
        "a": {"host": "a", "port": port, "expected": 1, "targets": {}, "seconds": HANG},
        "b": {
            "host": "b",
            "port": 0,
            "expected": 0,
            "targets": {"a": ["::1", port]},
            "seconds": HANG,
        },
    }
    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "say", lambda line: lines.update({str(line["value"]["port"]): line}))
        list(pool.map(peers.connect_ports, answers.values()))
    assert lines["0"]["value"]["reached"]["a"]["problem"] is None


def test_ports_are_tried_by_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        request = {
            "host": "a",
            "port": taken,
            "expected": 1,
            "targets": {"b": ["127.0.0.1", taken]},
            "seconds": 5,
        }
        result = subprocess.run(
            [sys.executable, "-m", "megacore.doctor.peers", "ports"],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=HANG,
            check=True,
        )
    value = json.loads(result.stdout)["value"]
    assert value["listens"] == "Address already in use"
    assert value["reached"]["b"]["problem"] is None


def names(count: int) -> list[str]:
    return [f"h{number:02d}" for number in range(count)]


@pytest.mark.parametrize(
    "count", [0, 1, 2, 3, 4, 5, 8, ALL_PAIRS - 1, ALL_PAIRS, ALL_PAIRS + 1, 24, 65]
)
def test_no_host_is_in_two_pairs_of_a_round(count: int) -> None:
    rounds = rounds_of(names(count))
    for pairs in rounds:
        assert pairs
        assert max(Counter(host for pair in pairs for host in pair).values()) == 1
    all_pairs = [pair for pairs in rounds for pair in pairs]
    assert len(set(all_pairs)) == len(all_pairs)
    # A pair meets at its first host.
    assert all(first < second for first, second in all_pairs)


@pytest.mark.parametrize("count", [2, 3, 4, 7, ALL_PAIRS])
def test_few_hosts_all_meet_in_the_fewest_rounds(count: int) -> None:
    rounds = rounds_of(names(count))
    assert sum(map(len, rounds)) == count * (count - 1) // 2
    assert len(rounds) == (count if count % 2 else count - 1)


@pytest.mark.parametrize("count", [ALL_PAIRS + 1, 40, 101])
def test_many_hosts_meet_their_neighbours_and_random_others(count: int) -> None:
    rounds = rounds_of(names(count))
    assert len(rounds) <= 3 + RANDOM_ROUNDS
    met = Counter(host for pairs in rounds for pair in pairs for host in pair)
    assert set(met) == set(names(count))
    assert min(met.values()) >= 3
    all_pairs = {pair for pairs in rounds for pair in pairs}
    assert {
        ("h00", "h01"),
        (f"h{count - 2:02d}", f"h{count - 1:02d}"),
        ("h00", f"h{count - 1:02d}"),
    } <= all_pairs
