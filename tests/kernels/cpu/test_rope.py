import pytest
import torch
from torch import Tensor

from megacore.config.model import ModelConfig
from megacore.errors import ConfigError
from megacore.kernels.cpu.rope import rotate
from megacore.kernels.rope import reference
from megacore.models.layers.rotary import Rotary
from tests.kernels.cpu._pointwise import both_types, check, check_compiled, check_threads, random


def tables(
    sequence: int, rotated: int, dtype: torch.dtype, batch: int = 1
) -> tuple[Tensor, Tensor]:
    positions = torch.stack([torch.arange(sequence) + 3 * row for row in range(batch)])
    model = ModelConfig(hidden_size=rotated, num_attention_heads=1, position_embedding_type="rope")
    return Rotary(model).tables(positions, dtype)


def in_float64(rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return rotary[0].double(), rotary[1].double()


VIEWS = {
    "contiguous": ((2, 3, 9, 24), lambda x: x),
    "sequence before heads": ((2, 9, 3, 24), lambda x: x.transpose(1, 2)),
    "queries of a mixed projection": ((2, 9, 3, 3, 24), lambda x: x.unbind(3)[0].transpose(1, 2)),
    "keys of a mixed projection": ((2, 9, 3, 3, 24), lambda x: x.unbind(3)[1].transpose(1, 2)),
    "strided columns": ((24, 2, 3, 9), lambda x: x.permute(1, 2, 3, 0)),
    "one group": ((2, 9, 1, 24), lambda x: x.transpose(1, 2)),
    "shared by heads": ((2, 1, 9, 24), lambda x: x.expand(2, 3, 9, 24)),
}


@both_types
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("rotated", [24, 10, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotation_equals_float64(dtype: torch.dtype, name: str, rotated: int, batch: int) -> None:
    shape, view = VIEWS[name]
    rotary = tables(9, rotated, dtype, batch)
    exact = in_float64(rotary)
    check(
        lambda x: rotate(x, rotary),
        lambda x: reference(x, exact),
        [random(*shape, dtype=dtype)],
        view,
    )


@both_types
@pytest.mark.parametrize("size", [64, 96, 250])
def test_rotation_of_wide_heads_equals_float64(dtype: torch.dtype, size: int) -> None:
    rotary = tables(5, size, dtype)
    exact = in_float64(rotary)
    check(
        lambda x: rotate(x, rotary),
        lambda x: reference(x, exact),
        [random(1, 2, 5, size, dtype=dtype)],
    )


@both_types
def test_the_result_has_the_memory_layout_of_the_input(dtype: torch.dtype) -> None:
    rotary = tables(9, 16, dtype)
    x = random(2, 9, 3, 16, dtype=dtype).detach().transpose(1, 2)
    assert rotate(x, rotary).stride() == x.stride()
    assert rotate(x, rotary).transpose(1, 2).is_contiguous()
    assert rotate(x.contiguous(), rotary).is_contiguous()
    mixed = random(2, 9, 3, 3, 16, dtype=dtype).detach().unbind(3)[1].transpose(1, 2)
    assert rotate(mixed, rotary).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("sequence", "rotated", "batch"), [(4, 16, 1), (1, 16, 1), (5, 16, 3), (5, 18, 1)]
)
def test_tables_of_another_shape_are_refused(sequence: int, rotated: int, batch: int) -> None:
    with pytest.raises(ConfigError, match="do not rotate heads"):
        rotate(torch.ones(2, 3, 5, 16), tables(sequence, rotated, torch.float32, batch))


@both_types
def test_threads_do_not_change_the_result(dtype: torch.dtype) -> None:
    rotary = tables(77, 32, dtype)
    x, grad = random(2, 8, 77, 64, dtype=dtype), random(2, 8, 77, 64, dtype=dtype, seed=3).detach()
    check_threads(lambda x: rotate(x, rotary), [x], grad)


@both_types
def test_compiled_results_are_identical(dtype: torch.dtype) -> None:
    rotary = tables(9, 16, dtype)
    x, grad = random(2, 9, 3, 16, dtype=dtype), random(2, 3, 9, 16, dtype=dtype, seed=3).detach()
    check_compiled(lambda x: rotate(x.transpose(1, 2), rotary), [x], grad)
