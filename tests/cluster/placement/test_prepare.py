"""What a job's files are, and what another machine is asked and does for them, without another
machine."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.artifact.build import StageKey, seal
from megacore.checkpoint.save import save_checkpoint
from megacore.cluster.hosts.ssh import HostResult, Ssh
from megacore.cluster.placement import check as place_check
from megacore.cluster.placement import files as place_copy
from megacore.cluster.placement import prepare as placement
from megacore.cluster.placement.check import answer
from megacore.cluster.placement.files import Copier, Transfer, check_rsync, rsync_command
from megacore.cluster.placement.prepare import prepare_hosts, prepare_model_hosts
from megacore.cluster.placement.reads import items_of, loaded_checkpoints, model_items_of
from megacore.config.launch import LaunchConfig
from megacore.errors import HostLostError, LaunchError
from megacore.jobs.model import ModelSource, ZeroShotJob
from megacore.jobs.run import EvaluateJob, TrainJob
from tests.train import _runs


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Tokens, tokenizer and index maps, the maps with a manifest."""
    _runs.write_data(tmp_path / "data", _runs.config())
    seal(tmp_path / "data" / "index", StageKey("index", 1, {}, {}), {}, 0.0)
    return tmp_path / "data"


def job(data: Path, run: Path, **sections: Any) -> TrainJob:
    (run).mkdir(parents=True, exist_ok=True)
    made = _runs.job(_runs.config(**sections), data, run)
    made.write(run / "run.json")
    return made


def elsewhere(question: dict[str, Any], here: Path, there: Path) -> dict[str, Any]:
    """A question about the files below `here`, for a machine whose files lie below `there`."""
    moved: dict[str, Any] = json.loads(json.dumps(question).replace(str(here), str(there)))
    return moved


def begin(items: list[Any], run: Path, keep: str = "") -> dict[str, Any]:
    told = {
        "proof": str(run / "no-proof"),
        "exit": str(run / "exit"),
        "root": str(run / "checkpoints"),
        "keep": keep,
    }
    return {
        "action": "begin",
        "items": [item.to_json() for item in items],
        "token": "t",
        "run": told,
    }


