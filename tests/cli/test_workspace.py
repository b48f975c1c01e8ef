"""Commands on a workspace and its runs."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megacore.artifact import lock
from megacore.cli import app, main
from megacore.cli.init import write_new
from megacore.cluster.hosts import hardware as hosts_hardware
from megacore.cluster.hosts.ssh import HostResult
from megacore.config import load_config
from megacore.errors import ConfigError, FileAccessError, HostsSilentError, WorkspaceError
from megacore.hardware import Gpu, Hardware
from megacore.observe.heartbeat import ENDED, Heartbeat, beat_path


def test_an_empty_workspace_has_no_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["runs", "--workspace", str(tmp_path)])
    assert result.exit_code == 0
    assert "no runs yet" in result.output


def test_the_perplexity_of_a_diverged_run_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "name": "tiny",
        "state": "incomplete",
        "iteration": 40,
        "train_iters": 60,
        "valid_ppl": 3.049e51,
        "test_ppl": None,
        "metric": None,
        "size_bytes": 0,
        "updated": None,
        "path": "runs/aaaa",
    }
    monkeypatch.setattr("megacore.observe.runs.runs", lambda workspace: [row])
    output = CliRunner().invoke(app, ["runs", "--workspace", str(tmp_path)]).output
    assert "3.05e+51" in output
    assert "30490" not in output


def test_a_workspace_that_is_not_there_is_named_and_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGACORE_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert f"no runs yet in {tmp_path}/workspace:" in CliRunner().invoke(app, ["runs"]).output
    assert CliRunner().invoke(app, ["clean"]).exit_code == 0
    assert not list(tmp_path.iterdir())


def test_clean_lists_what_it_removes(tmp_path: Path) -> None:
    stale = tmp_path / "index" / "abcd.tmp-1"
    stale.mkdir(parents=True)
    dry = CliRunner().invoke(app, ["clean", "--workspace", str(tmp_path), "--dry-run"])
    assert "would remove 1 item, 0.0 MiB" in dry.output
    assert stale.exists()
    result = CliRunner().invoke(app, ["clean", "--workspace", str(tmp_path)])
    assert str(stale) in result.output
    assert not stale.exists()


def test_verify_says_that_a_workspace_has_nothing_to_check_yet(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 0
    assert f"{tmp_path} has nothing to check yet" in result.output


def test_a_read_only_place_of_a_new_configuration_is_named_with_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.yaml"

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{path}.tmp-1")

    monkeypatch.setattr("megacore.artifact.files.replace_file", refuse)
    with pytest.raises(WorkspaceError) as caught:
        write_new(target, "name: a\n", "--output")
    assert str(caught.value) == (
        f"cannot write {target}: Read-only file system: give another --output"
    )


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["clean", "--workspace", ""], "--workspace"),
        (["clean", "--workspace="], "--workspace"),
        (["index", "--data-prefix", "a", "--output", ""], "--output"),
        (["init", ""], "an argument"),
    ],
)
def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str
) -> None:
    stale = tmp_path / "index" / "abcd.tmp-1"
    stale.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"{name} is empty: give a value, or leave it out"
    assert stale.exists()


@pytest.mark.parametrize("command", ["runs", "clean"])
def test_a_missing_workspace_is_refused(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(app, [command, "--workspace", str(tmp_path / "typo")])
    assert isinstance(result.exception, WorkspaceError)
    assert not (tmp_path / "typo").exists()


def test_too_many_open_files_are_one_sentence_with_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "tokens.bin")

    monkeypatch.setattr("megacore.cli.app", fail)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == FileAccessError.exit_code
    assert capsys.readouterr().err == (
        "error: cannot read or write tokens.bin (Too many open files): this process has too many "
        "files open: raise the limit (`ulimit -n`)\n"
    )


def test_an_error_is_one_sentence_with_an_exit_code(tmp_path: Path) -> None:
    program = "from megacore.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "runs", "--workspace", str(tmp_path / "typo")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.returncode == WorkspaceError.exit_code
    assert (
        result.stderr
        == f"error: workspace {tmp_path / 'typo'} is no directory: correct --workspace\n"
    )


def test_plan_shows_stages_and_bubble() -> None:
    result = CliRunner().invoke(
        app, ["plan", "gpt2-tiny", "-o", "parallel.pipeline_model_parallel_size=2"]
    )
    assert result.exit_code == 0, result.output
    assert "tensor 1 x pipeline 2 x data 1 = 2 ranks; 2 micro batches of 8" in result.output
    assert "50.0% if all chunks cost the same" in result.output
    assert "embedding, 0-" in result.output


def test_plan_draws_the_schedule(tmp_path: Path) -> None:
    picture = tmp_path / "schedule.svg"
    result = CliRunner().invoke(app, ["plan", "gpt2-tiny", "--draw", str(picture)])
    assert (result.exit_code, result.output) == (0, f"wrote {picture}\n")
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


def test_plan_refuses_another_kind_of_picture(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["plan", "gpt2-tiny", "--draw", str(tmp_path / "schedule.pdf")]
    )
    assert isinstance(result.exception, ConfigError)
    assert list(tmp_path.iterdir()) == []


def test_plan_refuses_a_picture_without_a_place_before_it_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        pytest.fail("the plan was computed")

    monkeypatch.setattr("megacore.plan.pipeline.plan_pipeline", fail)
    picture = tmp_path / "nodir" / "schedule.svg"
    result = CliRunner().invoke(app, ["plan", "gpt2-tiny", "--draw", str(picture)])
    assert isinstance(result.exception, ConfigError)
    assert f"--draw is {picture}, but {tmp_path}/nodir is no directory" in str(result.exception)


def test_plan_shows_the_predicted_time_on_other_hardware() -> None:
    result = CliRunner().invoke(app, ["plan", "gpt2-13b-3d", "--hardware", "h100"])
    assert result.exit_code == 0, result.output
    assert "on 8 x NVIDIA H100 SXM5 80GB in bf16:" in result.output
    parts = ("compute", "tensor", "bubble", "messages", "data", "optimizer", "other")
    assert all(part in result.output for part in parts)
    assert "this machine has no GPU" not in result.output


def test_plan_is_of_the_hosts_of_the_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Hardware(96, 2**40, (Gpu("NVIDIA H100", 80 * 2**30, 132),) * 2, native_bf16=True)
    answer = json.dumps(gpus.to_json()).encode()
    silent = False

    def run(ssh: object, hosts: list[str], words: object, *, timeout: float) -> list[HostResult]:
        problem = "No route to host" if silent else ""
        return [HostResult(host, 255 if silent else 0, answer, problem) for host in hosts]

    monkeypatch.setattr(hosts_hardware, "run_on_hosts", run)
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path / "none"))  # it would keep the answer
    hosts_hardware._first_answer.cache_clear()
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-1 slots=2\nworker-2 slots=2\n", encoding="utf-8")
    options = ["gpt2-tiny", "-o", f"launch.hostfile={hosts}", "-o", "train.micro_batch_size=4"]
    result = CliRunner().invoke(app, ["plan", *options])
    assert "on 4 x NVIDIA H100 SXM5 80GB of host worker-1 in bf16: " in result.output
    assert "this machine" not in result.output
    result = CliRunner().invoke(app, ["plan", *options, "--search", "--gpus", "4"])
    assert result.output.startswith(f"the devices are those of host worker-1 of {hosts}\n")
    assert "4 devices" in result.output
    silent = True
    hosts_hardware._first_answer.cache_clear()
    refused = CliRunner().invoke(app, ["plan", *options])
    hosts_hardware._first_answer.cache_clear()
    assert isinstance(refused.exception, HostsSilentError)
    assert str(refused.exception).endswith("ssh, or name their hardware with --hardware")
    assert CliRunner().invoke(app, ["plan", *options, "--hardware", "h100"]).exit_code == 0


def test_plan_says_that_the_hosts_of_a_scheduler_are_not_known() -> None:
    options = ["gpt2-tiny", "-o", "launch.kind=slurm"]
    sentence = "the hosts of slurm are not known before a job starts: time and memory are those of"
    for search in ([], ["--search", "--gpus", "2"]):
        assert sentence in CliRunner().invoke(app, ["plan", *options, *search]).output
        named = CliRunner().invoke(app, ["plan", *options, *search, "--hardware", "h100"])
        assert named.exit_code == 0
        assert "not known" not in named.output


def test_plan_finds_a_layout_and_writes_it(tmp_path: Path) -> None:
    target, chart = tmp_path / "fast.yaml", tmp_path / "layouts.svg"
    command = ["plan", "gpt2-tiny", "--search", "--gpus", "2", "--hardware", "h100"]
    options = ["-o", "train.train_iters=77", "--price", "2", "--top", "3"]
    files = ["--write", str(target), "--chart", str(chart)]
    result = CliRunner().invoke(app, [*command, *options, *files])
    assert result.exit_code == 0, result.output
    assert "within 7.4% of measured ones" in result.output
    assert "cost" in result.output
    assert "is not a multiple of" in result.output  # a reason
    assert f"wrote {target}, which extends " in result.output
    assert chart.read_text(encoding="utf-8").startswith("<?xml")
    config = load_config(str(target))
    assert (config.name, config.train.train_iters) == ("fast", 77)
    assert config.launch.nproc_per_node == 2
    written = target.read_bytes()
    again = CliRunner().invoke(app, [*command, *files])
    assert isinstance(again.exception, ConfigError)
    assert "exists and is not overwritten: give another --write" in str(again.exception)
    assert target.read_bytes() == written


def test_a_written_layout_of_several_hosts_plans_to_the_time_of_the_search(tmp_path: Path) -> None:
    target, hosts = tmp_path / "large.yaml", tmp_path / "large.hosts"
    options = ["--hardware", "h100", "--search", "--gpus", "16", "--write", str(target)]
    result = CliRunner().invoke(app, ["plan", "gpt2-tiny", *options])
    assert result.exit_code == 0, result.output
    assert f"{hosts}: replace its 2 names before a start" in result.output.replace("\n", "")
    assert hosts.read_text().splitlines()[1:] == ["host-1 slots=8", "host-2 slots=8"]
    searched = re.search(r": ([\d.e-]+) s for an iteration", target.read_text())
    planned = CliRunner().invoke(app, ["plan", str(target), "--hardware", "h100"])
    assert planned.exit_code == 0, planned.output
    assert searched is not None
    assert f"on 16 x NVIDIA H100 SXM5 80GB in bf16: {searched[1]} s" in planned.output
    target.unlink()
    again = CliRunner().invoke(app, ["plan", "gpt2-tiny", *options])
    assert f"{hosts} exists and is not overwritten" in str(again.exception)
    assert not target.exists()


def test_a_search_for_another_batch_does_not_need_the_layout_of_the_file(tmp_path: Path) -> None:
    target = tmp_path / "found.yaml"
    options = ["-o", "train.global_batch_size=512", "--search", "--gpus", "8", "--hardware", "h100"]
    files = ["--write", str(target)]
    result = CliRunner().invoke(app, ["plan", "codeparrot-small", *options, *files])
    assert result.exit_code == 0, result.exception  # 512 is no multiple of the file's 12 x 8
    config = load_config(str(target))
    assert 512 % (8 * config.train.micro_batch_size) == 0
    engine = ["-o", "engine=deepspeed"]  # the file has fp16, which DeepSpeed has from stage 1 on
    result = CliRunner().invoke(app, ["plan", "gpt2-345m", *engine, *options])
    assert result.exit_code == 0, result.exception


def test_a_layout_is_not_written_for_another_number_of_slots(tmp_path: Path) -> None:
    hosts, target = tmp_path / "hosts", tmp_path / "found.yaml"
    hosts.write_text("a slots=8\nb slots=8\n", encoding="utf-8")
    command = ["plan", "gpt2-tiny", "-o", f"launch.hostfile={hosts}", "--search"]
    options = ["--hardware", "h100", "--write", str(target), "--gpus"]
    refused = CliRunner().invoke(app, [*command, *options, "8"])
    assert f"--gpus is 8 and {hosts} has 16 slots" in str(refused.exception)
    assert not target.exists()
    assert CliRunner().invoke(app, [*command, *options, "16"]).exit_code == 0
    assert target.exists()


def test_plan_predicts_a_table(tmp_path: Path) -> None:
    source, output = tmp_path / "runs.csv", tmp_path / "out.csv"
    source.write_text(
        "layers,hidden,heads,seq,gpu,gpus,micro_batch,global_batch\n"
        "24,1024,16,1024,h100,8,4,64\n24,1024,16,1024,h100,8,5,64\n"
    )
    result = CliRunner().invoke(app, ["plan", "--table", str(source), "--output", str(output)])
    assert (result.exit_code, result.output) == (0, f"2 rows, 1 refused, wrote {output}\n")
    assert len(output.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give either the name of a configuration"),
        (["gpt2-tiny", "--table", "a.csv"], "not both"),
        (["--table", "a.csv"], "--table needs --output"),
        (["gpt2-tiny", "--output", "a.csv"], "--output given without --table"),
        (["--table", "a.csv", "--output", "b.csv", "--search"], "--search given with --table"),
        (["gpt2-tiny", "--search"], "--search needs the number of GPUs"),
        (["gpt2-tiny", "--gpus", "8", "--price", "2"], "--gpus, --price given without --search"),
        (["gpt2-tiny", "--search", "--gpus", "8", "--draw", "a.svg"], "use --chart"),
        (
            ["gpt2-tiny", "--search", "--gpus", "8", "-o", "parallel.delay_weight_gradients=true"],
            "; --search chooses parallel.delay_weight_gradients itself: leave",
        ),
        (["gpt2-tiny", "--search", "--gpus", "8", "--chart", "a.pdf"], "--chart a.pdf: pictures"),
        (["gpt2-tiny", "--search", "--gpus", "8", "--write", "no/a.yaml"], "no is no directory"),
    ],
)
def test_plan_refuses_options_that_contradict(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert problem in str(result.exception)


def test_plan_refuses_more_gpus_than_it_can_search() -> None:
    arguments = ["plan", "gpt2-tiny", "--search", "--hardware", "h100", "--gpus"]
    result = CliRunner().invoke(app, [*arguments, "1000001"])
    assert result.exit_code == 2
    assert "--gpus" in result.output
    largest = CliRunner().invoke(app, [*arguments, "1000000"])
    assert "no layout of gpt2-tiny on 1000000 devices" in str(largest.exception)


def test_stop_ends_the_run_of_that_name_or_path(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "aaaa"
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(
        json.dumps({"config": {"name": "gpt2-test", "train": {"train_iters": 50}}})
    )
    (directory / "events.jsonl").touch()
    refused = CliRunner().invoke(app, ["stop", "gpt2-test", "--workspace", str(tmp_path)])
    assert isinstance(refused.exception, ConfigError)
    assert not (directory / "stop").exists()
    with lock(directory):  # the training task holds this lock
        stopped = CliRunner().invoke(app, ["stop", "gpt2-test", "--workspace", str(tmp_path)])
        assert stopped.exit_code == 0
        assert f"{directory} will save and end" in stopped.output
        assert (directory / "stop").exists()
        (directory / "stop").unlink()
        assert CliRunner().invoke(app, ["stop", str(directory)]).exit_code == 0
        assert (directory / "stop").exists()


def test_stop_leaves_no_file_if_nothing_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other, idle = tmp_path / "some-name", tmp_path / "runs" / "aaaa"
    other.mkdir()
    idle.mkdir(parents=True)
    (idle / "run.json").write_text(
        json.dumps({"config": {"name": "gpt2-test", "train": {"train_iters": 50}}})
    )
    for name, message in [
        ("some-name", "no run is 'some-name'"),
        ("gpt2-test", "aaaa (gpt2-test, incomplete) in "),
        (str(idle), f"nothing trains in {idle}"),
    ]:
        refused = CliRunner().invoke(app, ["stop", name, "--workspace", str(tmp_path)])
        assert isinstance(refused.exception, ConfigError)
        assert message in str(refused.exception)
    assert not list(tmp_path.rglob("stop"))
    heartbeat = Heartbeat(beat_path(idle / "exit", 0))  # a rank started by hand with torchrun
    assert CliRunner().invoke(app, ["stop", str(idle)]).exit_code == 0
    assert (idle / "stop").exists()
    heartbeat.beat(ENDED)
    assert isinstance(CliRunner().invoke(app, ["stop", str(idle)]).exception, ConfigError)
