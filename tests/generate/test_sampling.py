"""Distribution of sampled tokens."""

import pytest
import torch
from torch import Tensor

from megacore.generate.generate import Chooser, sample
from megacore.jobs.model import GenerateOptions

PROBABILITIES = torch.tensor([0.1, 0.0, 0.35, 0.05, 0.3, 0.2], dtype=torch.float64)
LOGITS = PROBABILITIES.log()
DRAWS = 20000


def frequencies(options: GenerateOptions, logits: Tensor = LOGITS) -> list[float]:
    """Return how often each token is drawn by draws spread evenly over [0, 1)."""
    draws = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    ids = sample(logits.expand(DRAWS, -1), draws, options)
    return (torch.bincount(ids, minlength=len(logits)) / DRAWS).tolist()


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        (GenerateOptions(temperature=1.0), PROBABILITIES),
        (GenerateOptions(temperature=0.5), PROBABILITIES**2),
        (GenerateOptions(temperature=2.0), PROBABILITIES**0.5),
        (GenerateOptions(top_k=2), torch.tensor([0, 0, 0.35, 0, 0.3, 0])),
        (GenerateOptions(top_k=1), torch.tensor([0, 0, 1.0, 0, 0, 0])),
        (GenerateOptions(top_k=99), PROBABILITIES),
        (GenerateOptions(top_p=0.6), torch.tensor([0, 0, 0.35, 0, 0.3, 0])),
        (GenerateOptions(top_p=0.7), torch.tensor([0, 0, 0.35, 0, 0.3, 0.2])),
        (GenerateOptions(top_p=1e-9), torch.tensor([0, 0, 1.0, 0, 0, 0])),
        (GenerateOptions(top_p=1.0), PROBABILITIES),
        (GenerateOptions(top_k=3, top_p=0.5), torch.tensor([0, 0, 0.35, 0, 0.3, 0])),
        (GenerateOptions(temperature=0.5, top_p=0.7), torch.tensor([0, 0, 0.35**2, 0, 0.3**2, 0])),
    ],
)
def test_frequencies_equal_the_probabilities(options: GenerateOptions, weights: Tensor) -> None:
    expected = (weights / weights.sum()).tolist()
    assert frequencies(options) == pytest.approx(expected, abs=2 / DRAWS)


def test_extreme_draws_never_choose_an_impossible_token() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    draws = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for options in (
        GenerateOptions(temperature=1.0),
        GenerateOptions(top_p=1.0),
        GenerateOptions(top_k=4),
    ):
        assert set(sample(logits, draws, options).tolist()) == {1, 2}


def test_draws_depend_only_on_seed_and_prompt_number() -> None:
    options, logits = GenerateOptions(temperature=1.0, seed=5), torch.zeros(1, 1000)
    together = Chooser(options, [0, 1, 2])
    steps = [together.choose(logits.expand(3, -1)) for _ in range(3)]
    together.keep([2])
    last = together.choose(logits)
    single = Chooser(options, [2])
    assert [int(single.choose(logits)) for _ in range(4)] == [
        *(int(step[2]) for step in steps),
        int(last),
    ]
    assert len({tuple(int(step[row]) for step in steps) for row in range(3)}) == 3
    other_seed = Chooser(GenerateOptions(temperature=1.0, seed=6), [0])
    assert int(other_seed.choose(logits)) != int(steps[0][0])


def test_greedy_takes_the_most_probable_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert Chooser(GenerateOptions(), [0, 1]).choose(logits).tolist() == [1, 0]
