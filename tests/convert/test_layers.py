"""Search for the first differing layer, and removal of its hooks."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from megacore.convert.parity import layer_differences, recorded_outputs

PAIRS = [("0", "0"), ("1", "1"), ("2", "2")]


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10))


def compare(
    ours: nn.Module, theirs: nn.Module, samples: torch.Tensor
) -> tuple[dict[str, float], str | None]:
    runs = [(partial(ours, sample[None]), partial(theirs, sample[None])) for sample in samples]
    return layer_differences(ours, theirs, PAIRS, runs, 1e-4)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_the_first_changed_module_is_named(changed: int) -> None:
    ours, theirs = stack(), stack()
    with torch.no_grad():
        theirs[changed].weight += 0.01
    differences, first = compare(ours, theirs, torch.arange(10)[None])
    assert first == str(changed)
    assert list(differences) == ["0", "1", "2"]
    assert all(differences[str(i)] == 0 for i in range(changed))


def test_the_earliest_layer_over_all_samples_is_named() -> None:
    theirs = stack()
    with torch.no_grad():
        theirs[0].weight[9] += 0.01
        theirs[1].bias += 1.0
    assert compare(stack(), theirs, torch.tensor([[1, 2], [3, 9]]))[1] == "0"
    assert compare(stack(), theirs, torch.tensor([[1, 2]]))[1] == "1"


def test_equal_models_have_no_first_difference() -> None:
    differences, first = compare(stack(), stack(), torch.arange(10)[None])
    assert first is None
    assert set(differences.values()) == {0.0}


def test_nan_is_a_difference() -> None:
    theirs = stack()
    with torch.no_grad():
        theirs[1].weight.fill_(math.nan)
    assert compare(stack(), theirs, torch.arange(10)[None])[1] == "1"


def test_hooks_are_removed_after_an_error() -> None:
    model = stack()
    with pytest.raises(ZeroDivisionError), recorded_outputs(model, ["0"]) as outputs:
        raise ZeroDivisionError
    model(torch.arange(3))
    assert outputs == {}
