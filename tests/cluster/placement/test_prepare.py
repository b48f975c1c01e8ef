"""Files that a job reads, and requests that check and copy them, without another host."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacore.artifact.build import StageKey, seal
from megacore.checkpoint.format import verify
from megacore.checkpoint.save import save_checkpoint
from megacore.cluster.hosts.ssh import HostResult, Ssh
from megacore.cluster.placement import check as place_check
from megacore.cluster.placement import files as place_copy
from megacore.cluster.placement import prepare as placement
from megacore.cluster.placement.check import answer
from megacore.cluster.placement.files import Copier, Transfer, check_rsync, rsync_command
from megacore.cluster.placement.prepare import prepare_hosts
from megacore.cluster.placement.reads import PlacedJob, items_of, loaded_checkpoints
from megacore.config.launch import LaunchConfig
from megacore.errors import HostLostError, LaunchError
from megacore.jobs.model import ModelSource, ZeroShotJob
from megacore.jobs.run import EvaluateJob, TrainJob
from tests._limits import HANG
from tests.train import _runs


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Provide tokens, tokenizer and index maps, the maps with a manifest."""
    _runs.write_data(tmp_path / "data", _runs.config())
    seal(tmp_path / "data" / "index", StageKey("index", 1, {}, {}), {}, 0.0)
    return tmp_path / "data"


def job(data: Path, run: Path, **sections: Any) -> TrainJob:
    run.mkdir(parents=True, exist_ok=True)
    written = _runs.job(_runs.config(**sections), data, run)
    written.write(run / "run.json")
    return written


def on_hosts(job: PlacedJob, hosts: dict[str, int]) -> PlacedJob:
    return job.model_copy(update={"hosts": hosts})


def moved_to_host(request: dict[str, Any], local: Path, remote: Path) -> dict[str, Any]:
    """Return a request about files in `local`, changed for a host that has them in `remote`."""
    moved: dict[str, Any] = json.loads(json.dumps(request).replace(str(local), str(remote)))
    return moved


def begin(items: list[Any], run: Path, keep: str = "") -> dict[str, Any]:
    run_paths = {
        "proof": str(run / "no-proof"),
        "exit": str(run / "exit"),
        "root": str(run / "checkpoints"),
        "keep": keep,
    }
    return {
        "action": "begin",
        "items": [item.to_json() for item in items],
        "token": "t",
        "run": run_paths,
    }


