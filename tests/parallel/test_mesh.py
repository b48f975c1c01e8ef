"""The process mesh: serial without a process group, and the groups of each rank."""

from typing import Any

import torch.distributed as dist

from megacore.parallel.mesh import SINGLE_RANK, ProcessMesh


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
