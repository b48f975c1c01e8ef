"""Joining the process group: mesh, heartbeat and refused layouts."""

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megacore.errors import (
    ConfigError,
    LaunchError,
    LossError,
    ParallelLayoutError,
    PreemptedError,
)
from megacore.hardware import DEVICE_VARIABLE
from megacore.observe.heartbeat import beat_path, read_heartbeat
from megacore.ranks.process import choose_device, join_group, joined, set_up_arithmetic
from tests.train import _runs

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "TORCHINDUCTOR_DETERMINISTIC")
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def restore_arithmetic_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*VARIABLES, QUEUES):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    threads, fill = torch.get_num_threads(), torch.utils.deterministic
    filled = fill.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    fill.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def test_single_rank_gets_a_mesh_with_timers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(_runs.job(_runs.config(), tmp_path, tmp_path)) as (mesh, device):
        assert mesh.world_size == 1
        assert mesh.timers is not None
        assert device.type in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("error", "phase"),
    [
        (None, "ended"),
        (PreemptedError("stopped"), "ended"),
        (LossError("the loss is nan"), "optimizer"),
    ],
)
def test_heartbeat_ends_unless_the_rank_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, phase: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    job = _runs.job(_runs.config(), tmp_path, tmp_path)
    path = beat_path(Path(job.exit_directory), 0)
    with pytest.raises(type(error)) if error else nullcontext(), joined(job) as (mesh, _):
        begun = read_heartbeat(path)
        assert begun is not None
        assert begun.phase == "build"
        mesh.beat("optimizer", 5)
        if error:
            raise error
    ended = read_heartbeat(path)
    assert ended is not None
    assert (ended.phase, ended.iteration) == (phase, 5)


