import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacore.config import RunConfig, load_config
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.hardware import Gpu, Hardware
from megacore.plan.pipeline import plan_pipeline
from megacore.plan.preflight import checkpoints_on_disk, preflight, resolve_launch

GIB = 2**30
CPU = Hardware(8, 64 * GIB, cpu_flags=frozenset({"avx2"}))
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB)
VOCAB_SIZE = 50_257


def conf(name: str, **overrides: object) -> RunConfig:
    return load_config(name, {key.replace("__", "."): value for key, value in overrides.items()})


def test_fp16_without_a_gpu_is_refused_with_memory_and_days() -> None:
    message = r"train\.precision is fp16.*gpt2-345m.*7\.\d GiB.*days.*launch\.allow_cpu"
    with pytest.raises(ConfigError, match=message):
        preflight(conf("gpt2-345m"), VOCAB_SIZE, CPU)


def test_allow_cpu_permits_fp16_on_cpus() -> None:
    report = preflight(conf("gpt2-345m", launch__allow_cpu=True), VOCAB_SIZE, CPU)
    assert (report.device_type, report.precision) == ("cpu", "fp16")
    assert report.time.days > 1000


@pytest.mark.parametrize("allow_cpu", [False, True])
def test_deepspeed_refuses_fp16_on_cpus(allow_cpu: bool) -> None:
    message = (
        r"which DeepSpeed has only on GPUs.* GiB.*precision to auto, or engine to native and "
        r"launch\.allow_cpu"
    )
    with pytest.raises(ConfigError, match=message):
        preflight(conf("gpt2-345m-zero1", launch__allow_cpu=allow_cpu), VOCAB_SIZE, CPU)


def test_a_long_run_on_cpus_is_refused_unless_allowed() -> None:
    with pytest.raises(ConfigError, match=r"sized for GPUs.*days.*train\.train_iters \(500000\)"):
        preflight(conf("gpt2-345m", train__precision="auto"), VOCAB_SIZE, CPU)
    report = preflight(
        conf("gpt2-345m", train__precision="auto", launch__allow_cpu=True), VOCAB_SIZE, CPU
    )
    assert report.precision == "fp32"


def test_gpt2_tiny_is_accepted_on_two_cores() -> None:
    report = preflight(conf("gpt2-tiny"), 8192, Hardware(2, 8 * GIB, cpu_flags=frozenset({"avx2"})))
    assert (report.ranks, report.threads_per_rank, report.precision) == (2, 1, "fp32")
    assert report.time.days < 0.1
    assert "1.9 M parameters on 2 CPU ranks x 1 threads in fp32" in report.summary()


@pytest.mark.parametrize("allow_cpu", [False, True])
def test_insufficient_memory_is_refused_with_advice(allow_cpu: bool) -> None:
    small = Hardware(2, 1 * GIB, cpu_flags=frozenset({"avx2"}))
    config = conf(
        "gpt2-tiny",
        train__micro_batch_size=64,
        train__global_batch_size=128,
        launch__allow_cpu=allow_cpu,
    )
    message = (
        r"this machine has 0\.5 GiB per rank: this suffices: launch\.nproc_per_node: 2 -> 1 "
        r"\(predicted 898"
    )
    with pytest.raises(ConfigError, match=message):
        preflight(config, 8192, small)


def test_345m_fits_an_a100_and_not_a_small_gpu() -> None:
    report = preflight(
        conf("gpt2-345m"), VOCAB_SIZE, Hardware(16, 64 * GIB, (A100,), native_bf16=True)
    )
    assert (report.device_type, report.precision, report.memory_available) == (
        "cuda",
        "fp16",
        80 * GIB,
    )
    with pytest.raises(ConfigError, match=r"7\.\d GiB.*has 6\.0 GiB"):
        preflight(conf("gpt2-345m"), VOCAB_SIZE, Hardware(16, 64 * GIB, (Gpu("small", 6 * GIB),)))


