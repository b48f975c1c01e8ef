"""Scoring a fixed set of samples."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megacore.data.gpt_dataset import GPTDataset
from megacore.parallel.mesh import ProcessMesh
from megacore.train.evaluate import Evaluation, batches_of_rank, evaluate
from tests._dist import run_distributed
from tests.train import _runs


@given(st.integers(1, 200), st.integers(1, 17), st.integers(1, 5))
def test_every_sample_goes_to_exactly_one_rank(samples: int, micro_batch_size: int, size: int) -> None:
    dealt = [batch for rank in range(size) for batch in batches_of_rank(samples, micro_batch_size, rank, size)]
    assert sorted(sample for batch in dealt for sample in batch) == list(range(samples))
    assert all(0 < len(batch) <= micro_batch_size for batch in dealt)


def losses(tokens: Tensor) -> Tensor:
    """A loss that tells every target apart."""
    return tokens[:, 1:].float() + 0.01 * torch.arange(tokens.shape[1] - 1)


def loss_sum(batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
    """What an engine would add up."""
    total = torch.zeros(2, dtype=torch.float64)
    for size, tokens in zip(sizes, batches, strict=True):
        assert len(tokens) == size
        total += torch.stack([losses(tokens).double().sum(), torch.tensor(tokens[:, 1:].numel())])
    return total


def score(data: Path, mesh: ProcessMesh) -> Evaluation:
    dataset = GPTDataset(data / "tokens_text_document", data / "index", "test", _runs.SEQ_LENGTH)
    return evaluate(loss_sum, dataset, samples=13, micro_batch_size=4, mesh=mesh, device=torch.device("cpu"))


def score_on_ranks(data: Path) -> Evaluation:
    return score(data, _runs.mesh())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    _runs.write_data(directory, _runs.config())
    return directory


def test_the_mean_is_over_all_targets_whatever_the_number_of_ranks(data: Path) -> None:
    dataset = GPTDataset(data / "tokens_text_document", data / "index", "test", _runs.SEQ_LENGTH)
    expected = float(losses(torch.from_numpy(dataset.gather(range(13)))).double().mean())
    serial = score(data, ProcessMesh.serial())
    assert serial.loss == pytest.approx(expected, rel=1e-12)
    assert (serial.samples, serial.tokens) == (13, 13 * _runs.SEQ_LENGTH)
    for result in run_distributed(2, score_on_ranks, data):
        assert result.loss == pytest.approx(expected, rel=1e-12)
        assert result.tokens == serial.tokens
