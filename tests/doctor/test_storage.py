from dataclasses import replace
from typing import Any

from megacore.config.launch import LaunchConfig
from megacore.doctor.compare import limits, memories, shared_memory
from megacore.doctor.storage import disks, index_maps, tokens, workspaces
from tests.doctor._made import GIB, HEALTHY, MIB, NEEDS, expect, facts, gpu_host, probe

LOCAL = LaunchConfig(hostfile="hosts", data_placement="node_local")


def test_a_workspace_that_all_see() -> None:
    expect(workspaces(facts(probe("a"), probe("b"))), "ok", ())
    missing = probe("b", workspace={"exists": False, "sees_head": False, "writes": None})
    expect(workspaces(facts(probe("a"), missing)), "error", ("b",), "/w does not exist on b", "node_local")
    other = probe("b", workspace={"sees_head": False, "writes": None})
    expect(workspaces(facts(probe("a"), other)), "error", ("b",), "/w on b is not the directory")
    read_only = probe("b", workspace={"writes": False, "reason": "Read-only file system"})
    expect(workspaces(facts(probe("a"), read_only)), "error", ("b",), "Read-only file system")
    expect(workspaces(facts(probe("a"), probe("b"), seen={"a": True, "b": False})), "error", ("b",), "caching")


def test_a_workspace_of_its_own() -> None:
    own = {"sees_head": None, "writes": True}
    expect(workspaces(facts(probe("a", workspace=own), probe("b", workspace=own), launch=LOCAL)), "ok", ())
    new = probe("b", workspace={"exists": False, "sees_head": None, "writes": None})
    expect(workspaces(facts(probe("a", workspace=own), new, launch=LOCAL)), "ok", ())
    closed = probe("b", workspace={"exists": False, "sees_head": None, "writes": None}, disk={"writable": False})
    expect(
        workspaces(facts(probe("a", workspace=own), closed, launch=LOCAL)), "error", ("b",), "cannot be written on b"
    )
    expect(workspaces(facts(probe("a", workspace={"sees_head": None, "writes": False}))), "error", ("a",))


def test_a_dead_file_share() -> None:
    hangs = probe("b", workspace="no answer within 8 s", disk="no answer within 8 s")
    expect(workspaces(facts(probe("a"), hangs)), "error", ("b",), "no answer within 8 s", "dead file share")
    expect(disks(facts(probe("a"), hangs)), "error", ("b",), "dead file share")


def test_room_for_checkpoints() -> None:
    expect(disks(facts(probe("a"), needs=NEEDS)), "ok", ())
    expect(disks(facts(probe("a", disk={"free": 7 * GIB}), needs=NEEDS)), "warning", ("a",), "8.0 GiB", "keep_last")
    expect(disks(facts(probe("a", disk={"free": GIB}), needs=NEEDS)), "error", ("a",), "takes 2.0 GiB")
    expect(disks(facts(probe("a", disk={"free": GIB}))), "warning", ("a",), "1.0 GiB free")
    # Only the first host keeps checkpoints where each has a workspace of its own.
    own = facts(probe("a"), probe("b", disk={"free": 7 * GIB}), needs=NEEDS, launch=LOCAL)
    expect(disks(own), "ok", ())


def test_disks_with_other_troubles() -> None:
    expect(disks(facts(probe("a", disk={"inodes_free": 5}))), "warning", ("a",), "5 inodes")
    expect(disks(facts(probe("a", disk={"inodes_free": None}))), "ok", ())
    expect(disks(facts(probe("a", disk={"kind": "tmpfs"}))), "warning", ("a",), "main memory (tmpfs)")


def test_memory_for_all_ranks() -> None:
    expect(memories(facts(probe("a"), slots=8, needs=NEEDS)), "ok", ())
    limited = probe("a", memory={"limit": 4 * GIB})
    expect(memories(facts(limited, slots=8, needs=NEEDS)), "error", ("a",), "8 ranks of tiny need about 8.0 GiB")
    busy = probe("a", memory={"available": 4 * GIB})
    expect(memories(facts(busy, slots=8, needs=NEEDS)), "warning", ("a",), "4.0 are available")
    expect(memories(facts(limited)), "ok", ())


