"""The plan of a configuration: its layout, the contents of its stages, and the bubble."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megacore.config import RunConfig, load_config
from megacore.config.spec import ModelSpec
from megacore.errors import ParallelLayoutError
from megacore.hardware import Gpu, Hardware
from megacore.models.parameters import parameter_count
from megacore.plan.machine import load_machine
from megacore.plan.pipeline import PipelinePlan, plan_pipeline
from megacore.plan.search import search

GIB = 2**30
CPU = Hardware(8, 64 * GIB)
GPUS = Hardware(16, 64 * GIB, (Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB),) * 4, native_bf16=True)


def conf(**overrides: Any) -> RunConfig:
    values = {
        "model.num_layers": 8,
        "data.seq_length": 512,
        "train.micro_batch_size": 2,
        "launch.nproc_per_node": 4,
    }
    return load_config(
        "gpt2-tiny", values | {key.replace("__", "."): value for key, value in overrides.items()}
    )


def rendered_table(plan: PipelinePlan) -> str:
    output = StringIO()
    Console(width=200, file=output).print(plan.table())
    return output.getvalue()


def test_a_serial_plan_has_one_stage_and_no_bubble() -> None:
    plan = plan_pipeline(conf(launch__nproc_per_node=1), 8192, CPU)
    assert (plan.layout.shape, plan.micro_batches) == ((1, 1, 1, 1), 8)
    assert plan.timeline.bubble_fraction == plan.timeline.equal_bubble == 0
    assert plan.memory[0].parameters == parameter_count(ModelSpec.of(plan.config, 8192))
    assert "│     0 │ embedding, 0-7, head │" in rendered_table(plan)
    assert plan.summary().startswith(
        "tensor 1 x pipeline 1 x data 1 = 1 rank; 8 micro batches of 2"
    )


def test_a_pipeline_of_two_replicas_has_a_row_for_each_stage() -> None:
    plan = plan_pipeline(conf(parallel__pipeline_model_parallel_size=2), 8192, CPU)
    assert (plan.layout.shape, plan.micro_batches) == ((2, 2, 1, 1), 4)
    assert plan.timeline.equal_bubble == pytest.approx(0.25)
    assert plan.timeline.bubble_fraction > 0.25  # the head makes the second stage slower
    assert [chunk.layers for chunk in plan.chunks] == [range(0, 6), range(6, 8)]
    assert "gpt2-tiny, 1F1B: bubble" in plan.summary()
    rows = rendered_table(plan)
    assert "embedding, 0-5 " in rows
    assert "│ 6-7, head " in rows


def test_a_plan_names_delayed_weight_gradients_if_they_are_faster() -> None:
    pipeline: dict[str, Any] = {
        "parallel__pipeline_model_parallel_size": 2,
        "launch__nproc_per_node": 4,
    }
    plan = plan_pipeline(conf(**pipeline), 8192, CPU)
    delayed = plan_pipeline(conf(**pipeline, parallel__delay_weight_gradients=True), 8192, CPU)
    assert plan.faster is not None
    assert f"about {delayed.time.iteration.seconds:.4g} s" in plan.faster
    assert delayed.time.iteration.seconds < 0.98 * plan.time.iteration.seconds
    most = max(each.total for each in delayed.memory) / 2**30
    assert f"up to {most:,.1f} GiB" in plan.faster
    assert delayed.faster is None
    assert "gpt2-tiny, 1F1B, weight gradients delayed: bubble" in delayed.summary()
    for refused in (
        {"launch__nproc_per_node": 1},
        pipeline | {"parallel__data_parallel_sharding": "gradients"},
        pipeline | {"engine": "deepspeed"},
    ):
        assert plan_pipeline(conf(**refused), 8192, CPU).faster is None


def test_an_interleaved_plan_has_a_column_for_each_chunk() -> None:
    overrides = {
        "parallel__pipeline_model_parallel_size": 2,
        "parallel__virtual_pipeline_model_parallel_size": 2,
    }
    plan = plan_pipeline(conf(**overrides), 8192, CPU)
    assert plan.name == "gpt2-tiny, interleaved 1F1B"
    assert plan.timeline.equal_bubble == pytest.approx(0.125)
    header, first, second = (line for line in rendered_table(plan).splitlines() if line[0] in "┃│")
    assert "layers of chunk 0" in header
    assert "layers of chunk 1" in header
    assert [cell.strip() for cell in first.split("│")][1:4] == ["0", "embedding, 0-2", "5-7"]
    assert [cell.strip() for cell in second.split("│")][1:4] == ["1", "3-4", "head"]


@pytest.mark.parametrize(("layers", "repeated"), [(None, 1.0), (1, 1 / 4)])
def test_recomputation_repeats_forward_passes(layers: int | None, repeated: float) -> None:
    def passes(recompute: str) -> tuple[float, float]:
        config = conf(
            parallel__pipeline_model_parallel_size=2,
            parallel__pipeline_partition=[4, 4],
            train__recompute=recompute,
            train__recompute_num_layers=None if recompute == "none" else layers,
        )
        forward, backward = plan_pipeline(config, 8192, CPU).timeline.spans[0][::2][:2]
        return forward.end - forward.start, backward.end - backward.start

    (forward, plain), (_, longer) = passes("none"), passes("full")
    assert (longer - plain) / forward == pytest.approx(repeated, rel=0.05)


def test_the_bubble_of_the_schedule_is_that_of_the_prediction() -> None:
    for machine in (None, load_machine("h100")):
        plan = plan_pipeline(conf(parallel__pipeline_model_parallel_size=2), 8192, GPUS, machine)
        parts = plan.time.iteration
        fraction = parts.bubble / (parts.compute + parts.tensor)
        assert fraction == pytest.approx(plan.timeline.bubble_fraction)


def test_auto_ranks_are_the_gpus_or_one_replica() -> None:
    config = conf(launch__nproc_per_node="auto", parallel__pipeline_model_parallel_size=2)
    assert plan_pipeline(config, 8192, GPUS).layout.shape == (2, 2, 1, 1)
    assert plan_pipeline(config, 8192, CPU).layout.shape == (2, 1, 1, 1)


def test_a_plan_may_have_more_ranks_than_the_host() -> None:
    config = conf(launch__nproc_per_node=8, parallel__pipeline_model_parallel_size=4)
    assert plan_pipeline(config, 8192, GPUS).layout.shape == (4, 2, 1, 1)


def test_ranks_of_several_hosts_without_gpus_have_their_own_cores(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"host-{number} slots=2\n" for number in range(4)), encoding="utf-8")
    machine = load_machine("cpu").model_copy(update={"devices_per_node": 2})
    found = search(conf(train__precision="fp32"), 8192, machine, 8, top=1).best[0]
    config = found.iteration.config
    launch = config.launch.model_copy(update={"hostfile": str(hosts), "nproc_per_node": "auto"})
    config = config.model_copy(update={"launch": launch})
    plan = plan_pipeline(config, 8192, Hardware(2, 24 * GIB), machine)
    assert plan.time.iteration.seconds == pytest.approx(found.seconds)


def test_an_impossible_layout_is_refused() -> None:
    config = conf(launch__nproc_per_node="auto", parallel__pipeline_model_parallel_size=8)
    with pytest.raises(ParallelLayoutError, match=r"4 ranks are not a multiple of .*size 8"):
        plan_pipeline(config, 8192, GPUS)


def test_deepspeed_is_named_and_offloaded_memory_has_columns() -> None:
    overrides = {
        "engine": "deepspeed",
        "deepspeed__offload_optimizer": "cpu",
        "launch__nproc_per_node": 2,
    }
    plan = plan_pipeline(conf(**overrides, deepspeed__zero_stage=2), 8192, GPUS)
    assert (
        plan.summary()
        .splitlines()[0]
        .endswith("samples per step; deepspeed ZeRO-2, optimizer on cpu")
    )
    header, row = (line for line in rendered_table(plan).splitlines() if line[0] in "┃│")
    names = [cell.strip() for cell in header.split("┃")]
    assert names[names.index("memory") + 1] == "host"
    assert "nvme" not in names
    assert [cell.strip() for cell in row.split("│")][
        names.index("host")
    ] == f"{plan.memory[0].host / 2**30:.1f} GiB"
    assert "host" not in rendered_table(plan_pipeline(conf(engine="deepspeed"), 8192, GPUS))


def test_a_step_of_too_many_passes_is_refused_at_once() -> None:
    endless = conf(
        train__micro_batch_size=1, train__global_batch_size=2**18, launch__nproc_per_node=1
    )
    with pytest.raises(ParallelLayoutError, match=r"262,144 micro batches .* at most 50,000"):
        plan_pipeline(endless, 8192, CPU)
