from typing import Any

from megacore.config.launch import LaunchConfig
from megacore.doctor.facts import Facts, PairMeasurement
from megacore.doctor.network import bandwidth, interfaces, late_links, names, ports, slow_links
from megacore.doctor.protocol import NOT_BEGUN, HostProbe
from tests.doctor._made import NEEDS, expect, facts, probe


def reach(port: int, reached: dict[str, str | None], listens: str | None = None) -> dict[str, Any]:
    """What a host says of its ports: whom it reached, or why not."""
    results = {
        peer: {"seconds": None, "address": f"10.0.0.{peer}", "port": 4001, "problem": problem}
        for peer, problem in reached.items()
    }
    return {"check": "reach", "value": {"port": port, "listens": listens, "reached": results}}


def pairs(*rates: tuple[str, str, float], latency: float = 1e-4) -> tuple[PairMeasurement, ...]:
    """Pairs with their bandwidths in GB/s."""
    return tuple(
        PairMeasurement(a, b, "gloo", latency, 1e6 / 1e9 / rate, 64e6 / 1e9 / rate)
        for a, b, rate in rates
    )


def named(peer: str, addresses: list[str]) -> HostProbe:
    return probe("b", network={"peers": {peer: addresses}})


def test_names_that_lead_to_the_others() -> None:
    expect(names(facts(probe("a"), probe("b"))), "ok", ())
    own = probe("b", network={"own_addresses": ["127.0.1.1"]})
    expect(names(facts(probe("a"), own)), "warning", ("b",), "127.0.1.1", "/etc/hosts")


def test_the_name_where_the_ranks_meet_must_be_known_everywhere() -> None:
    expect(
        names(facts(probe("a"), named("a", []))),
        "error",
        ("b",),
        "b does not know the address of a",
        "HostName",
    )
    expect(
        names(facts(probe("a"), named("a", ["127.0.1.1"]))), "error", ("b",), "a is 127.0.1.1 on b"
    )
    expect(names(facts(probe("a"), named("c", []), probe("c"))), "warning", ("b",), "address of c")


def test_interfaces() -> None:
    expect(interfaces(facts(probe("a"), probe("b"))), "ok", ())
    none = probe("b", network={"interface": None, "address": None})
    expect(interfaces(facts(probe("a"), none)), "error", ("b",), "no route", "eth0, lo")
    missing = probe("b", network={"interface": "ib0", "address": None, "exists": False})
    expect(interfaces(facts(probe("a"), missing)), "error", ("b",), "launch.interface is ib0")
    loop = probe("b", network={"interface": "lo", "address": "127.0.0.1"})
    expect(interfaces(facts(probe("a"), loop)), "error", ("b",), "loopback")


def test_interfaces_that_differ() -> None:
    frames = probe("b", network={"mtu": 1500})
    expect(
        interfaces(facts(probe("a"), frames, probe("c"))),
        "warning",
        ("b",),
        "MTU",
        "1500 on b and 9000",
    )
    slow = probe("b", network={"speed": 100})
    expect(interfaces(facts(probe("a"), slow)), "warning", ("b",), "100 Mbit/s", "cable")
    expect(interfaces(facts(probe("a"), probe("b", network={"speed": None}))), "ok", ())
    hangs = probe("b", network="no answer within 8 s")
    expect(interfaces(facts(probe("a"), hangs)), "error", ("b",), "resolver")


def test_ports() -> None:
    hosts = probe("a"), probe("b")
    expect(
        ports(facts(*hosts, reach={"a": reach(4001, {"b": None}), "b": reach(4001, {"a": None})})),
        "ok",
        (),
    )
    blocked = {"a": reach(4001, {"b": None}), "b": reach(4001, {"a": "no answer"})}
    expect(
        ports(facts(*hosts, reach=blocked)),
        "error",
        ("b",),
        "b does not reach a at 10.0.0.a:4001",
        "firewall",
    )
    assert ports(facts(*hosts)) is None


