"""The generator of dropout masks, which draws the same numbers as torch from the same seed."""

import pytest
import torch

from megacore.kernels.cpu import _kernels, common
from megacore.kernels.cpu.common import draws_as_torch, kept_like
from megacore.kernels.dropout import SequencePart
from tests.kernels.cpu._pointwise import both_types

pytestmark = pytest.mark.skipif(
    not common.runs_fp32() or not draws_as_torch(),
    reason="torch draws with MKL here, or this CPU has no AVX-512",
)


@both_types
@pytest.mark.parametrize("drawn_before", [0, 1, 2, 311, 623, 624, 625])
@pytest.mark.parametrize("count", [1, 15, 17, 312, 313, 5000])
def test_numbers_and_generator_state_equal_torchs(
    dtype: torch.dtype, drawn_before: int, count: int
) -> None:
    torch.manual_seed(7)
    for _ in range(drawn_before):
        torch.rand(1)
    before = torch.get_rng_state()
    for p in (0.1, 0.5, 0.9):
        torch.set_rng_state(before)
        expected = torch.empty(count, dtype=dtype).bernoulli_(1.0 - p)
        after, following = torch.get_rng_state(), torch.rand(3)
        torch.set_rng_state(before)
        assert torch.equal(kept_like(expected, p), expected)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(torch.rand(3), following)


@both_types
@pytest.mark.parametrize("drawn_before", [0, 311, 624])
def test_a_part_has_the_numbers_of_the_whole(dtype: torch.dtype, drawn_before: int) -> None:
    part, shape = SequencePart(24, ((3, 6), (18, 21))), (2, 3, 6, 37)
    for drawn_by_torch in (False, True):
        torch.manual_seed(7)
        for _ in range(drawn_before):
            torch.rand(1)
        before = torch.get_rng_state()
        expected = part.of(torch.empty(2, 3, 24, 37, dtype=dtype).bernoulli_(0.7))
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        with pytest.MonkeyPatch.context() as patch:
            if drawn_by_torch:
                patch.setattr(common, "draws_as_torch", lambda: False)
            assert torch.equal(kept_like(torch.empty(shape, dtype=dtype), 0.3, part), expected)
        assert torch.equal(torch.get_rng_state(), after)


def test_a_cached_normal_number_is_kept() -> None:
    torch.manual_seed(7)
    torch.normal(0.0, 1.0, (1,))
    before = torch.get_rng_state()
    torch.empty(9).bernoulli_(0.5)
    expected = torch.normal(0.0, 1.0, (3,))
    torch.set_rng_state(before)
    kept_like(torch.empty(9), 0.5)
    assert torch.equal(torch.normal(0.0, 1.0, (3,)), expected)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0**-53, 1.0 - 2.0**-53])
def test_numbers_equal_torchs_at_the_limits_of_the_probability(p: float) -> None:
    torch.manual_seed(7)
    state, out = torch.get_rng_state(), torch.empty(2000)
    expected = torch.empty(2000).bernoulli_(p)
    _kernels.bernoulli(state.data_ptr(), p, out.data_ptr(), 1, 2000, [(0, 2000)], False)
    assert torch.equal(out, expected)


def test_a_transposed_tensor_is_filled_in_torchs_order() -> None:
    x = torch.empty(6, 7, 8).transpose(0, 2)
    torch.manual_seed(7)
    expected = torch.empty_like(x).bernoulli_(0.5)
    torch.manual_seed(7)
    actual = kept_like(x, 0.5)
    assert actual.stride() == x.stride()
    assert torch.equal(actual, expected)


def test_draws_as_torch_does_not_change_the_generator() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    draws_as_torch.cache_clear()
    draws_as_torch()
    assert torch.equal(torch.get_rng_state(), before)


def test_torch_draws_if_its_generator_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "draws_as_torch", lambda: False)
    monkeypatch.delattr(_kernels, "bernoulli")
    torch.manual_seed(7)
    expected = torch.empty(50).bernoulli_(0.7)
    torch.manual_seed(7)
    assert torch.equal(kept_like(expected, 0.3), expected)
