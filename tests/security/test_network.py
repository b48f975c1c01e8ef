"""Servers and ranks listen on loopback, unless the job runs on several hosts."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.cluster.start import local_deepspeed_command as deepspeed_command
from megacore.cluster.start import local_torchrun_command, rank_environment

ROOT = Path(__file__).resolve().parents[2]


def test_servers_listen_on_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import servers

    from megacore.artifact import Workspace

    assert servers.HOST == "127.0.0.1"
    started: list[list[str]] = []
    for name in ("_wait_healthy", "_wait_ended", "create_store", "_write_prefect_toml"):
        monkeypatch.setattr(servers, name, lambda *arguments: None)
    monkeypatch.setattr(servers.asyncio, "run", lambda coroutine: coroutine.close())
    monkeypatch.setattr(
        servers,
        "_launch",
        lambda known, workspace, name, command: started.append(command),
    )
    known = servers.Servers("token", "http://127.0.0.1:1", "http://127.0.0.1:2", {"deploy": None})
    for name in (
        "PREFECT_API_URL",
        "PREFECT_SERVER_UI_API_URL",
        "PREFECT_WORKER_QUERY_SECONDS",
        "PWD",
    ):
        monkeypatch.setenv(name, "")
    for name in ("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "PYTHONPATH", "PYTHONUNBUFFERED"):
        monkeypatch.setenv(name, "")
    servers._start_all(known, Workspace(tmp_path), 1, 2)
    listening = [command for command in started if "--host" in command]
    assert len(listening) == 2, "Prefect and MLflow"
    assert {command[command.index("--host") + 1] for command in listening} == {"127.0.0.1"}
    worker = next(command for command in started if "worker" in command)
    assert "--with-healthcheck" not in worker, "its health check would listen"


def test_ranks_of_one_host_meet_on_loopback(tmp_path: Path) -> None:
    command = local_torchrun_command("m", tmp_path / "c.json", 2)
    assert "--local-addr=127.0.0.1" in command
    assert "--master_addr=127.0.0.1" in deepspeed_command("m", tmp_path / "c.json", 2)
    assert rank_environment(1)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(1, one_machine=False)


def test_rendezvous_of_torchrun_is_a_new_file_and_no_network_store(tmp_path: Path) -> None:
    stale = tmp_path / ".rendezvous-old"
    stale.write_text("an earlier attempt's")
    first, second = (local_torchrun_command("m", tmp_path / "c.json", 2) for _ in range(2))
    (endpoint,) = (word.partition("=")[2] for word in first if word.startswith("--rdzv-endpoint="))
    assert Path(endpoint).parent == tmp_path
    assert any(word.startswith("--rdzv-conf=store_type=file,") for word in first)
    assert endpoint not in " ".join(second), (
        "a restarted run must not join the rendezvous of its earlier attempt"
    )
    assert not stale.exists()


def test_dask_cluster_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    from megacore.config import load_config
    from tasks.tokenize import shard_runner

    monkeypatch.setitem(
        sys.modules, "prefect_dask", SimpleNamespace(DaskTaskRunner=lambda **options: options)
    )
    runner: Any = shard_runner(
        load_config("gpt2-tiny", {"data.shard_runner": "dask", "data.shard_mb": 1}).data
    )
    assert runner["cluster_kwargs"]["host"] == "127.0.0.1"
    assert runner["cluster_kwargs"]["dashboard_address"] is None, (
        "Dask's dashboard would listen on all interfaces"
    )
