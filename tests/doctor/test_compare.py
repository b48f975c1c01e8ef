"""Comparison of the hosts: packages, GPUs, kernels, speed, memory and limits."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from megacore.config.launch import LaunchConfig
from megacore.doctor.compare import (
    clocks,
    compare,
    connections,
    gpus,
    kernels,
    limits,
    memories,
    packages,
    shared_memory,
    slow_hosts,
    speeds,
)
from megacore.doctor.findings import Contact
from megacore.doctor.protocol import HostProbe
from tests.doctor._made import GIB, HEALTHY, MIB, NEEDS, expect, facts, gpu_host, probe


def versions(**changes: str | None) -> dict[str, Any]:
    return {"versions": HEALTHY["packages"]["versions"] | changes}


def test_healthy_hosts_have_no_problem() -> None:
    findings = compare(facts(probe("a"), probe("b"), probe("c"), needs=NEEDS))
    assert {finding.verdict for finding in findings} == {"ok"}
    assert [finding.check for finding in findings] == [
        "ssh", "clocks", "packages", "names", "interface", "workspace", "disk", "storage",
        "memory", "shared memory", "limits", "gpus", "toolchain", "operators", "kernels", "speed",
        "tokens", "index maps",
    ]  # fmt: skip
    assert all(not finding.advice and not finding.hosts for finding in findings)


def test_unreachable_host_is_an_error() -> None:
    lost = HostProbe(
        "b", unreachable="ssh cannot reach it: timed out", failed="ssh cannot reach it: timed out"
    )
    contact = {"a": Contact(here=True), "b": Contact(problem="ssh cannot reach it: timed out")}
    host_facts = facts(probe("a"), lost, contacts=contact)
    expect(connections(host_facts), "error", ("b",), "timed out", "`ssh b true`")
    # The other hosts are compared nevertheless.
    assert {finding.check: finding.verdict for finding in compare(host_facts)}["packages"] == "ok"


def test_unreachable_spare_host_of_an_elastic_run_is_a_warning() -> None:
    launch = LaunchConfig(hostfile="hosts", nnodes="1:2")
    lost = HostProbe("b", unreachable="no route", failed="no route")
    contact = {"a": Contact(here=True), "b": Contact(problem="no route")}
    expect(connections(facts(probe("a"), lost, contacts=contact, launch=launch)), "warning", ("b",))
    needed = LaunchConfig(hostfile="hosts", nnodes="2:3")
    expect(connections(facts(probe("a"), lost, contacts=contact, launch=needed)), "error", ("b",))


def test_host_where_megacore_does_not_run_is_an_error() -> None:
    broken = HostProbe("b", failed="the command ended with code 127: python: not found")
    expect(
        connections(facts(probe("a"), broken)), "error", ("b",), "python: not found", "same paths"
    )


@pytest.mark.parametrize(
    ("offset", "uncertainty", "verdict"),
    [(0.4, 0.1, "ok"), (1.3, 0.5, "ok"), (1.3, 0.2, "warning"), (-7.0, 0.2, "warning")],
)
def test_clock_offset_beyond_its_uncertainty_is_a_warning(
    offset: float, uncertainty: float, verdict: str
) -> None:
    contacts = {
        "a": Contact(here=True, offset=0.0),
        "b": Contact(offset=offset, uncertainty=uncertainty),
    }
    hosts = () if verdict == "ok" else ("b",)
    words = () if verdict == "ok" else ("ahead of" if offset > 0 else "behind", "synchronise")
    expect(clocks(facts(probe("a"), probe("b"), contacts=contacts)), verdict, hosts, *words)


def test_different_versions_of_required_packages_are_an_error() -> None:
    good, other = probe("a"), probe("b", packages=versions(torch="2.12.0"))
    expect(
        packages(facts(good, other, probe("c"))),
        "error",
        ("b",),
        "torch is 2.12.0 on b and 2.13.0 on a",
    )
    source = probe("b", packages=versions(megacore="0.1.0 (xyz)"))
    expect(packages(facts(good, source)), "error", ("b",), "megacore is 0.1.0 (xyz) on b")
    expect(
        packages(facts(good, probe("b", packages=versions(torch=None)))),
        "error",
        ("b",),
        "no torch",
    )
    expect(
        packages(facts(good, probe("b", packages={"machine": "aarch64"}))),
        "warning",
        ("b",),
        "processor",
    )


def test_missing_deepspeed_is_an_error_only_if_the_run_needs_it() -> None:
    without = probe("b", packages=versions(deepspeed=None))
    expect(packages(facts(probe("a"), without)), "warning", ("b",), "deepspeed is missing on b")
    expect(
        packages(facts(probe("a"), without, needs=replace(NEEDS, deepspeed=True))), "error", ("b",)
    )


def test_late_package_versions_are_a_warning_and_read_errors_an_error() -> None:
    """A late answer may be due to a cold file share, and the ranks compare versions again."""
    late = probe("b", packages="no answer within 8 s")
    expect(packages(facts(probe("a"), late)), "warning", ("b",), "no answer within 8 s")
    broken = probe("b", packages="Input/output error")
    expect(packages(facts(probe("a"), broken)), "error", ("b",), "Input/output error")


def test_missing_or_unusable_gpus_are_an_error() -> None:
    expect(gpus(facts(gpu_host("a"), gpu_host("b"), slots=8)), "ok", ())
    expect(
        gpus(facts(gpu_host("a"), gpu_host("b", count=7), slots=8)),
        "error",
        ("b",),
        "8 slots and 7 visible",
    )
    dead = gpu_host("b", torch={"cuda_works": False})
    expect(gpus(facts(gpu_host("a"), dead, slots=8)), "error", ("b",), "does not run on them")


def test_busy_faulty_or_different_gpus_are_a_warning() -> None:
    used = gpu_host(
        "b", smi={"free": 2**30, "processes": [{"pid": 77, "name": "python", "used": 2**36}]}
    )
    expect(
        gpus(facts(gpu_host("a"), used)), "warning", ("b",), "python (77)", "1.0 of 80.0 GiB free"
    )
    expect(
        gpus(facts(gpu_host("a"), gpu_host("b", smi={"uncorrected": 3}))),
        "warning",
        ("b",),
        "3 uncorrected",
    )
    expect(
        gpus(facts(gpu_host("a"), gpu_host("b", smi={"driver": "550"}))),
        "warning",
        ("b",),
        "driver is 550 on b",
    )


@pytest.mark.parametrize(
    ("restricted", "verdict"),
    [(None, "warning"), ("GPU-1234", "warning"), ("0, 1", "warning"), ("2,3", "ok")],
)
def test_gpus_that_are_hidden_may_be_busy(restricted: str | None, verdict: str) -> None:
    host = gpu_host("a", count=4)
    values = copy.deepcopy(host.values)
    values["gpus"]["smi"][1]["free"] = GIB
    values["gpus"]["restricted"] = restricted
    expect(gpus(facts(HostProbe("a", values))), verdict, ("a",) if verdict == "warning" else ())


def test_hanging_or_failing_driver_is_an_error() -> None:
    expect(
        gpus(facts(probe("a"), probe("b", gpus="no answer within 16 s"))), "error", ("b",), "dmesg"
    )
    broken = probe("b", gpus={"problem": "nvidia-smi failed: version mismatch"})
    expect(gpus(facts(probe("a"), broken)), "error", ("b",), "version mismatch")


def test_different_kernels_are_a_warning_and_different_precision_an_error() -> None:
    other = probe("c", torch={"kernels": {"attention": "torch", "optimizer": "C++"}})
    expect(
        kernels(facts(probe("a"), probe("b"), other)),
        "warning",
        ("c",),
        "for attention:",
        "train.kernels",
    )
    older = probe("b", torch={"precision": "fp32"})
    expect(
        kernels(facts(probe("a"), older)),
        "error",
        ("b",),
        "the precision is fp32 on b and bf16 on a",
    )
    expect(
        kernels(facts(probe("a"), probe("b", torch="ImportError: libc"))), "error", ("b",), "libc"
    )
    # Reading torch from a cold file share may take longer than the doctor waits.
    expect(
        kernels(facts(probe("a"), probe("b", torch="no answer within 30 s"))),
        "warning",
        ("b",),
        "30 s",
    )


def test_slow_host_is_a_warning_with_its_share_of_the_median() -> None:
    slow = probe("c", speed={"devices": [{"gflops": 50.0, "copy_gb_s": 20.0}]})
    expect(
        speeds(facts(probe("a"), probe("b"), slow)),
        "warning",
        ("c",),
        "matmul has 50% of the median",
    )
    expect(speeds(facts(probe("a"), slow)), "warning", ("c",), "50% of the other host's")
    expect(speeds(facts(slow)), "ok", ())


def test_slow_gpu_of_a_host_is_a_warning_and_a_broken_one_an_error() -> None:
    devices = [{"gflops": 1000.0, "copy_gb_s": 3000.0}, {"gflops": 400.0, "copy_gb_s": 3000.0}]
    expect(
        speeds(facts(probe("a", speed={"devices": devices}))), "warning", ("a",), "slowest GPU of a"
    )
    broken = probe("a", speed={"devices": [{"problem": "an illegal memory access"}]})
    expect(speeds(facts(broken)), "error", ("a",), "illegal memory access")


def test_slow_hosts_are_below_a_share_of_the_median() -> None:
    assert slow_hosts({"a": 1.0}, 0.7) == {}
    assert slow_hosts({"a": 10.0, "b": 7.5}, 0.7) == {}
    assert slow_hosts({"a": 10.0, "b": 5.0}, 0.7) == {"b": 0.5}
    # No host is slow if half of the hosts are slightly slower.
    assert slow_hosts({"a": 10.0, "b": 10.0, "c": 8.0, "d": 8.0}, 0.7) == {}
    assert list(slow_hosts({"a": 10.0, "b": 11.0, "c": 9.0, "d": 3.0}, 0.7)) == ["d"]


def test_host_memory_below_the_need_of_all_ranks_is_reported() -> None:
    expect(memories(facts(probe("a"), slots=8, needs=NEEDS)), "ok", ())
    limited = probe("a", memory={"limit": 4 * GIB})
    expect(
        memories(facts(limited, slots=8, needs=NEEDS)),
        "error",
        ("a",),
        "8 ranks of tiny need about 8.0 GiB",
    )
    busy = probe("a", memory={"available": 4 * GIB})
    expect(memories(facts(busy, slots=8, needs=NEEDS)), "warning", ("a",), "4.0 are available")
    expect(memories(facts(limited)), "ok", ())


def test_gpu_memory_below_the_need_of_a_rank_is_an_error() -> None:
    large = replace(NEEDS, device=90 * GIB, host=GIB)
    expect(
        memories(facts(gpu_host("a"), slots=8, needs=large)),
        "error",
        ("a",),
        "90.0 GiB of GPU memory",
        "80.0",
    )
    expect(memories(facts(gpu_host("a"), slots=8, needs=replace(large, device=70 * GIB))), "ok", ())


def test_small_shared_memory_is_reported() -> None:
    docker: dict[str, Any] = {"shared_total": 64 * MIB, "shared_free": 64 * MIB}
    expect(shared_memory(facts(probe("a"), slots=8)), "ok", ())
    expect(
        shared_memory(facts(probe("a", memory=docker), slots=8)),
        "warning",
        ("a",),
        "64 MiB",
        "--shm-size",
    )
    expect(
        shared_memory(facts(gpu_host("a", memory=docker), slots=8)),
        "error",
        ("a",),
        "8 ranks need about 256",
    )
    expect(shared_memory(facts(probe("a", memory=docker), slots=1)), "ok", ())
    none = probe("a", memory={"shared_total": None, "shared_free": None})
    expect(shared_memory(facts(none)), "warning", ("a",), "no /dev/shm")


def test_low_process_limits_are_a_warning() -> None:
    expect(limits(facts(probe("a"), slots=8)), "ok", ())
    expect(
        limits(facts(probe("a", limits={"nofile": 256}))), "warning", ("a",), "256 files", "nofile"
    )
    expect(limits(facts(probe("a", limits={"nofile": 1024}), slots=1)), "ok", ())
    expect(
        limits(facts(probe("a", limits={"nofile": 1024}), slots=512)),
        "warning",
        ("a",),
        "may need 4,352",
    )
    expect(limits(facts(probe("a", limits={"nproc": 512}))), "warning", ("a",), "512 processes")
    expect(
        limits(facts(probe("a", limits={"overcommit": 2}))),
        "warning",
        ("a",),
        "overcommit_memory=2",
    )
    locked = {"memlock": 8 * MIB}
    expect(limits(facts(probe("a", limits=locked))), "ok", ())  # only RDMA locks memory
    expect(
        limits(facts(probe("a", limits=locked | {"rdma": ["mlx5_0"]}))),
        "warning",
        ("a",),
        "mlx5_0",
        "memlock",
    )