def test_a_job_reads_its_maps_tokens_tokenizer_and_job_file_and_a_checkpoint(
    data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    made = job(data, run)
    assert loaded_checkpoints(made) == []
    for iteration in (1, 2):
        save_checkpoint(run / "checkpoints", iteration, {"model.a": torch.ones(3)}, {})
    newest = run / "checkpoints" / "iter_0000002"
    assert loaded_checkpoints(made) == [newest]
    items = items_of(made, loaded_checkpoints(made))
    assert [(item.directory, item.whole) for item in items] == [
        (data / "index", True),
        (newest, True),
        (data, False),
        (run, False),
    ]
    assert sorted(items[2].entries) == ["tokens_text_document.bin", "tokens_text_document.idx"]
    assert sorted(items[1].entries) == [".metadata", "__0_0.distcp", "complete.json", "state.json"]
    assert list(items[3].entries) == ["run.json"]
    scored = EvaluateJob(
        **made.model_dump(), checkpoints=(str(newest),), output=str(run / "o.json")
    )
    assert loaded_checkpoints(scored) == [newest]


def test_a_run_without_checkpoints_loads_the_one_that_its_configuration_names(
    data: Path, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path / "other" / "checkpoints", 7, {"model.a": torch.ones(3)}, {})
    made = job(data, tmp_path / "run", resume={"checkpoint": str(path)})
    assert loaded_checkpoints(made) == [path]


def test_what_this_machine_lacks_is_said_before_others_are_asked(
    data: Path, tmp_path: Path
) -> None:
    made = job(data, tmp_path / "run")
    shutil.rmtree(data / "index")
    with pytest.raises(
        LaunchError, match=rf"index maps: {data}/index is not there on this machine"
    ):
        items_of(made, [])
    (data / "index").mkdir()
    (data / "index" / "manifest.json").write_text("{")
    with pytest.raises(LaunchError, match=r"index maps: .*manifest\.json is damaged"):
        items_of(made, [])


def test_a_crash_between_copying_and_renaming_leaves_nothing_that_looks_whole(
    data: Path, tmp_path: Path
) -> None:
    """The files are copied by hand here, as rsync does between the two questions."""
    items = items_of(job(data, tmp_path / "here"), [])
    there = tmp_path / "there"
    shutil.copytree(data, there / "data")
    wrong = there / "data" / "index" / "train_shuffle_idx.npy"
    (there / "data" / "index").mkdir(exist_ok=True)
    victim = sorted(path for path in (there / "data" / "index").iterdir() if path.suffix == ".npy")[
        0
    ]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    assert wrong.parent == victim.parent
    question = elsewhere(begin(items, tmp_path / "here"), tmp_path, there)
    said = answer(question)
    assert [sorted(each["wrong"]) for each in said["items"]] == [[victim.name], [], ["run.json"]]
    assert "has another content" in said["items"][0]["wrong"][victim.name]
    temporary = Path(said["items"][0]["temporary"])
    assert victim.name not in {path.name for path in temporary.iterdir()}
    shutil.copy(data / "index" / victim.name, temporary)  # and now the crash
    assert bytes(content) == victim.read_bytes()
    os.utime(temporary / victim.name)
    shutil.rmtree(temporary)
    again = answer(elsewhere(begin(items, tmp_path / "here"), tmp_path, there))
    shutil.copy2(data / "index" / victim.name, again["items"][0]["temporary"])
    asked = {
        "action": "finish",
        "items": [items[0].to_json()],
        "token": "t",
        "copied": [[victim.name]],
    }
    assert answer(elsewhere(asked, tmp_path, there)) == {}
    assert victim.read_bytes() == (data / "index" / victim.name).read_bytes()
    assert [path.name for path in (there / "data").glob("*.tmp-copy-*")] == []


def test_what_another_job_has_brought_meanwhile_is_left_to_it(data: Path, tmp_path: Path) -> None:
    (item, *_) = items_of(job(data, tmp_path / "here"), [])
    there = tmp_path / "there"
    for token in ("first", "second"):
        asked = elsewhere(begin([item], tmp_path / "here") | {"token": token}, tmp_path, there)
        (said,) = answer(asked)["items"]
        assert said["wrong"]
        shutil.copytree(item.directory, said["temporary"], dirs_exist_ok=True)
    finish = {"action": "finish", "items": [item.to_json()], "copied": [[*item.entries]]}
    finish = elsewhere(finish, tmp_path, there)
    target = Path(str(item.directory).replace(str(tmp_path), str(there)))
    assert answer(finish | {"token": "first"}) == {}
    before = target.stat().st_ino
    assert answer(json.loads(json.dumps(finish)) | {"token": "second"}) == {}
    assert target.stat().st_ino == before
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_file_that_arrives_damaged_is_refused(data: Path, tmp_path: Path) -> None:
    items = items_of(job(data, tmp_path / "here"), [])[:1]
    there = tmp_path / "there"
    said = answer(elsewhere(begin(items, tmp_path / "here"), tmp_path, there))
    names = list(said["items"][0]["wrong"])
    assert names == list(items[0].entries)
    target = Path(said["items"][0]["temporary"])
    for name in names:
        shutil.copy2(data / "index" / name, target / name)
    content = bytearray((target / names[0]).read_bytes())
    content[-1] ^= 1
    (target / names[0]).write_bytes(content)
    asked = {"action": "finish", "items": [items[0].to_json()], "token": "t", "copied": [names]}
    problem = answer(elsewhere(asked, tmp_path, there))["problem"]
    assert problem == (
        f"{there}/data/index/{names[0]} has another content than it should have after it was copied"
    )
    assert not (there / "data" / "index").exists()


def test_copies_that_were_broken_off_go_and_those_under_way_stay(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = items_of(job(data, tmp_path / "here"), [])[:1]
    other = data / "index.tmp-copy-of-another"
    other.mkdir()
    answer(begin(items, tmp_path / "here"))
    assert other.exists()
    now = time.time()
    monkeypatch.setattr(place_check.time, "time", lambda: now + 2 * place_check._STALE_SECONDS)
    answer(begin(items, tmp_path / "here"))
    assert not other.exists()


def test_the_very_files_of_this_machine_are_left_alone(data: Path, tmp_path: Path) -> None:
    """A host whose workspace is this machine's after all has every checkpoint of the run, and keeps
    it."""
    run = tmp_path / "run"
    made = job(data, run)
    for iteration in (1, 2):
        save_checkpoint(run / "checkpoints", iteration, {"model.a": torch.ones(3)}, {})
    items = items_of(made, loaded_checkpoints(made))
    asked = begin(items, run, keep="iter_0000002")
    (run / "no-proof").touch()
    said = answer(asked)
    assert not any(each["wrong"] for each in said["items"])
    assert sorted(path.name for path in (run / "checkpoints").glob("iter_*")) == [
        "iter_0000001",
        "iter_0000002",
    ]


def test_a_disk_without_room_is_said(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = items_of(job(data, tmp_path / "here"), [])
    monkeypatch.setattr(
        place_check.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 100)
    )  # type: ignore[attr-defined]
    said = answer(elsewhere(begin(items, tmp_path / "here"), tmp_path, tmp_path / "there"))
    assert "free some space" in said["problem"]
    assert not (tmp_path / "there").exists()


def test_a_directory_that_is_not_shared_is_said(tmp_path: Path) -> None:
    proof = {"directory": str(tmp_path), "name": ".placement-x", "answer": ".placement-x-0"}
    look = {"action": "look", "items": [], "proofs": [proof]}
    assert (
        "is another directory than on the machine that starts the run"
        in answer(dict(look))["proofs"][0]
    )
    (tmp_path / ".placement-x").touch()
    assert "has another content than was written" in answer(dict(look))["proofs"][0]
    assert not (tmp_path / ".placement-x-0").exists()
    (tmp_path / ".placement-x").write_text(".placement-x")
    assert answer(dict(look)) == {"missing": [], "proofs": [None]}
    assert (tmp_path / ".placement-x-0").read_text() == ".placement-x"
    assert answer({**look, "proofs": [{**proof, "directory": f"{tmp_path}/x"}]})["proofs"] == [
        f"{tmp_path}/x is not there"
    ]


def test_an_answer_that_this_machine_does_not_see_is_said(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads what is written here, and what it writes is not seen here: mounted the wrong
    way round."""
    monkeypatch.setattr(placement, "_SETTLES", 0.2)
    asked = []

    def run_on_hosts(ssh: Ssh, hosts: list[str], words: object, **rest: Any) -> list[HostResult]:
        asked.append(
            (hosts, {json.loads(question)["action"] for question in rest["stdin"].values()})
        )
        told = json.dumps({"missing": [], "proofs": [None]}).encode()
        return [HostResult(host, 0, b"Welcome!\n" + told + b"\n", "") for host in hosts]

    monkeypatch.setattr(placement, "run_on_hosts", run_on_hosts)
    with pytest.raises(
        LaunchError, match=r"host b: \.placement-.*-0, written there, is not in .*/run here, though"
    ):
        prepare_hosts(
            job(data, tmp_path / "run"), {"localhost": 1, "b": 1, "c": 1}, Ssh(), checkpoints=[]
        )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]
    assert asked == [(["b", "c"], {"look"}), (["b", "c"], {"clean"})], "all hosts at once"


def test_what_a_host_says_instead_of_an_answer_is_shown() -> None:
    with pytest.raises(LaunchError, match="host b answers 'Please change your password' instead"):
        placement._answer(HostResult("b", 0, b"Please change your password\n", ""), known=True)
    with pytest.raises(
        LaunchError, match=r"host b does not say which files it has: .*No module named megacore"
    ):
        placement._answer(HostResult("b", 1, b"", "python: No module named megacore"), known=True)
    with pytest.raises(HostLostError, match="host b does not say"):
        placement._answer(HostResult("b", -1, b"", "", timed_out=True), known=True)


def test_no_host_is_asked_where_only_this_machine_takes_part(data: Path, tmp_path: Path) -> None:
    prepare_hosts(
        job(data, tmp_path / "run"), {"localhost": 2}, Ssh(Path("/nowhere")), checkpoints=[]
    )


def test_rsync_has_each_path_as_one_word(tmp_path: Path) -> None:
    ssh = Ssh(tmp_path / 'con fig"s')
    transfer = Transfer(
        "me@b", Path("/a b/$(touch x)"), ("f",), Path("/a b/$(touch x).tmp-copy-t"), 1
    )
    words = rsync_command(ssh, transfer, Path("/list"))
    assert words[-2:] == ["/a b/$(touch x)/", "me@b:/a b/$(touch x).tmp-copy-t/"]
    assert "--protect-args" in words
    (rsh,) = (word.removeprefix("--rsh=") for word in words if word.startswith("--rsh="))
    assert rsh.startswith(f'ssh -F "{tmp_path}/con fig""s" -o BatchMode=yes')


def test_missing_rsync_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
def test_what_rsync_says_last_is_passed_on(
    tmp_path: Path, code: int, error: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [sys.executable, "-c", f"import sys; print('rsync: some reason'); sys.exit({code})"]
    monkeypatch.setattr(place_copy, "rsync_command", lambda *_: said)
    with pytest.raises(
        error,
        match=rf"host b: {tmp_path} cannot be copied to /t by rsync \(code {code}\): rsync: some",
    ):
        Copier(Ssh()).copy({"b": [Transfer("b", tmp_path, ("f",), Path("/t"), 1)]})


def test_what_interrupts_copying_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pid"
    sleeping = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(place_copy, "rsync_command", lambda *_: [sys.executable, "-c", sleeping])

    def interrupt() -> None:
        if file.exists() and file.read_text():
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Copier(Ssh()).copy({"b": [Transfer("b", tmp_path, ("f",), Path("/t"), 1)]}, poll=interrupt)
    assert time.monotonic() - began < 30
    assert (
        subprocess.run(["ps", "-p", file.read_text()], capture_output=True, check=False).returncode
        == 1
    )


def test_a_job_with_a_finished_model_reads_the_model_a_tokenizer_and_texts(
    data: Path, tmp_path: Path
) -> None:
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
        "wikitext": None,
        "lambada": str(tmp_path / "lambada.jsonl"),
        "seq_length": 8,
        "overlapping_eval": None,
    }
    for directory, exported in ((checkpoint, False), (tmp_path / "exported", True)):
        source = ModelSource(directory=str(directory), exported=exported, spec=spec)
        items = model_items_of(ZeroShotJob(**values, source=source))
        assert {item.directory for item in items} == {directory, data / "index", tmp_path, scratch}
        assert [item.checkpoint for item in items if item.directory == directory] == [not exported]
    prepare_model_hosts(
        ZeroShotJob(**values, source=source), {"localhost": 2}, Ssh(), LaunchConfig()
    )