def test_auto_precision_follows_the_hardware() -> None:
    gpu = Hardware(16, 64 * GIB, (A100,), native_bf16=True)
    config = conf("gpt2-tiny", launch__nproc_per_node=1)
    assert preflight(config, 8192, gpu).precision == "bf16"
    assert preflight(config, 8192, CPU).precision == "fp32"


def test_auto_ranks_are_one_per_gpu_else_one() -> None:
    config = conf(
        "gpt2-tiny",
        launch__nproc_per_node="auto",
        train__global_batch_size=64,
        train__micro_batch_size=4,
    )
    assert resolve_launch(config, CPU) == (1, 8)
    assert resolve_launch(config, Hardware(16, 64 * GIB, (A100,) * 4)) == (4, 4)


def test_auto_ranks_without_a_gpu_are_one_replica() -> None:
    sizes = {"parallel__tensor_model_parallel_size": 2, "parallel__pipeline_model_parallel_size": 2}
    config = conf("gpt2-tiny", launch__nproc_per_node="auto", **sizes)
    assert resolve_launch(config, CPU) == (4, 2)
    assert resolve_launch(config, Hardware(16, 64 * GIB, (A100,) * 8)) == (8, 2)
    with pytest.raises(
        ParallelLayoutError,
        match=r"6 ranks are not a multiple .* = 4 ranks per replica: set launch",
    ):
        resolve_launch(config, Hardware(16, 64 * GIB, (A100,) * 6))


def test_the_summary_shows_the_layout_and_memory_is_divided() -> None:
    sizes = {"parallel__tensor_model_parallel_size": 2, "parallel__pipeline_model_parallel_size": 2}
    eight = Hardware(64, 512 * GIB, (A100,) * 8)
    plain, divided = (
        preflight(conf("gpt2-345m-8gpu", **each), VOCAB_SIZE, eight) for each in ({}, sizes)
    )
    assert "on 8 GPU ranks in fp16" in plain.summary()
    assert "on 8 GPU ranks (tensor 2 x pipeline 2 x data 2) in fp16" in divided.summary()
    assert divided.parameters == plain.parameters == 354_871_296
    assert divided.memory.weights < 0.35 * plain.memory.weights
    assert plain.time.days < divided.time.days < 2 * plain.time.days
    sharded = preflight(
        conf("gpt2-345m-8gpu", parallel__data_parallel_sharding="optimizer"), VOCAB_SIZE, eight
    )
    assert sharded.memory.optimizer == plain.memory.optimizer / 8


def test_the_padded_vocabulary_is_checked_against_the_layout(tmp_path: Path) -> None:
    three = {
        "parallel__tensor_model_parallel_size": 3,
        "model__num_attention_heads": 6,
        "model__hidden_size": 96,
    }
    message = (
        r"padded vocabulary of 8192 entries is not a multiple of "
        r"parallel\.tensor_model_parallel_size 3: set model"
    )
    with pytest.raises(ParallelLayoutError, match=message):
        preflight(conf("gpt2-tiny", launch__nproc_per_node="auto", **three), 8192, CPU)
    fits = conf(
        "gpt2-tiny", launch__nproc_per_node="auto", model__make_vocab_size_divisible_by=384, **three
    )
    assert preflight(fits, 8192, CPU).ranks == 3
    hub = {"kind": "hf", "name": "openai-community/gpt2"}
    unknown = conf("gpt2-tiny", launch__nproc_per_node="auto", data__tokenizer=hub, **three)
    assert preflight(unknown, 50_000, CPU).ranks == 3
    with pytest.raises(ParallelLayoutError, match="padded vocabulary of 50048 entries"):
        resolve_launch(unknown, CPU, 50_000)


