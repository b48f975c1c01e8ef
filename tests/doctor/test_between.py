"""What hosts are told to try with each other, and what is made of their answers."""

import json
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest

from megacore.cluster.hosts.ssh import HostResult, Ssh
from megacore.doctor import between
from megacore.doctor.between import (
    ALL_PAIRS,
    RANDOM_ROUNDS,
    measure_pairs,
    pairs_of,
    rounds_of,
    try_ports,
)
from megacore.doctor.facts import Facts
from megacore.doctor.network import ports
from megacore.doctor.protocol import NOT_BEGUN
from tests.doctor._made import facts, gpu_host, probe

SECONDS = {"latency": 1e-4, "mb_1": 1e-3, "mb_64": 0.05}


def said(host: str, *lines: dict[str, Any], code: int = 0, errors: str = "") -> HostResult:
    return HostResult(
        host, code, b"".join(json.dumps(line).encode() + b"\n" for line in lines), errors
    )


def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What hosts are told, by host, in each step; they say nothing."""
    parts: list[dict[str, Any]] = []

    def run(
        ssh: Ssh, hosts: list[str], words: list[str], *, stdin: dict[str, bytes], timeout: float
    ) -> list[HostResult]:
        parts.append({host: json.loads(text) for host, text in stdin.items()})
        return [HostResult(host, 1, b"", "") for host in hosts]

    monkeypatch.setattr(between, "run_on_hosts", run)
    return parts


def reached(*hosts: Any) -> Facts:
    found = facts(*hosts)
    return Facts(
        **{
            **vars(found),
            "reach": {host: {"value": {"listens": None, "reached": {}}} for host in found.hosts},
        }
    )


def test_a_pair_is_what_its_first_host_says() -> None:
    results = {
        "a": said("a", {"check": "0", "value": SECONDS, "peer": "b", "rank": 0}),
        "b": said("b", {"check": "0", "value": SECONDS | {"mb_64": 9.0}, "peer": "a", "rank": 1}),
    }
    (pair,) = pairs_of(results, [("a", "b")], facts(probe("a"), probe("b")))
    assert (pair.latency, pair.mb_64, pair.problem) == (1e-4, 0.05, None)
    assert pair.bandwidth() == pytest.approx(1.28)


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        ((said("a"), said("b")), "it ended without a word"),
        (
            (said("a", code=1, errors="Traceback: no"), said("b")),
            "the command ended with code 1: Traceback: no",
        ),
        ((said("a", {"check": "store", "problem": "address in use"}), said("b")), "address in use"),
        (
            (said("a"), said("b", {"check": "0", "problem": "refused\nby peer", "peer": "a"})),
            "refused by peer",
        ),
        ((HostResult("a", 0, b'a warning\n{"che', ""), said("b")), "it ended without a word"),
    ],
    ids=["silent", "died", "store", "other side", "cut off"],
)
def test_a_pair_that_was_not_measured_says_why(
    results: tuple[HostResult, HostResult], problem: str
) -> None:
    hosts = facts(probe("a"), probe("b"))
    (pair,) = pairs_of({result.host: result for result in results}, [("a", "b")], hosts)
    assert (pair.problem, pair.bandwidth()) == (problem, None)


def test_pairs_meet_at_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = asked(monkeypatch)
    ends = time.monotonic() + 50
    found = measure_pairs(
        reached(probe("a"), probe("b", network={"address": "10.0.0.2"})), Ssh(), ends, {"X": "1"}
    )
    a, b = parts[0]["a"], parts[0]["b"]
    assert a["rounds"] == [
        {"peer": "b", "address": "10.0.0.9", "port": 4002, "rank": 0, "backend": "gloo"}
    ]
    assert b["rounds"] == [a["rounds"][0] | {"peer": "a", "rank": 1}]
    assert (a["environment"], a["interface"], a["local"]) == ({"X": "1"}, "eth0", False)
    assert [pair.problem for pair in found.pairs] == [
        "the command ended with code 1: nothing was said"
    ]


def test_hosts_with_gpus_use_nccl_and_measure_two_ranks_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = asked(monkeypatch)
    hosts = reached(gpu_host("a"), gpu_host("b"), probe("c"))
    hosts = Facts(**{**vars(hosts), "hosts": {"a": 8, "b": 8, "c": 1}})
    found = measure_pairs(hosts, Ssh(), time.monotonic() + 50, {})
    backends = {(pair.first, pair.second): pair.backend for pair in found.pairs}
    assert backends == {
        ("a", "a"): "nccl",
        ("b", "b"): "nccl",
        ("a", "b"): "nccl",
        ("a", "c"): "gloo",
        ("b", "c"): "gloo",
    }
    assert [parts[0][host]["local"] for host in "abc"] == [True, True, False]


def test_without_time_nothing_is_begun_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = asked(monkeypatch)
    found = measure_pairs(reached(probe("a"), probe("b")), Ssh(), time.monotonic() + 5, {})
    assert parts == []
    assert [pair.problem for pair in found.pairs] == [NOT_BEGUN]


def test_hosts_that_are_not_reached_are_left_out_of_the_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = asked(monkeypatch)
    hosts = reached(probe("a"), probe("b"), probe("c", torch=None))
    found = measure_pairs(hosts, Ssh(), time.monotonic() + 50, {})
    assert set(parts[0]) == {"a", "b"}
    assert [(pair.first, pair.second) for pair in found.pairs] == [("a", "b")]


def test_without_time_for_ports_that_is_said_and_nothing_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = asked(monkeypatch)
    found = try_ports(facts(probe("a"), probe("b")), Ssh(), time.monotonic() + 5)
    assert parts == []
    assert {host: said["problem"] for host, said in found.reach.items()} == {
        "a": NOT_BEGUN,
        "b": NOT_BEGUN,
    }
    verdict = ports(found)
    assert verdict is not None
    assert (verdict.verdict, verdict.hosts) == ("warning", ("a", "b"))


def test_ports_are_given_up_before_the_command_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that waits in vain must still say whom it reached."""
    parts = asked(monkeypatch)
    try_ports(facts(probe("a"), probe("b")), Ssh(), time.monotonic() + 9)
    assert 3.0 < parts[0]["a"]["seconds"] <= 5.0