def test_memory_of_gpus() -> None:
    large = replace(NEEDS, device=90 * GIB, host=GIB)
    expect(memories(facts(gpu_host("a"), slots=8, needs=large)), "error", ("a",), "90.0 GiB of GPU memory", "80.0")
    expect(memories(facts(gpu_host("a"), slots=8, needs=replace(large, device=70 * GIB))), "ok", ())


def test_shared_memory() -> None:
    docker: dict[str, Any] = {"shared_total": 64 * MIB, "shared_free": 64 * MIB}
    expect(shared_memory(facts(probe("a"), slots=8)), "ok", ())
    expect(shared_memory(facts(probe("a", memory=docker), slots=8)), "warning", ("a",), "64 MiB", "--shm-size")
    expect(shared_memory(facts(gpu_host("a", memory=docker), slots=8)), "error", ("a",), "8 ranks need about 256")
    expect(shared_memory(facts(probe("a", memory=docker), slots=1)), "ok", ())
    none = probe("a", memory={"shared_total": None, "shared_free": None})
    expect(shared_memory(facts(none)), "warning", ("a",), "no /dev/shm")


def test_limits() -> None:
    expect(limits(facts(probe("a"), slots=8)), "ok", ())
    expect(limits(facts(probe("a", limits={"nofile": 256}))), "warning", ("a",), "256 files", "nofile")
    expect(limits(facts(probe("a", limits={"nofile": 1024}), slots=1)), "ok", ())
    expect(limits(facts(probe("a", limits={"nofile": 1024}), slots=512)), "warning", ("a",), "may need 4,352")
    expect(limits(facts(probe("a", limits={"nproc": 512}))), "warning", ("a",), "512 processes")
    expect(limits(facts(probe("a", limits={"overcommit": 2}))), "warning", ("a",), "overcommit_memory=2")
    locked = {"memlock": 8 * MIB}
    expect(limits(facts(probe("a", limits=locked))), "ok", ())  # only RDMA locks memory
    expect(limits(facts(probe("a", limits=locked | {"rdma": ["mlx5_0"]}))), "warning", ("a",), "mlx5_0", "memlock")


def file(**changes: Any) -> dict[str, Any]:
    return {"files": [HEALTHY["tokens"]["files"][0] | changes]}


def test_tokens() -> None:
    expect(tokens(facts(probe("a"))), "ok", ())
    beyond = probe("a", tokens=file(largest=105, outside=17))
    expect(tokens(facts(beyond)), "error", ("a",), "/w/t.bin holds the id 105 (at token 17)", "100 entries")
    expect(tokens(facts(probe("a", tokens=file(smallest=-1, outside=3)))), "error", ("a",), "holds the id -1")
    missing = probe("b", tokens={"files": [{"prefix": "/w/t", "problem": "/w/t.idx does not exist: copy it"}]})
    expect(tokens(facts(probe("a"), missing)), "error", ("b",), "on b, /w/t.idx does not exist")


def test_tokens_that_were_read_in_part_are_said_to_be() -> None:
    found = tokens(facts(probe("a", tokens=file(read=25))))
    assert found is not None
    assert found.verdict == "ok"
    assert found.found["a"] == "ids of 50% of 50 tokens below 100"


def test_index_maps() -> None:
    expect(index_maps(facts(probe("a"))), "ok", ())
    expect(index_maps(facts(probe("a", index={"others": ["/old/t"]}))), "error", ("a",), "/old/t", "build them again")
    gone = probe("b", index="/w/i/train_shuffle_index.npy does not exist: build the index maps first")
    expect(index_maps(facts(probe("a"), gone)), "error", ("b",), "train_shuffle_index.npy does not exist")
    assert index_maps(facts(probe("a", index=None))) is None
