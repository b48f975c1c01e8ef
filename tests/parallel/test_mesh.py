"""The process mesh: serial without a process group, and the groups of each rank."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacore.parallel import mesh as mesh_module
from megacore.parallel.mesh import (
    CHANNELS,
    SINGLE_RANK,
    ParallelGroup,
    ProcessMesh,
    gpu_queues,
    group_of,
)
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.schedules import Pipeline, gpipe


def test_a_copied_group_is_found_by_a_key_of_its_own() -> None:
    group = ParallelGroup(size=2)
    copy = pickle.loads(pickle.dumps(group))
    assert copy == group
    assert copy.key != group.key
    assert group_of(copy.key) is copy


def test_serial_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    mesh = ProcessMesh.serial()
    assert (mesh.rank, mesh.world_size) == (0, 1)
    assert mesh.data_parallel == mesh.pipeline_parallel == mesh.tensor_parallel == SINGLE_RANK


def test_each_axis_has_a_group_and_the_other_axes_have_none(
    two_ranks: list[dict[str, Any]],
) -> None:
    single = (0, 1, True)
    for rank, result in enumerate(two_ranks):
        member = (rank, 2, False)
        assert result["mesh"]["data"] == (rank, 2, [member, single, single])
        assert result["mesh"]["pipeline"] == (rank, 2, [single, member, single])
        assert result["mesh"]["tensor"] == (rank, 2, [single, single, member])


def test_stages_with_shared_parameters_have_a_group(two_ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(two_ranks):
        assert result["mesh"]["pipeline copies"] == {}
        assert result["mesh"]["copies"] == {(0, 1): (rank, 2)}


def test_a_layout_for_another_number_of_ranks_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["mesh"]["error"] == (
        "the layout data 4 x pipeline 1 x tensor 1 needs 4 ranks, 2 were started: start 4"
    )


@pytest.mark.parametrize(
    ("layout", "shared"),
    [
        (RankLayout(data=8), ()),
        (RankLayout(data=2, pipeline=2, tensor=2), ((0, 1),)),
        (RankLayout(data=2, pipeline=2, context=2), ()),
        (RankLayout(pipeline=4, tensor=2), ((0, 2), (0, 1, 2), (2, 3))),
    ],
)
def test_a_rank_has_a_hardware_queue_for_each_of_its_streams(
    monkeypatch: pytest.MonkeyPatch, layout: RankLayout, shared: tuple[tuple[int, ...], ...]
) -> None:
    """NCCL has a stream for each group; the mesh is built as on GPUs, with fake groups."""
    on_cpus = mesh_module.init_device_mesh
    monkeypatch.setattr(
        mesh_module, "init_device_mesh", lambda _, *args, **named: on_cpus("cpu", *args, **named)
    )
    monkeypatch.setattr(mesh_module, "_open_channels", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    streams = []
    for rank in range(layout.world_size):
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
        try:
            mesh = ProcessMesh.build(layout, shared_stages=shared, device_type="cuda")
            groups = [getattr(mesh, f"{axis}_parallel") for axis in mesh_module.AXES]
            groups += [mesh.model_parallel, mesh.data_context_parallel, *mesh.copies.values()]
            used = {group.group for group in groups} | {*mesh.channels, dist.group.WORLD}
            streams.append(len(used - {None}) + 1)  # and that of the computation
        finally:
            dist.destroy_process_group()
    assert 8 <= gpu_queues(layout, shared) <= 32
    assert gpu_queues(layout, shared) >= max(streams) + mesh_module._OTHER_STREAMS
    if layout.pipeline > 1:
        assert gpu_queues(layout, shared) == max(streams) + mesh_module._OTHER_STREAMS


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_messages_of_a_stage_need_no_more_streams_than_channels(
    stages: int, chunks: int
) -> None:
    """NCCL has a stream for each pair of ranks in a group that is not bound to a GPU."""
    pipeline = Pipeline(stages, chunks)
    for stage in range(stages):
        pairs = set()
        for each in gpipe(stages, 2)[stage]:
            for chunk in range(chunks):
                one = each._replace(chunk=chunk)
                if message := pipeline.receive(stage, one):
                    pairs.add((message.channel, message.source))
                if message := pipeline.send(stage, one):
                    pairs.add((message.channel, message.destination))
        assert 0 < len(pairs) <= CHANNELS