@pytest.mark.parametrize(
    ("parallel", "model", "ranks", "message"),
    [
        ({"tensor_model_parallel_size": 2}, {}, 3, r"3 ranks are not a multiple of"),
        (
            {},
            {},
            8,
            (
                r"global_batch_size 8 is not a multiple of train\.micro_batch_size 2 x 8 "
                r"data-parallel ranks = 16"
            ),
        ),
        (
            {"tensor_model_parallel_size": 2},
            {"make_vocab_size_divisible_by": 1},
            2,
            (
                r"padded vocabulary of 61 entries .* \(now 1\) to 2, or use tensor 1 x pipeline 2 "
                r"x data 1"
            ),
        ),
    ],
)
def test_impossible_layout_is_refused_before_the_rendezvous(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: dict[str, int],
    model: dict[str, int],
    ranks: int,
    message: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    run = _runs.config(parallel=parallel, model=model, launch={"nproc_per_node": "auto"})
    job = _runs.job(run, tmp_path, tmp_path, ranks=ranks)
    with pytest.raises(ParallelLayoutError, match=message), joined(job):
        raise AssertionError("the rank joined")
    assert not dist.is_initialized()


def test_arithmetic_is_fast_unless_it_must_be_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(_runs.job(_runs.config(), tmp_path, tmp_path)):
        assert not torch.are_deterministic_algorithms_enabled()
        assert not any(os.environ.get(name) for name in VARIABLES)
    strict = _runs.config(train={"deterministic": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("megacore.ranks.process.choose_device", lambda: torch.device("cpu"))
    with joined(_runs.job(strict, tmp_path, tmp_path)):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"


@pytest.mark.parametrize(
    ("variable", "refused", "accepted"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":16:8"),
        ("TORCHINDUCTOR_DETERMINISTIC", "0", "1"),
        ("NCCL_ALGO", "NVLS,Ring", "Ring"),
        ("NCCL_ALGO", "^Ring", "^NVLS,NVLSTree"),
        ("NCCL_ALGO", "allreduce:nvls;broadcast:ring", "allreduce:^nvls;broadcast:ring"),
    ],
)
def test_a_variable_that_makes_runs_differ_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, refused: str, accepted: str
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(variable, refused)
    with pytest.raises(ConfigError, match=f"^{variable} is {re.escape(refused)}, .* unset it"):
        set_up_arithmetic(threads, deterministic=True)
    set_up_arithmetic(threads)
    monkeypatch.setenv(variable, accepted)
    set_up_arithmetic(threads, deterministic=True)
    assert os.environ[variable] == accepted


def test_tf32_is_used_only_on_request_and_where_there_is_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(ConfigError, match=r"train\.tf32 is true, and this host has no GPU"):
        set_up_arithmetic(threads, tf32=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("megacore.ranks.process.cuda_capability", lambda: 75)
    with pytest.raises(ConfigError, match="Ampere"):
        set_up_arithmetic(threads, tf32=True)
    monkeypatch.setattr("megacore.ranks.process.cuda_capability", lambda: 80)
    set_up_arithmetic(threads, tf32=True)
    assert torch.get_float32_matmul_precision() == "high"
    set_up_arithmetic(threads)
    assert torch.get_float32_matmul_precision() == "highest"


def test_host_whose_gpus_cannot_be_used_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("megacore.doctor.toolchain.driver_cuda", lambda: None)
    monkeypatch.setattr("socket.gethostname", lambda: "node-5")
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    assert choose_device() == torch.device("cpu")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(LaunchError, match=r"torch can use none of host node-5: see nvidia-smi"):
        choose_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(LaunchError, match=r"node-5 \(CUDA_VISIBLE_DEVICES is ''\): see"):
        choose_device()


@pytest.mark.parametrize(
    ("build", "driver", "sentence"),
    [
        (
            None,
            13000,
            "is built without CUDA, and its driver runs CUDA 13.0: take make venv TORCH=",
        ),
        ("13.0", 12080, "is built for CUDA 13.0, and its driver runs CUDA 12.8: take make venv "),
        ("13.0", 13000, "torch can use none of host node-5: see nvidia-smi"),
    ],
)
def test_a_torch_that_the_driver_cannot_run_is_named(
    monkeypatch: pytest.MonkeyPatch, build: str | None, driver: int, sentence: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr("megacore.doctor.toolchain.driver_cuda", lambda: driver)
    monkeypatch.setattr("socket.gethostname", lambda: "node-5")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(LaunchError, match=r"^the job is for GPUs.* host node-5") as caught:
        choose_device()
    assert sentence in str(caught.value)


def test_rank_without_a_gpu_names_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    monkeypatch.setattr("socket.gethostname", lambda: "node-5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "7")
    with pytest.raises(
        ParallelLayoutError, match=r"local rank 7 has .* torch can use 7 of host node-5: set "
    ):
        choose_device()


@pytest.mark.parametrize(("bound", "expected"), [(True, torch.device("cuda", 0)), (False, None)])
def test_groups_have_a_timeout_and_may_be_bound_to_the_gpu(
    monkeypatch: pytest.MonkeyPatch, bound: bool, expected: torch.device | None
) -> None:
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **named: calls.append(named))
    join_group(torch.device("cuda", 0), bound=bound)
    join_group(torch.device("cpu"), bound=bound)
    assert [call["device_id"] for call in calls] == [expected, None]
    assert {call["timeout"] for call in calls} == {timedelta(minutes=30)}


@pytest.mark.parametrize(
    ("pipeline", "value", "refused"),
    [(2, "1", True), (2, "many", True), (2, "32", False), (2, None, False), (1, "1", False)],
)
def test_a_pipeline_refuses_fewer_hardware_queues_than_streams(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: int,
    value: str | None,
    refused: bool,
) -> None:
    if value is not None:
        monkeypatch.setenv(QUEUES, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("megacore.ranks.process.choose_device", lambda: torch.device("cuda", 0))

    class JoinedError(Exception):
        """The rank is at the rendezvous."""

    def join(device: torch.device, *, bound: bool) -> None:
        assert bound == (pipeline == 1)
        assert int(os.environ[QUEUES]) >= int(value or 12)
        raise JoinedError

    monkeypatch.setattr("megacore.ranks.process.join_group", join)
    monkeypatch.setattr("megacore.ranks.process.Timers", lambda *_: None)
    run = _runs.config(
        parallel={"pipeline_model_parallel_size": pipeline}, launch={"nproc_per_node": "auto"}
    )
    message = f"^{QUEUES} is {value}, and the 12 streams .*: unset it, or set it to 12 or more"
    with (
        pytest.raises(ConfigError, match=message) if refused else pytest.raises(JoinedError),
        joined(_runs.job(run, tmp_path, tmp_path, ranks=2)),
    ):
        raise AssertionError("the rank joined")