def test_many_hosts_connect_to_the_first_and_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = asked(monkeypatch)
    names = [f"h{number:02d}" for number in range(20)]
    found = try_ports(facts(*map(probe, names)), Ssh(), time.monotonic() + 50)
    assert set(parts[0]["h05"]["targets"]) == {"h00", "h06"}
    assert set(parts[0]["h00"]["targets"]) == {"h01"}
    assert set(parts[0]["h19"]["targets"]) == {"h00"}
    assert (parts[0]["h00"]["expected"], parts[0]["h05"]["expected"]) == (19, 1)
    assert found.master == "h00"
    assert set(found.reach) == set(names)


def test_ports_are_tried_by_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        part = {
            "host": "a",
            "port": taken,
            "expected": 1,
            "targets": {"b": ["127.0.0.1", taken]},
            "seconds": 5,
        }
        done = subprocess.run(
            [sys.executable, "-m", "megacore.doctor.peers", "ports"],
            input=json.dumps(part).encode(),
            capture_output=True,
            timeout=30,
            check=True,
        )
    value = json.loads(done.stdout)["value"]
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
    every = [pair for pairs in rounds for pair in pairs]
    assert len(set(every)) == len(every)
    # the first one of a pair is where they meet
    assert all(first < second for first, second in every)


@pytest.mark.parametrize("count", [2, 3, 4, 7, ALL_PAIRS])
def test_a_few_hosts_all_meet_in_as_few_rounds_as_possible(count: int) -> None:
    rounds = rounds_of(names(count))
    assert sum(map(len, rounds)) == count * (count - 1) // 2
    assert len(rounds) == (count if count % 2 else count - 1)


@pytest.mark.parametrize("count", [ALL_PAIRS + 1, 40, 101])
def test_of_many_hosts_each_meets_its_neighbours_and_some_others(count: int) -> None:
    rounds = rounds_of(names(count))
    assert len(rounds) <= 3 + RANDOM_ROUNDS
    met = Counter(host for pairs in rounds for pair in pairs for host in pair)
    assert set(met) == set(names(count))
    assert min(met.values()) >= 3
    every = {pair for pairs in rounds for pair in pairs}
    assert {
        ("h00", "h01"),
        (f"h{count - 2:02d}", f"h{count - 1:02d}"),
        ("h00", f"h{count - 1:02d}"),
    } <= every