def test_job_reads_index_maps_checkpoint_tokens_and_job_file(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_job = job(data, run)
    assert loaded_checkpoints(train_job) == []
    for iteration in (1, 2):
        save_checkpoint(run / "checkpoints", iteration, {"model.a": torch.ones(3)}, {})
    newest = run / "checkpoints" / "iter_0000002"
    assert loaded_checkpoints(train_job) == [newest]
    items = items_of(train_job, loaded_checkpoints(train_job))
    assert [(item.directory, item.whole) for item in items] == [
        (data / "index", True),
        (newest, True),
        (data, False),
        (run, False),
    ]
    assert sorted(items[2].entries) == ["tokens_text_document.bin", "tokens_text_document.idx"]
    assert sorted(items[1].entries) == [".metadata", "__0_0.distcp", "complete.json", "state.json"]
    assert list(items[3].entries) == ["run.json"]
    evaluate_job = EvaluateJob(
        **train_job.model_dump(exclude={"planned_samples"}),
        checkpoints=(str(newest),),
        unigram=True,
        output=str(run),
    )
    assert loaded_checkpoints(evaluate_job) == [newest]


def test_new_run_loads_the_configured_checkpoint(data: Path, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "other" / "checkpoints", 7, {"model.a": torch.ones(3)}, {})
    train_job = job(data, tmp_path / "run", resume={"checkpoint": str(path)})
    assert loaded_checkpoints(train_job) == [path]


def test_missing_or_damaged_local_files_are_refused(data: Path, tmp_path: Path) -> None:
    train_job = job(data, tmp_path / "run")
    shutil.rmtree(data / "index")
    with pytest.raises(
        LaunchError, match=rf"index maps: {data}/index is not there on this machine"
    ):
        items_of(train_job, [])
    (data / "index").mkdir()
    (data / "index" / "manifest.json").write_text("{")
    with pytest.raises(LaunchError, match=r"index maps: .*manifest\.json is damaged"):
        items_of(train_job, [])


def test_crash_during_a_copy_leaves_no_partial_file_under_a_final_name(
    data: Path, tmp_path: Path
) -> None:
    """The test copies the files between the two requests, instead of rsync."""
    items = items_of(job(data, tmp_path / "local"), [])
    remote = tmp_path / "remote"
    shutil.copytree(data, remote / "data")
    damaged = min((remote / "data" / "index").glob("*.npy"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    request = moved_to_host(begin(items, tmp_path / "local"), tmp_path, remote)
    reply = answer(request)
    assert [sorted(item["wrong"]) for item in reply["items"]] == [[damaged.name], [], ["run.json"]]
    assert "has other content" in reply["items"][0]["wrong"][damaged.name]
    temporary = Path(reply["items"][0]["temporary"])
    assert damaged.name not in {path.name for path in temporary.iterdir()}
    shutil.copy(data / "index" / damaged.name, temporary)
    # A crash at this moment leaves the damaged file under its final name.
    assert bytes(content) == damaged.read_bytes()
    shutil.rmtree(temporary)
    second_reply = answer(moved_to_host(begin(items, tmp_path / "local"), tmp_path, remote))
    shutil.copy2(data / "index" / damaged.name, second_reply["items"][0]["temporary"])
    finish = {
        "action": "finish",
        "items": [items[0].to_json()],
        "token": "t",
        "copied": [[damaged.name]],
    }
    assert answer(moved_to_host(finish, tmp_path, remote)) == {}
    assert damaged.read_bytes() == (data / "index" / damaged.name).read_bytes()
    assert [path.name for path in (remote / "data").glob("*.tmp-copy-*")] == []


def test_directory_copied_by_another_job_is_not_replaced(data: Path, tmp_path: Path) -> None:
    (item, *_) = items_of(job(data, tmp_path / "local"), [])
    remote = tmp_path / "remote"
    for token in ("first", "second"):
        request = moved_to_host(
            begin([item], tmp_path / "local") | {"token": token}, tmp_path, remote
        )
        (item_reply,) = answer(request)["items"]
        assert item_reply["wrong"]
        shutil.copytree(item.directory, item_reply["temporary"], dirs_exist_ok=True)
    finish = {"action": "finish", "items": [item.to_json()], "copied": [[*item.entries]]}
    finish = moved_to_host(finish, tmp_path, remote)
    target = Path(str(item.directory).replace(str(tmp_path), str(remote)))
    assert answer(finish | {"token": "first"}) == {}
    before = target.stat().st_ino
    assert answer(json.loads(json.dumps(finish)) | {"token": "second"}) == {}
    assert target.stat().st_ino == before
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_file_damaged_during_the_copy_is_refused(data: Path, tmp_path: Path) -> None:
    items = items_of(job(data, tmp_path / "local"), [])[:1]
    remote = tmp_path / "remote"
    reply = answer(moved_to_host(begin(items, tmp_path / "local"), tmp_path, remote))
    names = list(reply["items"][0]["wrong"])
    assert names == list(items[0].entries)
    target = Path(reply["items"][0]["temporary"])
    for name in names:
        shutil.copy2(data / "index" / name, target / name)
    content = bytearray((target / names[0]).read_bytes())
    content[-1] ^= 1
    (target / names[0]).write_bytes(content)
    finish = {"action": "finish", "items": [items[0].to_json()], "token": "t", "copied": [names]}
    problem = answer(moved_to_host(finish, tmp_path, remote))["problem"]
    assert problem == (
        f"{remote}/data/index/{names[0]} has other content than it should have after it was copied"
    )
    assert not (remote / "data" / "index").exists()


def test_only_stale_temporary_copies_are_removed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = items_of(job(data, tmp_path / "local"), [])[:1]
    other = data / "index.tmp-copy-of-another"
    other.mkdir()
    answer(begin(items, tmp_path / "local"))
    assert other.exists()
    later = time.time() + 2 * place_check._STALE_SECONDS
    monkeypatch.setattr(place_check, "time", SimpleNamespace(time=lambda: later))
    answer(begin(items, tmp_path / "local"))
    assert not other.exists()


def test_shared_files_are_neither_copied_nor_deleted(data: Path, tmp_path: Path) -> None:
    """A host that shares the workspace of this host has all checkpoints and deletes none."""
    run = tmp_path / "run"
    train_job = job(data, run)
    for iteration in (1, 2):
        save_checkpoint(run / "checkpoints", iteration, {"model.a": torch.ones(3)}, {})
    items = items_of(train_job, loaded_checkpoints(train_job))
    request = begin(items, run, keep="iter_0000002")
    (run / "no-proof").touch()
    reply = answer(request)
    assert not any(item["wrong"] for item in reply["items"])
    assert sorted(path.name for path in (run / "checkpoints").glob("iter_*")) == [
        "iter_0000001",
        "iter_0000002",
    ]


def test_a_complete_save_without_its_name_is_set_aside_like_one_with_it(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", 1, {"model.a": torch.ones(3)}, {})
    path.rename(f"{path}.tmp-0000000f")
    answer(begin([], tmp_path))
    assert verify(tmp_path / "set-aside" / path.name).iteration == 1


def test_full_disk_is_reported_before_the_copy(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = items_of(job(data, tmp_path / "local"), [])
    monkeypatch.setattr(
        place_check.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 100)
    )  # type: ignore[attr-defined]
    reply = answer(moved_to_host(begin(items, tmp_path / "local"), tmp_path, tmp_path / "remote"))
    assert "free some space" in reply["problem"]
    assert not (tmp_path / "remote").exists()


def test_directory_that_is_not_shared_is_reported(tmp_path: Path) -> None:
    proof = {"directory": str(tmp_path), "name": ".placement-x", "answer": ".placement-x-0"}
    look = {"action": "look", "items": [], "proofs": [proof]}
    assert (
        "is another directory than on the machine that starts the run"
        in answer(dict(look))["proofs"][0]
    )
    (tmp_path / ".placement-x").touch()
    assert "has other content than was written" in answer(dict(look))["proofs"][0]
    assert not (tmp_path / ".placement-x-0").exists()
    (tmp_path / ".placement-x").write_text(".placement-x")
    assert answer(dict(look)) == {"missing": [], "proofs": [None]}
    assert (tmp_path / ".placement-x-0").read_text() == ".placement-x"
    assert answer({**look, "proofs": [{**proof, "directory": f"{tmp_path}/x"}]})["proofs"] == [
        f"{tmp_path}/x is not there"
    ]


def test_directory_shared_in_one_direction_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host sees files of this host, but this host does not see files of the host."""
    monkeypatch.setattr(placement, "_SETTLES", 0.2)
    requests = []

    def run_on_hosts(ssh: Ssh, hosts: list[str], words: object, **rest: Any) -> list[HostResult]:
        requests.append(
            (hosts, {json.loads(question)["action"] for question in rest["stdin"].values()})
        )
        reply = json.dumps({"missing": [], "proofs": [None]}).encode()
        return [HostResult(host, 0, b"Welcome!\n" + reply + b"\n", "") for host in hosts]

    monkeypatch.setattr(placement, "run_on_hosts", run_on_hosts)
    with pytest.raises(
        LaunchError, match=r"host b: \.placement-.*-0, written there, is not in .*/run here, though"
    ):
        prepare_hosts(
            on_hosts(job(data, tmp_path / "run"), {"localhost": 1, "b": 1, "c": 1}), LaunchConfig()
        )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]
    assert requests == [(["b", "c"], {"look"}), (["b", "c"], {"clean"})], "one request to all hosts"


def test_invalid_answer_of_a_host_is_quoted() -> None:
    with pytest.raises(LaunchError, match="host b answers 'Please change your password' instead"):
        placement._answer(HostResult("b", 0, b"Please change your password\n", ""), known=True)
    with pytest.raises(
        LaunchError, match=r"host b does not say which files it has: .*No module named megacore"
    ):
        placement._answer(HostResult("b", 1, b"", "python: No module named megacore"), known=True)
    with pytest.raises(HostLostError, match="host b does not say"):
        placement._answer(HostResult("b", -1, b"", "", timed_out=True), known=True)


def test_job_on_this_host_sends_no_request(data: Path, tmp_path: Path) -> None:
    launch = LaunchConfig.model_construct(ssh_config="/nowhere")
    prepare_hosts(on_hosts(job(data, tmp_path / "run"), {"localhost": 2}), launch)


def test_rsync_command_quotes_paths(tmp_path: Path) -> None:
    ssh = Ssh(tmp_path / 'con fig"s')
    transfer = Transfer(
        "me@b", Path("/a b/$(touch x)"), ("f",), Path("/a b/$(touch x).tmp-copy-t"), 1
    )
    command = rsync_command(ssh, transfer, Path("/list"))
    assert command[-2:] == ["/a b/$(touch x)/", "me@b:/a b/$(touch x).tmp-copy-t/"]
    assert "--protect-args" in command
    (rsh,) = (word.removeprefix("--rsh=") for word in command if word.startswith("--rsh="))
    assert rsh.startswith(f'ssh -F "{tmp_path}/con fig""s" -o BatchMode=yes')


def test_missing_rsync_is_reported_with_its_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(place_copy.shutil, "which", lambda name: "/usr/bin/rsync")
    check_rsync("b", there=True)
    with pytest.raises(
        LaunchError, match="host b has no rsync, by which files are copied to b: install it there"
    ):
        check_rsync("b", there=False)
    monkeypatch.setattr(place_copy.shutil, "which", lambda name: None)
    with pytest.raises(LaunchError, match="this machine has no rsync"):
        check_rsync("b", there=True)


@pytest.mark.parametrize(("code", "error"), [(23, LaunchError), (30, HostLostError)])
def test_failure_of_rsync_is_reported_with_its_output(
    tmp_path: Path, code: int, error: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", f"import sys; print('rsync: some reason'); sys.exit({code})"]
    monkeypatch.setattr(place_copy, "rsync_command", lambda *_: command)
    with pytest.raises(
        error,
        match=rf"host b: {tmp_path} cannot be copied to /t by rsync \(code {code}\): rsync: some",
    ):
        Copier(Ssh()).copy({"b": [Transfer("b", tmp_path, ("f",), Path("/t"), 1)]})


def test_interruption_ends_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pid"
    sleeping = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(place_copy, "rsync_command", lambda *_: [sys.executable, "-c", sleeping])

    wait = place_copy.wait

    def interrupted(pending: set[Any], **options: Any) -> Any:
        if file.exists() and file.read_text():
            raise KeyboardInterrupt
        return wait(pending, **options)

    monkeypatch.setattr(place_copy, "wait", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Copier(Ssh()).copy({"b": [Transfer("b", tmp_path, ("f",), Path("/t"), 1)]})
    assert time.monotonic() - began < HANG
    assert (
        subprocess.run(["ps", "-p", file.read_text()], capture_output=True, check=False).returncode
        == 1
    )


def test_zero_shot_job_reads_model_tokenizer_and_texts(data: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "job.json").write_text("{}")
    (tmp_path / "lambada.jsonl").write_text("{}\n")
    checkpoint = save_checkpoint(tmp_path / "checkpoints", 7, {"model.a": torch.ones(3)}, {})
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text("{}")
    spec = job(data, tmp_path / "run").spec
    values: dict[str, Any] = {
        "exit_directory": str(scratch / "exit"),
        "ranks": 2,
        "threads_per_rank": 1,
        "tensor_model_parallel_size": 1,
        "precision": "fp32",
        "batch_size": 1,
        "output": str(scratch / "scores.json"),
        "tokenizer_directory": str(data / "index"),
        "settings": {"lambada": str(tmp_path / "lambada.jsonl")},
        "seq_length": 8,
    }
    for directory, exported in ((checkpoint, False), (tmp_path / "exported", True)):
        source = ModelSource(directory=str(directory), exported=exported, spec=spec)
        zero_shot = ZeroShotJob(**values, source=source)
        items = items_of(zero_shot, loaded_checkpoints(zero_shot))
        assert {item.directory for item in items} == {directory, data / "index", tmp_path, scratch}
        assert [item.checkpoint for item in items if item.directory == directory] == [not exported]
    prepare_hosts(on_hosts(zero_shot, {"localhost": 2}), LaunchConfig())
