from typing import Any

from megacore.config.launch import LaunchConfig
from megacore.doctor.findings import Facts, PairMeasurement
from megacore.doctor.network import bandwidth, interfaces, late_links, names, ports, slow_links
from megacore.doctor.protocol import NOT_BEGUN, HostProbe
from tests.doctor._made import NEEDS, expect, facts, probe


def reach(port: int, reached: dict[str, str | None], listens: str | None = None) -> dict[str, Any]:
    """Return a host's answer about its ports: no problem or a problem for each peer."""
    results = {
        peer: {"seconds": None, "address": f"10.0.0.{peer}", "port": 4001, "problem": problem}
        for peer, problem in reached.items()
    }
    return {"check": "reach", "value": {"port": port, "listens": listens, "reached": results}}


def pairs(*rates: tuple[str, str, float], latency: float = 1e-4) -> tuple[PairMeasurement, ...]:
    """Return pairs with these bandwidths in GB/s."""
    return tuple(
        PairMeasurement(a, b, "gloo", latency, 1e6 / 1e9 / rate, 64e6 / 1e9 / rate)
        for a, b, rate in rates
    )


def probe_with_peer(peer: str, addresses: list[str]) -> HostProbe:
    return probe("b", network={"peers": {peer: addresses}})


def test_host_name_of_a_loopback_address_is_a_warning() -> None:
    expect(names(facts(probe("a"), probe("b"))), "ok", ())
    loopback = probe("b", network={"own_addresses": ["127.0.1.1"]})
    expect(names(facts(probe("a"), loopback)), "warning", ("b",), "127.0.1.1", "/etc/hosts")


def test_wrong_address_of_the_master_is_an_error() -> None:
    expect(
        names(facts(probe("a"), probe_with_peer("a", []))),
        "error",
        ("b",),
        "b does not know the address of a",
        "HostName",
    )
    expect(
        names(facts(probe("a"), probe_with_peer("a", ["127.0.1.1"]))),
        "error",
        ("b",),
        "a is 127.0.1.1 on b",
    )
    expect(
        names(facts(probe("a"), probe_with_peer("c", []), probe("c"))),
        "warning",
        ("b",),
        "address of c",
    )


def test_unusable_interface_is_an_error() -> None:
    expect(interfaces(facts(probe("a"), probe("b"))), "ok", ())
    none = probe("b", network={"interface": None, "address": None})
    expect(interfaces(facts(probe("a"), none)), "error", ("b",), "no route", "eth0, lo")
    missing = probe("b", network={"interface": "ib0", "address": None, "exists": False})
    expect(interfaces(facts(probe("a"), missing)), "error", ("b",), "launch.interface is ib0")
    loop = probe("b", network={"interface": "lo", "address": "127.0.0.1"})
    expect(interfaces(facts(probe("a"), loop)), "error", ("b",), "loopback")


def test_different_mtu_or_speed_of_interfaces_is_a_warning() -> None:
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


def test_network_check_without_an_answer_is_an_error() -> None:
    hangs = probe("b", network="no answer within 8 s")
    expect(interfaces(facts(probe("a"), hangs)), "error", ("b",), "resolver")


def test_port_that_is_not_reached_is_an_error() -> None:
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


def test_port_in_use_at_the_rendezvous_is_an_error() -> None:
    launch = LaunchConfig(hostfile="hosts", rdzv_endpoint="a:29500")
    taken = {
        "a": reach(29500, {"b": None}, "Address already in use"),
        "b": reach(4001, {"a": "refused"}),
    }
    finding = ports(facts(probe("a"), probe("b"), reach=taken, launch=launch))
    expect(
        finding,
        "error",
        ("a",),
        "port 29500 of a (launch.rdzv_endpoint a:29500)",
        "Address already in use",
    )
    assert finding is not None
    assert "firewall" not in finding.advice  # the network is not the cause


def measured(*rates: tuple[str, str, float], hosts: str = "abc", **more: Any) -> Facts:
    return facts(*map(probe, hosts), pairs=pairs(*rates), **more)


def test_bandwidth_of_similar_links_is_ok() -> None:
    expect(bandwidth(measured(("a", "b", 5.0), ("a", "c", 5.5), ("b", "c", 4.6))), "ok", ())
    assert bandwidth(facts(probe("a"))) is None


def test_slow_link_is_a_warning() -> None:
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


def test_late_links_ignore_latencies_below_a_millisecond() -> None:
    assert late_links({"a": 1e-4, "b": 1e-4, "c": 9e-4}) == []
    assert late_links({"a": 1e-4, "b": 1e-4, "c": 3e-3, "d": 1e-4}) == ["c"]


def test_late_link_among_four_hosts_is_a_warning() -> None:
    far = pairs(("a", "b", 5.0)) + pairs(("a", "c", 5.0), ("b", "c", 5.0), latency=0.03)
    # With three hosts, the median includes the late link, so that no host exceeds it threefold.
    expect(bandwidth(facts(*map(probe, "abc"), pairs=far)), "ok", ())
    more = far + pairs(("a", "d", 5.0), ("b", "d", 5.0)) + pairs(("c", "d", 5.0), latency=0.03)
    expect(
        bandwidth(facts(*map(probe, "abcd"), pairs=more)),
        "warning",
        ("c",),
        "the link of c is late: 30.0 ms",
    )


def test_slow_pair_of_two_hosts_is_a_warning_for_no_host() -> None:
    assert slow_links({"a": 1.0, "b": 0.1}) == []
    slow = measured(("a", "b", 0.05), hosts="ab", needs=NEEDS)
    finding = bandwidth(slow)
    expect(finding, "warning", (), "less than gigabit Ethernet", "21.5 s")
    assert finding is not None
    assert finding.found[""] == "tiny exchanges 1.07 GB of gradients a step, 21.5 s at this rate"


def test_failed_pair_is_an_error() -> None:
    failed = (PairMeasurement("a", "b", "gloo", problem="timed out"), *pairs(("a", "c", 5.0)))
    expect(
        bandwidth(facts(*map(probe, "abc"), pairs=failed)),
        "error",
        ("a",),
        "a and b do not exchange",
        "timed out",
    )
    local = (PairMeasurement("a", "a", "nccl", problem="no peer access"),)
    expect(bandwidth(facts(probe("a"), pairs=local)), "error", ("a",), "two ranks of a")


def test_pairs_not_measured_in_time_are_a_warning() -> None:
    late = (PairMeasurement("a", "b", "gloo", problem=NOT_BEGUN), *pairs(("a", "c", 5.0)))
    expect(
        bandwidth(facts(*map(probe, "abc"), pairs=late)),
        "warning",
        (),
        "1 of 2 pairs were not measured in time",
    )


def test_pairs_left_out_are_counted() -> None:
    finding = bandwidth(measured(("a", "b", 5.0), hosts="ab", left_out=40))
    assert finding is not None
    assert (
        finding.found[""]
        == "measured: 1 pairs, neighbours of a ring and random ones; 40 were left out"
    )
