"""The mesh: serial without a process group, and each rank's place with one."""

from typing import Any

import torch.distributed as dist

from megacore.parallel.mesh import ALONE, ProcessMesh


def test_serial_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    mesh = ProcessMesh.serial()
    assert (mesh.rank, mesh.world_size) == (0, 1)
    assert mesh.data_parallel == mesh.pipeline_parallel == mesh.tensor_parallel == ALONE


def test_each_axis_has_its_group_and_the_others_none(two_ranks: list[dict[str, Any]]) -> None:
    alone = (0, 1, True)
    for rank, found in enumerate(two_ranks):
        here = (rank, 2, False)
        assert found["mesh"]["data"] == (rank, 2, [here, alone, alone])
        assert found["mesh"]["pipeline"] == (rank, 2, [alone, here, alone])
        assert found["mesh"]["tensor"] == (rank, 2, [alone, alone, here])


def test_stages_with_the_same_parameters_have_groups(two_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two_ranks):
        assert found["mesh"]["pipeline copies"] == {}
        assert found["mesh"]["copies"] == {(0, 1): (rank, 2)}


def test_another_number_of_ranks_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["mesh"]["error"] == (
        "the layout data 4 x pipeline 1 x tensor 1 needs 4 ranks, 2 were started: start 4"
    )