def test_advice_on_memory_is_estimated_for_the_host() -> None:
    small = Hardware(64, 512 * GIB, (Gpu("small", 2 * GIB),) * 8)
    with pytest.raises(
        ConfigError,
        match=r"no single setting suffices, these save most: .* -> .* \(predicted 7\.84 -> ",
    ):
        preflight(conf("gpt2-345m-8gpu"), VOCAB_SIZE, small)
    larger = Hardware(64, 512 * GIB, (Gpu("larger", 10 * GIB),) * 8)
    with pytest.raises(ConfigError, match="any of these suffices: ") as caught:
        preflight(conf("gpt2-345m-8gpu", train__recompute="selective"), VOCAB_SIZE, larger)
    assert "launch.nproc_per_node" not in str(caught.value)


def test_plan_and_preflight_divide_host_memory_by_the_same_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Hardware(64, 512 * GIB, (A100,) * 2)
    config = conf("gpt2-345m", launch__nproc_per_node=1)
    shares = []
    monkeypatch.setattr(
        "megacore.plan.pipeline.lighter_recompute",
        lambda config, deployment, room: shares.append(deployment.host),
    )
    plan_pipeline(config, VOCAB_SIZE, two)
    assert shares == [preflight(config, VOCAB_SIZE, two).host_available]


def test_a_lighter_recomputation_that_fits_is_named() -> None:
    def lighter(memory: float, **values: object) -> str | None:
        gpu = Hardware(64, 512 * GIB, (Gpu("a GPU", int(memory * GIB)),), native_bf16=True)
        return preflight(conf("gpt2-345m", **values), VOCAB_SIZE, gpu).lighter

    sentence = "train.recompute none fits, too: about 10.3 GiB of 80.0 GiB per rank; full is slower"
    assert lighter(80) == sentence
    h100 = Hardware(64, 512 * GIB, (A100,))
    report = preflight(conf("gpt2-345m"), VOCAB_SIZE, h100)
    assert report.report() == f"{report.summary()}\n{sentence}"
    assert plan_pipeline(conf("gpt2-345m"), VOCAB_SIZE, h100).lighter == sentence
    assert lighter(11) is None  # less than a tenth would be free
    assert lighter(80, train__recompute="none") is None
    some = lighter(80, train__recompute="selective", train__recompute_num_layers=3)
    assert some is not None
    assert some.endswith("; selective is slower")


def test_cuda_graphs_need_a_gpu_and_memory_of_a_validation() -> None:
    h100 = Hardware(64, 512 * GIB, (A100,))
    with_graph, without = (
        preflight(conf("gpt2-345m", train__cuda_graphs=each), VOCAB_SIZE, h100).memory
        for each in (True, False)
    )
    logits = 4 * 1024 * 50_304 * 2
    assert logits < with_graph.total - without.total < 1.5 * logits
    with pytest.raises(ConfigError, match=r"^train\.cuda_graphs is true, which needs a GPU"):
        preflight(
            conf("gpt2-345m", train__cuda_graphs=True, launch__allow_cpu=True), VOCAB_SIZE, CPU
        )


@pytest.mark.parametrize(
    ("changes", "hardware", "sentence"),
    [
        (
            {"train__precision": "fp32", "train__tf32": True},
            CPU,
            "train.tf32 is true, which needs a GPU, and this machine has none: set it to false",
        ),
        (
            {"train__kernels": {"norm": "apex"}},
            CPU,
            "train.kernels.norm is apex, which runs on GPUs only, and this machine has none: give",
        ),
        (
            {"train__precision": "fp32", "train__kernels": {"rope": "cpp"}},
            Hardware(64, 512 * GIB, (A100,)),
            "train.kernels.rope is cpp, which runs on CPUs only, and this machine has GPUs: give",
        ),
    ],
)
def test_options_for_another_device_are_refused(
    changes: dict[str, Any], hardware: Hardware, sentence: str
) -> None:
    config = conf("gpt2-345m", launch__allow_cpu=True, **changes)
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        preflight(config, VOCAB_SIZE, hardware)


