"""The probe on this machine, and what each check reads."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data.index_maps import IndexOptions, Mixture, build_index_maps
from megacore.data.indexed_dataset_writer import IndexedDatasetWriter
from megacore.doctor import storage
from megacore.doctor.machine import parse_smi, sources_digest
from megacore.doctor.probe import QUICK, SLOW, work_of
from megacore.doctor.protocol import NOT_BEGUN, HostProbe, Request, answer, read_answers
from megacore.doctor.storage import PREFIX, Proof, file_system, look_at_disk, look_at_workspace
from megacore.errors import DataFormatError, LaunchError


def ask(request: bytes) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "megacore.doctor.probe"], input=request, capture_output=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def this_machine(tmp_path_factory: pytest.TempPathFactory) -> HostProbe:
    workspace = tmp_path_factory.mktemp("workspace")
    request = Request("here", str(workspace), (*QUICK, "workspace", "network", *SLOW))
    done = ask(request.to_json())
    assert done.returncode == 0, done.stderr.decode()
    return read_answers("here", done.stdout, request.checks, None)


def test_every_check_of_this_machine_has_an_answer(this_machine: HostProbe) -> None:
    assert this_machine.problems == {}
    assert set(this_machine.values) == {*QUICK, *SLOW, "workspace", "network"}
    assert sum(this_machine.seconds.values()) < 45


def test_the_answers_are_those_of_this_machine(this_machine: HostProbe) -> None:
    import torch

    assert this_machine.get("packages", "versions")["torch"] == torch.__version__
    assert this_machine.get("torch", "cuda_works") is torch.cuda.is_available()
    assert set(this_machine.get("torch", "kernels")) >= {"attention", "optimizer", "cross_entropy"}
    assert this_machine.get("memory", "total") > 2**28
    assert this_machine.get("workspace") == {"exists": True, "writes": True, "sees_head": None}
    assert all(device["gflops"] > 0 for device in this_machine.get("speed", "devices"))
    first, second = this_machine.get("network", "ports")
    assert first != second


def test_a_request_of_another_version_is_refused() -> None:
    done = ask(b'{"host": "a", "surprise": 1}')
    assert done.returncode == LaunchError.exit_code
    assert b"install the same version" in done.stderr


def test_a_check_that_hangs_is_named_and_costs_no_other() -> None:
    started = time.monotonic()
    line = answer("disk", lambda: time.sleep(60), 0.2)
    assert time.monotonic() - started < 5
    assert line["problem"] == "no answer within 0.2 s"
    assert answer("disk", lambda: 3, 1.0)["value"] == 3


def test_a_file_share_that_hangs_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "proof").mkdir()
    os.mkfifo(tmp_path / "proof" / "head")  # whoever opens it waits for ever, as on a dead file share
    request = Request("b", str(tmp_path), ("limits", "workspace", "disk"), 1.5, token=str(tmp_path / "proof"))
    started = time.monotonic()
    done = ask(request.to_json())
    assert time.monotonic() - started < 10
    found = read_answers("b", done.stdout, request.checks, None)
    assert "limits" in found.values
    assert found.problems["workspace"].startswith("no answer within 1.")
    assert found.problems["disk"] == NOT_BEGUN


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ZeroDivisionError("x")])
def test_a_check_that_fails_says_why(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert str(error) in answer("disk", fail, 1.0)["problem"]


def test_an_output_that_was_cut_off_names_the_checks_without_an_answer() -> None:
    output = b'Welcome to node 7\n{"check": "limits", "value": {"nofile": 1}, "seconds": 0.1}\n{"check": "di'
    found = read_answers("a", output, ("limits", "disk", "torch"), "it did not answer in time")
    assert found.values == {"limits": {"nofile": 1}}
    assert found.problems == dict.fromkeys(("disk", "torch"), "no answer (it did not answer in time)")
    assert read_answers("a", b"bash: python: not found\n", ("disk",), "code 127").failed == "code 127"


def write_tokens(prefix: Path, ids: "list[int] | np.ndarray[Any, Any]") -> str:
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for part in np.array_split(np.asarray(ids, np.int32), 3):
            writer.add_document(part)
    return str(prefix)


def test_tokens_beyond_the_vocabulary_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_BLOCK", 64)
    ids = np.arange(1000) % 90
    good = write_tokens(tmp_path / "good", ids)
    ids[[700, 900]] = 95, 91
    bad = write_tokens(tmp_path / "bad", ids)
    first, second = storage.look_at_tokens([good, bad], 91, (0, 1), 10)["files"]
    assert (first["read"], first["largest"], first["outside"]) == (1000, 89, None)
    assert (second["read"], second["largest"], second["outside"]) == (1000, 95, 700)
    assert storage.look_at_tokens([bad], 96, (0, 1), 10)["files"][0]["outside"] is None


def test_hosts_share_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_BLOCK", 64)
    ids = np.arange(1000) % 90
    ids[70] = 99  # in the second block
    prefix = write_tokens(tmp_path / "t", ids)
    parts = [storage.look_at_tokens([prefix], 91, (number, 3), 10)["files"][0] for number in range(3)]
    assert sum(part["read"] for part in parts) == 1000
    assert [part["outside"] for part in parts] == [None, 70, None]


def test_negative_tokens_and_files_that_are_missing(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "t", [1, 2, -3, 4])
    found = storage.look_at_tokens([prefix, str(tmp_path / "gone")], 91, (0, 1), 10)["files"]
    assert (found[0]["smallest"], found[0]["outside"]) == (-3, 2)
    assert "gone.idx does not exist" in found[1]["problem"]


@pytest.mark.parametrize(("left", "given"), [(25.0, 12.0), (7.0, 5.0)])
def test_tokens_are_read_in_the_time_that_is_left(left: float, given: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read by then is reported, not lost with the check's own limit."""
    monkeypatch.setattr(storage, "look_at_tokens", lambda prefixes, vocab_size, share, seconds: seconds)
    work, limit = work_of("tokens", Request("a", "/w", ("tokens",), prefixes=("t",), vocab_size=2), left)
    assert answer("tokens", work, limit)["value"] == given
    assert given < min(limit, left)


