"""Evaluation of a fixed set of samples."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megacore.artifact.files import save_array
from megacore.data.blend import build_blend
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import map_path
from megacore.data.samples import BlendedDataset
from megacore.engine.build import build_engine
from megacore.models.base import (
    POSITION_BUCKETS,
    LossTerm,
    LossTotals,
    bucket_width,
    loss_sums,
)
from megacore.parallel.mesh import ProcessMesh
from megacore.train.evaluate import (
    BetweenRounds,
    Evaluation,
    _rounds,
    batches_of_rank,
    evaluate,
)
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
    device = torch.device("cpu")

    def __init__(self, *, reads_tokens: bool = True) -> None:
        self.reads_tokens = reads_tokens

    def loss_sum(
        self, batches: Iterator[Tensor], sizes: Sequence[int], totals: LossTotals
    ) -> Tensor:
        for size, tokens in zip(sizes, batches, strict=True):
            assert len(tokens) == size
            # every third label does not count, so that samples have different numbers of tokens
            terms = {"lm_loss": LossTerm(losses(tokens), self.counts(tokens))}
            totals.add(loss_sums(terms | {"sop_loss": LossTerm(tokens[:, 0].float())}))
        return totals.total

    def counts(self, tokens: Tensor) -> Tensor | None:
        return None


class MaskedModel(Model):
    """The same without some labels."""

    def counts(self, tokens: Tensor) -> Tensor:
        return tokens[:, 1:] % 3 != 0


def blended(data: Path) -> BlendedDataset:
    """Return 13 samples of two sources, the test split and the train split."""
    directory = data / "blend"
    if not directory.exists():
        directory.mkdir()
        numbers, samples = build_blend([2.0, 1.0], 13)
        save_array(map_path(directory, "test", "dataset"), numbers)
        save_array(map_path(directory, "test", "dataset_sample"), samples)
    members = [
        GPTDataset(data / "tokens_text_document", data / "index", name, _runs.SEQ_LENGTH)
        for name in ("test", "train")
    ]
    return BlendedDataset(members, directory, "test", (3, 1))


def score_blend(
    data: Path, mesh: ProcessMesh, size: int = 4, between: BetweenRounds | None = None
) -> Evaluation:
    return evaluate(
        MaskedModel(),
        blended(data),
        samples=13,
        micro_batch_size=size,
        mesh=mesh,
        between=between,
    )


def score(data: Path, mesh: ProcessMesh) -> Evaluation:
    dataset = GPTDataset(data / "tokens_text_document", data / "index", "test", _runs.SEQ_LENGTH)
    return evaluate(Model(), dataset, samples=13, micro_batch_size=4, mesh=mesh)


def score_divided(data: Path, mesh: ProcessMesh) -> Evaluation:
    """Score three micro batches, of which only the first replica has two, with divided weights."""
    run = _runs.config(parallel={"data_parallel_sharding": "parameters"})
    engine = build_engine(
        run,
        _runs.VOCAB_SIZE,
        mesh,
        special_tokens=_runs.TOKENS,
        device=torch.device("cpu"),
        precision="fp32",
    )
    dataset = GPTDataset(data / "tokens_text_document", data / "index", "test", _runs.SEQ_LENGTH)
    return evaluate(engine, dataset, samples=9, micro_batch_size=4, mesh=mesh)


def score_on_ranks(data: Path) -> tuple[Evaluation, Evaluation, Evaluation]:
    mesh = _runs.mesh()
    return score(data, mesh), score_blend(data, mesh), score_divided(data, mesh)


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
    blend = score_blend(data, ProcessMesh.serial())
    tokens = torch.from_numpy(blended(data).gather(range(13)))
    counts, places = MaskedModel().counts(tokens), blended(data).source_places(range(13))
    for number, each in enumerate(blend.by_source):
        chosen = torch.from_numpy(places == number)
        expected = float(losses(tokens)[chosen][counts[chosen]].double().mean())
        assert (each.source, each.tokens) == ((3, 1)[number], int(counts[chosen].sum()))
        assert each.loss == pytest.approx(expected, rel=1e-12)
    undivided = score_divided(data, ProcessMesh.serial())
    for result, of_blend, divided in run_distributed(2, score_on_ranks, data):
        assert divided.losses == pytest.approx(undivided.losses, rel=1e-6)
        assert divided.tokens == undivided.tokens
        for each, serially in zip(of_blend.by_source, blend.by_source, strict=True):
            assert (each.source, each.tokens) == (serially.source, serially.tokens)
            assert each.loss == pytest.approx(serially.loss, rel=1e-12)
        whole = sum(each.loss * each.tokens for each in of_blend.by_source) / of_blend.tokens
        assert whole == pytest.approx(of_blend.loss, rel=1e-12)
        assert result.by_source == ()
        assert result.losses == pytest.approx(serial.losses, rel=1e-12)
        assert result.tokens == serial.tokens
        assert [each.loss for each in result.by_position] == pytest.approx(columns, rel=1e-12)


def test_rounds_do_not_change_a_bit_and_last_about_a_second(data: Path) -> None:
    seconds = iter([0.2, 0.9, 1.5, 5.0])  # 13 micro batches in rounds of 1, 2, 4, 4, and 2
    rounds: list[float] = []

    def between(measured: float) -> float:
        rounds.append(measured)
        return next(seconds)

    whole = score_blend(data, ProcessMesh.serial(), size=1)
    assert score_blend(data, ProcessMesh.serial(), size=1, between=between) == whole
    assert len(rounds) == 4
    assert all(0 <= each < 60 for each in rounds)


@pytest.mark.parametrize(
    ("count", "stages", "seconds", "sizes"),
    [
        (17, 1, [0.2, 0.9, 1.5, 5.0, 0.2], [1, 2, 4, 4, 2, 4]),
        (8, 2, [9.0, 0.2, 9.0], [2, 2, 4]),  # a pipeline is filled in each round
    ],
)
def test_rounds_grow_until_a_second_and_are_halved_after_two(
    count: int, stages: int, seconds: list[float], sizes: list[int]
) -> None:
    slowest = iter(seconds)
    rounds = list(_rounds(count, stages, torch.device("cpu"), lambda measured: next(slowest)))
    assert [len(each) for each in rounds] == sizes
    assert [number for each in rounds for number in each] == list(range(count))


def test_an_error_between_rounds_ends_the_evaluation(data: Path) -> None:
    sizes: list[int] = []

    class Counted(MaskedModel):
        def loss_sum(
            self, batches: Iterator[Tensor], sizes_of: Sequence[int], totals: LossTotals
        ) -> Tensor:
            sizes.append(len(sizes_of))
            return super().loss_sum(batches, sizes_of, totals)

    def between(measured: float) -> float:
        if len(sizes) == 2:
            raise KeyError("stop")
        return 0.0

    with pytest.raises(KeyError, match="stop"):
        evaluate(
            Counted(),
            blended(data),
            samples=13,
            micro_batch_size=1,
            mesh=ProcessMesh.serial(),
            between=between,
        )
    assert sizes == [1, 2]


def test_stage_without_tokens_gets_only_the_sizes_of_micro_batches(data: Path) -> None:
    dataset = GPTDataset(data / "tokens_text_document", data / "index", "test", _runs.SEQ_LENGTH)
    micro_batch_sizes: list[list[int]] = []

    class MiddleStage(Model):
        def loss_sum(
            self, batches: Iterator[Tensor], sizes: Sequence[int], totals: LossTotals
        ) -> Tensor:
            assert next(batches, None) is None
            micro_batch_sizes.append(list(sizes))
            return torch.ones(2 + POSITION_BUCKETS, 2, dtype=torch.float64)

    stage = MiddleStage(reads_tokens=False)
    evaluate(stage, dataset, samples=6, micro_batch_size=4, mesh=ProcessMesh.serial())
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
