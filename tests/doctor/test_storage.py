"""Checks of workspace, disk, tokens and index maps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.config.launch import LaunchConfig
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.doctor import storage
from megacore.doctor.storage import (
    PREFIX,
    Proof,
    disks,
    file_system,
    index_maps,
    look_at_disk,
    look_at_tokens,
    look_at_workspace,
    tokens,
    workspaces,
)
from megacore.errors import DataFormatError
from tests.doctor._made import GIB, HEALTHY, NEEDS, expect, facts, probe, write_tokens

LOCAL = LaunchConfig(hostfile="hosts", data_placement="node_local")


def test_workspace_that_is_not_shared_is_an_error() -> None:
    expect(workspaces(facts(probe("a"), probe("b"))), "ok", ())
    missing = probe("b", workspace={"exists": False, "sees_head": False, "writes": None})
    expect(
        workspaces(facts(probe("a"), missing)),
        "error",
        ("b",),
        "/w does not exist on b",
        "node_local",
    )
    other = probe("b", workspace={"sees_head": False, "writes": None})
    expect(workspaces(facts(probe("a"), other)), "error", ("b",), "/w on b is not the directory")
    read_only = probe("b", workspace={"writes": False, "reason": "Read-only file system"})
    expect(workspaces(facts(probe("a"), read_only)), "error", ("b",), "Read-only file system")
    expect(
        workspaces(facts(probe("a"), probe("b"), seen={"a": True, "b": False})),
        "error",
        ("b",),
        "caching",
    )


def test_local_workspace_must_only_be_writable() -> None:
    local = {"sees_head": None, "writes": True}
    expect(
        workspaces(facts(probe("a", workspace=local), probe("b", workspace=local), launch=LOCAL)),
        "ok",
        (),
    )
    new = probe("b", workspace={"exists": False, "sees_head": None, "writes": None})
    expect(workspaces(facts(probe("a", workspace=local), new, launch=LOCAL)), "ok", ())
    closed = probe(
        "b",
        workspace={"exists": False, "sees_head": None, "writes": None},
        disk={"writable": False},
    )
    expect(
        workspaces(facts(probe("a", workspace=local), closed, launch=LOCAL)),
        "error",
        ("b",),
        "cannot be written on b",
    )
    expect(
        workspaces(facts(probe("a", workspace={"sees_head": None, "writes": False}))),
        "error",
        ("a",),
    )


def test_workspace_without_an_answer_is_an_error() -> None:
    hangs = probe("b", workspace="no answer within 8 s", disk="no answer within 8 s")
    expect(
        workspaces(facts(probe("a"), hangs)),
        "error",
        ("b",),
        "no answer within 8 s",
        "dead file share",
    )
    expect(disks(facts(probe("a"), hangs)), "error", ("b",), "dead file share")


def test_disk_without_room_for_checkpoints_is_reported() -> None:
    expect(disks(facts(probe("a"), needs=NEEDS)), "ok", ())
    expect(
        disks(facts(probe("a", disk={"free": 7 * GIB}), needs=NEEDS)),
        "warning",
        ("a",),
        "8.0 GiB",
        "keep_last",
    )
    expect(
        disks(facts(probe("a", disk={"free": GIB}), needs=NEEDS)), "error", ("a",), "takes 2.0 GiB"
    )
    expect(disks(facts(probe("a", disk={"free": GIB}))), "warning", ("a",), "1.0 GiB free")


def test_only_the_head_needs_room_for_checkpoints_in_local_workspaces() -> None:
    hosts = facts(probe("a"), probe("b", disk={"free": 7 * GIB}), needs=NEEDS, launch=LOCAL)
    expect(disks(hosts), "ok", ())


def test_few_inodes_and_tmpfs_are_a_warning() -> None:
    expect(disks(facts(probe("a", disk={"inodes_free": 5}))), "warning", ("a",), "5 inodes")
    expect(disks(facts(probe("a", disk={"inodes_free": None}))), "ok", ())
    expect(
        disks(facts(probe("a", disk={"kind": "tmpfs"}))), "warning", ("a",), "host memory (tmpfs)"
    )


def file(**changes: Any) -> dict[str, Any]:
    return {"files": [HEALTHY["tokens"]["files"][0] | changes]}


def test_token_ids_outside_the_vocabulary_are_an_error() -> None:
    expect(tokens(facts(probe("a"))), "ok", ())
    beyond = probe("a", tokens=file(largest=105, outside=17))
    expect(
        tokens(facts(beyond)),
        "error",
        ("a",),
        "/w/t.bin holds the id 105 (at token 17)",
        "100 entries",
    )
    expect(
        tokens(facts(probe("a", tokens=file(smallest=-1, outside=3)))),
        "error",
        ("a",),
        "holds the id -1",
    )
    missing = probe(
        "b", tokens={"files": [{"prefix": "/w/t", "problem": "/w/t.idx does not exist: copy it"}]}
    )
    expect(tokens(facts(probe("a"), missing)), "error", ("b",), "on b, /w/t.idx does not exist")


def test_missing_token_files_are_named_with_similar_ones(tmp_path: Path) -> None:
    other = write_tokens(tmp_path / "t_text_document", [1, 2])
    answer = look_at_tokens([str(tmp_path / "t")], 100, (0, 1), 1.0)
    finding = tokens(facts(probe("a", tokens=answer)))
    assert finding is not None
    expect(finding, "error", ("a",), f"t.idx does not exist: did you mean {other}?")
    assert finding.found["a"] == "no readable token files"
    some = look_at_tokens([other, str(tmp_path / "none")], 100, (0, 1), 1.0)
    finding = tokens(facts(probe("a", tokens=some)))
    assert finding is not None
    expect(finding, "error", ("a",), "none.idx does not exist: give the path of token files")
    assert finding.found["a"] == "ids of 2 tokens below 100"


def test_share_of_tokens_read_is_reported() -> None:
    finding = tokens(facts(probe("a", tokens=file(read=25))))
    assert finding is not None
    assert finding.verdict == "ok"
    assert finding.found["a"] == "ids of 50% of 50 tokens below 100"


def test_index_maps_of_other_data_are_an_error() -> None:
    expect(index_maps(facts(probe("a"))), "ok", ())
    expect(
        index_maps(facts(probe("a", index={"others": ["/old/t"]}))),
        "error",
        ("a",),
        "/old/t",
        "build them again",
    )
    gone = probe(
        "b", index="/w/i/train_shuffle_index.npy does not exist: build the index maps first"
    )
    expect(
        index_maps(facts(probe("a"), gone)),
        "error",
        ("b",),
        "train_shuffle_index.npy does not exist",
    )
    assert index_maps(facts(probe("a", index=None))) is None


def test_proof_shows_that_a_host_shares_the_workspace(tmp_path: Path) -> None:
    with Proof(tmp_path) as proof:
        assert look_at_workspace(tmp_path, str(proof.directory), "b")["writes"] is True
        assert proof.seen(["b"]) == {"b": True}
        other = tmp_path / "other"
        other.mkdir()
        assert look_at_workspace(other / "gone", str(proof.directory), "c")["exists"] is False
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_proof_is_not_seen_in_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.doctor.storage._WAIT", 0.1)
    answer = look_at_workspace(tmp_path, str(tmp_path / ".doctor-1"), "b")
    assert (answer["sees_head"], answer["writes"]) == (False, None)
    with Proof(tmp_path) as proof:
        assert proof.seen(["b"]) == {"b": False}


def test_file_system_is_that_of_the_longest_matching_mount(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 21 0:5 / /w rw shared:1 - nfs4 server:/w rw\n"
        "31 30 0:6 / /w/with\\040space rw - tmpfs none rw\n"
    )
    assert file_system(Path("/w/runs"), table) == ("nfs4", "server:/w")
    assert file_system(Path("/wide"), table) == ("ext4", "/dev/sda1")
    assert file_system(Path("/w/with space/x"), table) == ("tmpfs", "none")


def test_missing_workspace_is_described_by_its_parent_directory(tmp_path: Path) -> None:
    disk = look_at_disk(tmp_path / "a" / "b")
    assert (disk["exists"], disk["writable"]) == (False, True)
    assert disk["free"] > 0


def test_first_token_outside_the_vocabulary_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_BLOCK", 64)
    ids = np.arange(1000) % 90
    good = write_tokens(tmp_path / "good", ids)
    ids[[700, 900]] = 95, 91
    bad = write_tokens(tmp_path / "bad", ids)
    first, second = look_at_tokens([good, bad], 91, (0, 1), 10)["files"]
    assert (first["read"], first["largest"], first["outside"]) == (1000, 89, None)
    assert (second["read"], second["largest"], second["outside"]) == (1000, 95, 700)
    assert look_at_tokens([bad], 96, (0, 1), 10)["files"][0]["outside"] is None


def test_each_host_reads_a_part_of_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_BLOCK", 64)
    ids = np.arange(1000) % 90
    ids[70] = 99  # in the second block
    prefix = write_tokens(tmp_path / "t", ids)
    parts = [look_at_tokens([prefix], 91, (number, 3), 10)["files"][0] for number in range(3)]
    assert sum(part["read"] for part in parts) == 1000
    assert [part["outside"] for part in parts] == [None, 70, None]


def test_negative_tokens_and_missing_files_are_reported(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "t", [1, 2, -3, 4])
    files = look_at_tokens([prefix, str(tmp_path / "gone")], 91, (0, 1), 10)["files"]
    assert (files[0]["smallest"], files[0]["outside"]) == (-3, 2)
    assert "gone.idx does not exist" in files[1]["problem"]


def test_no_token_is_reported_as_read_without_time(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "t", [1, 2, 3])
    file_answer = look_at_tokens([prefix], 91, (0, 1), -1.0)["files"][0]
    assert (file_answer["read"], file_answer["planned"]) == (0, 3)


def test_missing_index_map_is_named(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "t", np.arange(900) % 90)
    directory = tmp_path / "index"
    directory.mkdir()
    build_index_maps(
        Mixture.single(prefix),
        directory,
        IndexOptions(split="1,1,1", seq_length=8, seed=1),
        (5, 5, 5),
    )
    index = storage.look_at_index(directory, [prefix])
    assert (index["maps"], index["others"]) == (9, [])
    assert storage.look_at_index(directory, ["/elsewhere"])["others"] == [prefix]
    (directory / "valid_sample_index.npy").unlink()
    with pytest.raises(DataFormatError, match=r"valid_sample_index\.npy does not exist"):
        storage.look_at_index(directory, [prefix])