def test_the_summary_shows_the_zero_stage_and_offloaded_memory() -> None:
    eight = Hardware(64, 512 * GIB, (A100,) * 8, native_bf16=True)
    assert "x data 2) in bf16 with deepspeed ZeRO-1: about 46.0 GiB of 80.0 GiB per rank, " in (
        preflight(conf("gpt2-13b-3d"), VOCAB_SIZE, eight).summary()
    )
    card = Hardware(16, 64 * GIB, (Gpu("NVIDIA GeForce RTX 3090", 24 * GIB),))
    report = preflight(conf("gpt2-xl-zero3-offload"), VOCAB_SIZE, card)
    assert (
        "1557.7 M parameters on 1 GPU rank in fp16 with deepspeed ZeRO-3, optimizer on cpu, "
        "weights on cpu: about 7.8 GiB of 24.0 GiB per rank and 31.9 GiB of 64.0 GiB of host "
        "memory, "
    ) in report.summary()
    disk = {"deepspeed__offload_optimizer": "nvme", "deepspeed__nvme_path": "/"}
    with_disk = preflight(conf("gpt2-xl-zero3-offload", **disk), VOCAB_SIZE, card).summary()
    assert " of host memory and 17.4 GiB on NVMe, " in with_disk


def test_host_memory_for_offloading_is_checked() -> None:
    card = Hardware(16, 30 * GIB, (Gpu("NVIDIA GeForce RTX 3090", 24 * GIB),))
    with pytest.raises(
        ConfigError, match=r"offloads about 31\.9 GiB per rank to host memory.* has 30\.0 GiB of it"
    ):
        preflight(conf("gpt2-xl-zero3-offload"), VOCAB_SIZE, card)


def test_deepspeed_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"engine is deepspeed, which is not installed: pip install megacore\[deepspeed\]",
    ):
        preflight(conf("gpt2-tiny", engine="deepspeed"), 8192, CPU)


def test_threads_per_rank_can_be_set() -> None:
    assert resolve_launch(conf("gpt2-tiny", launch__threads_per_rank=3), CPU) == (2, 3)