def test_the_rendezvous_port_is_taken() -> None:
    launch = LaunchConfig(hostfile="hosts", rdzv_endpoint="a:29500")
    taken = {
        "a": reach(29500, {"b": None}, "Address already in use"),
        "b": reach(4001, {"a": "refused"}),
    }
    found = ports(facts(probe("a"), probe("b"), reach=taken, launch=launch))
    expect(
        found,
        "error",
        ("a",),
        "port 29500 of a (launch.rdzv_endpoint a:29500)",
        "Address already in use",
    )
    assert found is not None
    assert "firewall" not in found.advice  # that b does not reach it is no fault of the network


def measured(*rates: tuple[str, str, float], hosts: str = "abc", **more: Any) -> Facts:
    return facts(*map(probe, hosts), pairs=pairs(*rates), **more)


def test_bandwidth_of_equal_links() -> None:
    expect(bandwidth(measured(("a", "b", 5.0), ("a", "c", 5.5), ("b", "c", 4.6))), "ok", ())
    assert bandwidth(facts(probe("a"))) is None


def test_a_slow_link() -> None:
    three = measured(("a", "b", 5.0), ("a", "c", 0.5), ("b", "c", 0.5))
    expect(bandwidth(three), "warning", ("c",), "the link of c is slow: 0.50 GB/s", "2.75 of all")
    rates = [
        ("a", "b", 5.0),
        ("a", "c", 0.5),
        ("a", "d", 5.0),
        ("b", "c", 0.5),
        ("b", "d", 5.0),
        ("c", "d", 0.5),
    ]
    expect(bandwidth(measured(*rates, hosts="abcd")), "warning", ("c",), "5.00 of all")


def test_a_late_link() -> None:
    far = pairs(("a", "b", 5.0)) + pairs(("a", "c", 5.0), ("b", "c", 5.0), latency=0.03)
    # less than a millisecond matters to nobody
    assert late_links({"a": 1e-4, "b": 1e-4, "c": 9e-4}) == []
    assert late_links({"a": 1e-4, "b": 1e-4, "c": 3e-3, "d": 1e-4}) == ["c"]
    # of three, one is not thrice the median
    expect(bandwidth(facts(*map(probe, "abc"), pairs=far)), "ok", ())
    more = far + pairs(("a", "d", 5.0), ("b", "d", 5.0)) + pairs(("c", "d", 5.0), latency=0.03)
    expect(
        bandwidth(facts(*map(probe, "abcd"), pairs=more)),
        "warning",
        ("c",),
        "the link of c is late: 30.0 ms",
    )


def test_of_two_hosts_nobody_is_the_slow_one() -> None:
    assert slow_links({"a": 1.0, "b": 0.1}) == []
    slow = measured(("a", "b", 0.05), hosts="ab", needs=NEEDS)
    found = bandwidth(slow)
    expect(found, "warning", (), "less than gigabit Ethernet", "21.5 s")
    assert found is not None
    assert found.found[""] == "tiny exchanges 1.07 GB of gradients a step, 21.5 s at this rate"


def test_a_pair_that_does_not_meet() -> None:
    failed = (PairMeasurement("a", "b", "gloo", problem="timed out"), *pairs(("a", "c", 5.0)))
    expect(
        bandwidth(facts(*map(probe, "abc"), pairs=failed)),
        "error",
        ("a",),
        "a and b do not exchange",
        "timed out",
    )
    alone = (PairMeasurement("a", "a", "nccl", problem="no peer access"),)
    expect(bandwidth(facts(probe("a"), pairs=alone)), "error", ("a",), "two ranks of a")


def test_pairs_for_which_there_was_no_time() -> None:
    late = (PairMeasurement("a", "b", "gloo", problem=NOT_BEGUN), *pairs(("a", "c", 5.0)))
    expect(
        bandwidth(facts(*map(probe, "abc"), pairs=late)),
        "warning",
        (),
        "1 of 2 pairs were not measured in time",
    )


def test_pairs_that_were_left_out_are_counted() -> None:
    found = bandwidth(measured(("a", "b", 5.0), hosts="ab", left_out=40))
    assert found is not None
    assert (
        found.found[""]
        == "measured: 1 pairs, neighbours of a ring and random ones; 40 were left out"
    )