def test_without_time_nothing_is_claimed_to_be_read(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "t", [1, 2, 3])
    found = storage.look_at_tokens([prefix], 91, (0, 1), -1.0)["files"][0]
    assert (found["read"], found["planned"]) == (0, 3)


def test_index_maps_that_are_missing_are_named(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "t", np.arange(900) % 90)
    directory = tmp_path / "index"
    directory.mkdir()
    build_index_maps(Mixture.single(prefix), directory, IndexOptions(split="1,1,1", seq_length=8, seed=1), (5, 5, 5))
    found = storage.look_at_index(directory, [prefix])
    assert (found["maps"], found["others"]) == (9, [])
    assert storage.look_at_index(directory, ["/elsewhere"])["others"] == [prefix]
    (directory / "valid_sample_index.npy").unlink()
    with pytest.raises(DataFormatError, match=r"valid_sample_index\.npy does not exist"):
        storage.look_at_index(directory, [prefix])


def test_the_proof_of_a_shared_workspace(tmp_path: Path) -> None:
    with Proof(tmp_path) as proof:
        assert look_at_workspace(tmp_path, str(proof.directory), "b")["writes"] is True
        assert proof.seen(["b"]) == {"b": True}
        other = tmp_path / "other"
        other.mkdir()
        assert look_at_workspace(other / "gone", str(proof.directory), "c")["exists"] is False
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_another_directory_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacore.doctor.storage._WAIT", 0.1)
    found = look_at_workspace(tmp_path, str(tmp_path / ".doctor-1"), "b")
    assert (found["sees_head"], found["writes"]) == (False, None)
    with Proof(tmp_path) as proof:
        assert proof.seen(["b"]) == {"b": False}


def test_the_file_system_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 21 0:5 / /w rw shared:1 - nfs4 server:/w rw\n"
        "31 30 0:6 / /w/with\\040space rw - tmpfs none rw\n"
    )
    assert file_system(Path("/w/runs"), table) == ("nfs4", "server:/w")
    assert file_system(Path("/wide"), table) == ("ext4", "/dev/sda1")
    assert file_system(Path("/w/with space/x"), table) == ("tmpfs", "none")


def test_a_workspace_that_is_not_there_yet(tmp_path: Path) -> None:
    found = look_at_disk(tmp_path / "a" / "b")
    assert (found["exists"], found["writable"]) == (False, True)
    assert found["free"] > 0


def test_what_nvidia_smi_says() -> None:
    listed = (
        "0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 81008, 570.86, 0, 34, 0\n"
        "1, GPU-bb, NVIDIA H100 80GB HBM3, 81559, 1024, 570.86, [N/A], [N/A], 99\n"
    )
    running = "GPU-bb, 4711, python3, 80000\nGPU-zz, 1, other, 3\n"
    first, second = parse_smi(listed, running)
    assert (first["name"], first["driver"], first["uncorrected"]) == ("NVIDIA H100 80GB HBM3", "570.86", 0)
    assert (second["free"], second["uncorrected"]) == (1024 * 2**20, None)
    assert second["processes"] == [{"pid": 4711, "name": "python3", "used": 80000 * 2**20}]
    assert parse_smi("", "") == []


def test_the_digest_of_sources_follows_their_content(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("nothing that runs")
    assert sources_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert sources_digest(tmp_path) != before


def test_ports_are_tried_by_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        part = {"host": "a", "port": taken, "expected": 1, "targets": {"b": ["127.0.0.1", taken]}, "seconds": 5}
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
