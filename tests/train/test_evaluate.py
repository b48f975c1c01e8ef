"""Evaluation of a fixed set of samples."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megacore.data.gpt_dataset import GPTDataset
from megacore.models.base import POSITION_BUCKETS, LossTerm, bucket_width
from megacore.parallel.mesh import ProcessMesh
from megacore.train.evaluate import Evaluation, batches_of_rank, evaluate
from tests._dist import run_distributed
from tests.train import _runs


@given(st.integers(1, 200), st.integers(1, 17), st.integers(1, 5))
def test_each_sample_is_assigned_to_exactly_one_rank(
    samples: int, micro_batch_size: int, size: int
) -> None:
    batches = [
        batch
        for rank in range(size)
        for batch in batches_of_rank(samples, micro_batch_size, rank, size)
    ]
    assert sorted(sample for batch in batches for sample in batch) == list(range(samples))
    assert all(0 < len(batch) <= micro_batch_size for batch in batches)


def losses(tokens: Tensor) -> Tensor:
    """Return losses that differ for every target."""
    return tokens[:, 1:].float() + 0.01 * torch.arange(tokens.shape[1] - 1)


class Model:
    """An engine's sums of losses; the second loss has one value per sample, its first token."""

    loss_names = ("lm_loss", "sop_loss")
    label_length = _runs.SEQ_LENGTH

    def __init__(self, *, reads_tokens: bool = True) -> None:
        self.reads_tokens = reads_tokens

    def loss_sum(self, batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
        total = torch.zeros(2 + POSITION_BUCKETS, 2, dtype=torch.float64)
        for size, tokens in zip(sizes, batches, strict=True):
            assert len(tokens) == size
            total[0] += torch.stack(
                [losses(tokens).double().sum(), torch.tensor(tokens[:, 1:].numel())]
            )
            total[2:] += LossTerm(losses(tokens)).by_position()
            total[1] += torch.stack([tokens[:, 0].double().sum(), torch.tensor(size)])
        return total


def score(data: Path, mesh: ProcessMesh) -> Evaluation:
    dataset = GPTDataset(data / "tokens_text_document", data / "index", "test", _runs.SEQ_LENGTH)
    return evaluate(
        Model(), dataset, samples=13, micro_batch_size=4, mesh=mesh, device=torch.device("cpu")
    )


def score_on_ranks(data: Path) -> Evaluation:
    return score(data, _runs.mesh())


def test_loss_is_the_mean_over_all_targets_on_any_number_of_ranks(data: Path) -> None:
    dataset = GPTDataset(data / "tokens_text_document", data / "index", "test", _runs.SEQ_LENGTH)
    expected = float(losses(torch.from_numpy(dataset.gather(range(13)))).double().mean())
    first = float(torch.from_numpy(dataset.gather(range(13)))[:, 0].double().mean())
    serial = score(data, ProcessMesh.serial())
    assert serial.losses == pytest.approx({"lm_loss": expected, "sop_loss": first}, rel=1e-12)
    assert serial.loss == pytest.approx(expected, rel=1e-12)
    assert (serial.samples, serial.tokens) == (13, 13 * _runs.SEQ_LENGTH)
    columns = losses(torch.from_numpy(dataset.gather(range(13)))).double().mean(0).tolist()
    assert [each.start for each in serial.by_position] == list(range(_runs.SEQ_LENGTH))
    assert [each.loss for each in serial.by_position] == pytest.approx(columns, rel=1e-12)
    assert {each.tokens for each in serial.by_position} == {13}
    for result in run_distributed(2, score_on_ranks, data):
        assert result.losses == pytest.approx(serial.losses, rel=1e-12)
        assert result.tokens == serial.tokens
        assert [each.loss for each in result.by_position] == pytest.approx(columns, rel=1e-12)


def test_stage_without_tokens_gets_only_the_sizes_of_micro_batches(data: Path) -> None:
    dataset = GPTDataset(data / "tokens_text_document", data / "index", "test", _runs.SEQ_LENGTH)
    micro_batch_sizes: list[list[int]] = []

    class MiddleStage(Model):
        def loss_sum(self, batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
            assert next(batches, None) is None
            micro_batch_sizes.append(list(sizes))
            return torch.ones(2 + POSITION_BUCKETS, 2, dtype=torch.float64)

    mesh, device = ProcessMesh.serial(), torch.device("cpu")
    evaluate(
        MiddleStage(reads_tokens=False),
        dataset,
        samples=6,
        micro_batch_size=4,
        mesh=mesh,
        device=device,
    )
    assert micro_batch_sizes == [[4, 2]]


@pytest.mark.parametrize("length", [1, 5, 16, 17, 100, 128])
def test_every_label_that_counts_is_in_one_range_of_positions(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    values = torch.rand(3, length, generator=generator)
    counts = torch.rand(3, length, generator=generator) < 0.7
    width = bucket_width(length)
    for term in (LossTerm(values), LossTerm(values, counts)):
        rows = term.by_position()
        assert rows.shape == (POSITION_BUCKETS, 2)
        torch.testing.assert_close(rows.sum(0), term.total(), rtol=1e-12, atol=0)
        weights = torch.ones(3, length) if term.counts is None else term.counts
        for number in range(POSITION_BUCKETS):
            part = slice(number * width, (number + 1) * width)
            expected = (values.double() * weights)[:, part].sum()
            assert float(rows[number, 0]) == pytest.approx(float(expected), rel=1e-12)
            assert int(rows[number, 1]) == int(weights[:, part].sum())
