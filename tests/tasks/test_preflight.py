"""Checks of a pretraining before its first stage."""

from pathlib import Path

import pytest

from megacore.cluster.hosts import hardware
from megacore.cluster.hosts.ssh import HostResult
from megacore.config import RunConfig
from megacore.errors import ConfigError, HostsSilentError
from tasks import preflight
from tasks._plan import DryRun
from tasks.train import train
from tests.train import _runs


def test_hosts_that_do_not_answer_leave_only_memory_and_days_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose stages are cached needs no hosts."""
    (tmp_path / "hosts").write_text("worker-1 slots=2\n")
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    monkeypatch.setattr(
        hardware,
        "run_on_hosts",
        lambda ssh, hosts, words, timeout: [
            HostResult(host, 255, b"", "No route to host") for host in hosts
        ],
    )
    launch = {"hostfile": str(tmp_path / "hosts"), "nproc_per_node": "auto"}
    config = _runs.config(launch=launch)
    assert preflight.check_machine(config).startswith(
        "memory and days are not checked: no host of launch.hostfile tells its GPUs and memory"
    )
    with pytest.raises(HostsSilentError, match=r"worker-1: ssh cannot reach it"):
        preflight.launch_commands(config, {})
    missing = {**launch, "ssh_config": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match=r"launch\.ssh_config"):
        preflight.check_machine(_runs.config(launch=missing))


def test_dry_run_of_an_empty_workspace_shows_the_stages_of_the_flow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.prepare_data import data_stages

    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path / "workspace"))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("text")
    blend = [
        {"weight": 0.5, "source": {"kind": "text", "files": [str(tmp_path / f"{name}.txt")]}}
        for name in "ab"
    ]
    values = _runs.config().model_dump(mode="json")
    values["data"] |= {"blend": blend, "curate": [{"step": "exact_dedup"}], "source": None}
    values["evaluate"] |= {
        "contamination": "remove",
        "zero_shot": {"lambada": str(tmp_path / "a.txt")},
    }
    plan = DryRun(RunConfig.model_validate(values))
    data = data_stages(plan)
    preflight.plan_publication(plan, plan.stage(train, data), data)
    several = ["collect", "curate", "search", "decontaminate"]
    assert [row["stage"] for row in plan.planned] == [
        *(name for stage in several for name in (stage, f"{stage} 2")),
        *("tokenizer", "tokenize", "tokenize 2", "blend", "index", "contamination", "train"),
        *("evaluate unigram", "evaluate", "zeroshot", "convert", "publish"),
    ]
    assert [row["key"] for row in plan.planned[2:6]] == [
        "known after collect",
        "known after collect 2",
        "known after curate",
        "known after curate 2",
    ]
    assert not plan.artifacts