@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
def test_an_elastic_run_starts_on_the_hosts_that_divide_its_batch(
    kind: str, tmp_path: Path
) -> None:
    launch: dict[str, Any] = {"nnodes": "2:3", "kind": kind, "nproc_per_node": 2}
    if kind == "torchrun":
        (tmp_path / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")
        launch |= {"hostfile": str(tmp_path / "hosts"), "nproc_per_node": "auto"}
    batch = {"train__micro_batch_size": 4, "train__global_batch_size": 16}
    sections = {f"launch__{name}": value for name, value in launch.items()}
    assert resolve_launch(conf("gpt2-tiny", **batch, **sections), CPU)[0] == 4
    batch["train__global_batch_size"] = 24
    assert resolve_launch(conf("gpt2-tiny", **batch, **sections), CPU)[0] == 6
    batch["train__global_batch_size"] = 4
    with pytest.raises(ParallelLayoutError, match="4 is not a multiple of"):
        resolve_launch(conf("gpt2-tiny", **batch, **sections), CPU)


def test_impossible_layouts_are_refused_with_the_numbers() -> None:
    auto = conf(
        "gpt2-tiny",
        launch__nproc_per_node="auto",
        train__global_batch_size=8,
        train__micro_batch_size=4,
    )
    with pytest.raises(
        ParallelLayoutError, match=r"8 is not a multiple of train\.micro_batch_size 4 x 3"
    ):
        resolve_launch(auto, Hardware(16, 64 * GIB, (A100,) * 3))
    with pytest.raises(
        ParallelLayoutError, match="nproc_per_node is 8 and this machine has 1 visible GPU"
    ):
        resolve_launch(conf("gpt2-345m-8gpu"), Hardware(16, 64 * GIB, (A100,)))


def test_packages_of_trackers_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tensorboard is not installed.*\.\[tensorboard\]"):
        preflight(conf("gpt2-tiny", tracking__tensorboard=True), 8192, CPU)
    with pytest.raises(ConfigError, match=r"wandb is not installed.*\.\[wandb\]"):
        preflight(conf("gpt2-tiny", tracking__wandb={}), 8192, CPU)
    preflight(conf("gpt2-tiny"), 8192, CPU)


def test_hardware_is_detected_without_importing_torch() -> None:
    script = (
        "import sys; from megacore.plan.preflight import Hardware; h = Hardware.detect(); "
        "assert h.cores >= 1 and h.memory > 2**28, h; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_login_node_without_a_gpu_may_submit_gpu_jobs(kind: str) -> None:
    config = conf("gpt2-345m-8gpu", launch__kind=kind, launch__nnodes=2, launch__nproc_per_node=4)
    report = preflight(config, VOCAB_SIZE, CPU)
    assert report.ranks == 8
    assert report.summary().endswith(
        f"on 8 GPU ranks of {kind}: this machine has no GPU to tell their memory and time by"
    )
    on_cpus = conf("gpt2-tiny", launch__kind=kind, launch__nproc_per_node=1, launch__allow_cpu=True)
    assert preflight(on_cpus, VOCAB_SIZE, CPU).unseen is None
    without_gpus = conf(
        "gpt2-tiny", launch__kind="slurm", launch__nproc_per_node=1, launch__slurm__gpus_per_node=0
    )
    assert preflight(without_gpus, VOCAB_SIZE, CPU).unseen is None


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_precision_of_a_schedulers_unknown_gpus_must_be_given(kind: str) -> None:
    values = {"launch__kind": kind, "launch__nproc_per_node": 1, "train__precision": "auto"}
    with pytest.raises(
        ConfigError,
        match=rf"train\.precision is auto, and this machine has no GPU .* {kind} .* to bf16",
    ):
        preflight(conf("gpt2-tiny", **values), VOCAB_SIZE, CPU)
    gpus = Hardware(8, 64 * GIB, (A100,), native_bf16=True)
    assert preflight(conf("gpt2-tiny", **values), VOCAB_SIZE, gpus).precision == "bf16"


def test_another_hosts_hardware_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("worker-1 slots=2\nworker-2 slots=2\n")
    values = {"launch__hostfile": str(tmp_path / "hosts"), "train__precision": "auto"}
    config = conf("gpt2-345m-8gpu", **values)
    gpus = Hardware(64, 2**40, (A100, A100), native_bf16=True, host="worker-1")
    report = preflight(config, VOCAB_SIZE, gpus)
    assert (report.ranks, report.precision, report.device_type) == (4, "bf16", "cuda")
    assert report.summary().endswith("of host worker-1")
    with pytest.raises(ParallelLayoutError, match=r"slots of host worker-1 .* is 2 and .* has 1"):
        preflight(config, VOCAB_SIZE, replace(gpus, gpus=(A100,)))
    small = replace(gpus, gpus=(Gpu("NVIDIA T4", 2 * GIB),) * 2)
    with pytest.raises(ConfigError, match=r"and host worker-1 has 2\.0 GiB per rank"):
        preflight(config, VOCAB_SIZE, small)
    with pytest.raises(ConfigError, match="sized for GPUs and host worker-1 has none"):
        preflight(config, VOCAB_SIZE, replace(gpus, gpus=(), native_bf16=False))


@pytest.mark.parametrize(
    ("keep", "number"),
    [
        ({"checkpoint__save_interval": 40}, 1),
        ({"checkpoint__save_interval": 30}, 2),
        ({"checkpoint__save_interval": 1}, 4),  # two newest, the best, and one being written
        ({"checkpoint__save_interval": 1, "checkpoint__keep_best": False}, 3),
        ({"checkpoint__save_interval": 4, "checkpoint__keep_every": 6}, 7),  # 12, 24 and 36
    ],
)
def test_checkpoints_on_disk_follow_the_retention_rules(
    keep: dict[str, object], number: int
) -> None:
    config = conf("gpt2-tiny", train__train_iters=40, **keep)
    count, size = checkpoints_on_disk(config, 2048)
    assert count == number
    assert size == 12 * preflight(config, 2048, CPU).parameters
