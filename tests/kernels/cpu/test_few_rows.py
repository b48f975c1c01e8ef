"""The linear layer of few rows in C++, compared with float64."""

import pytest
import torch

from megacore.kernels.cpu.few_rows import affine, supports


def test_products_equal_float64_and_do_not_depend_on_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    for in_features, out_features in ((64, 40), (67, 7), (5, 1), (200, 129)):
        weight = torch.randn(out_features, in_features, generator=generator)
        bias = torch.randn(out_features, generator=generator)
        for rows in (1, 2, 3, 4, 5, 7, 16, 32):
            x = torch.randn(rows, 1, in_features, generator=generator)
            if not supports(x, weight, bias):
                pytest.skip("the CPU has no AVX2")
            y = affine(x, weight, bias, 0.5)
            expected = x.double() @ weight.double().t() + 0.5 * bias.double()
            torch.testing.assert_close(y, expected.float(), rtol=1e-4, atol=1e-4)
            assert torch.equal(y[-1:], affine(x[-1:], weight, bias, 0.5))
        torch.testing.assert_close(affine(x, weight, None), x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_other_tensors_are_left_to_torch() -> None:
    x, weight = torch.ones(2, 1, 8), torch.ones(4, 8)
    assert not supports(x.double(), weight.double(), None)
    assert not supports(torch.ones(33, 1, 8), weight, None)
    assert not supports(x, torch.ones(8, 4).t(), None)
    assert not supports(x.to("meta"), weight.to("meta"), None)
    assert not supports(x, torch.ones(4, 9), None)
    assert not supports(x, weight, torch.ones(5))
    assert not supports(x, weight, torch.ones(4, device="meta"))
