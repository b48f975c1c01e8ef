"""Masks and positions compared with a loop over documents, and their effect on a model."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacore.config.spec import SpecialTokens
from megacore.errors import ConfigError
from megacore.models.base import LossTotals
from megacore.models.build import build_model
from megacore.models.gpt import GPTModel
from megacore.models.inputs import MaskRules, ModelInput, input_rules
from megacore.models.layers.attention_bias import attention_mask
from megacore.models.stage import Stage
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup, ProcessMesh
from tests._loss import loss_of
from tests._tiny import tiny_config
from tests.data._config import data_config
from tests.train import _runs

EOD = 3
ROWS = st.integers(2, 12).flatmap(
    lambda s: st.lists(st.lists(st.integers(-1, 5), min_size=s, max_size=s), min_size=1)
)


def rules(**values: object) -> MaskRules:
    flags = dict.fromkeys(
        ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "padded"), True
    )
    return MaskRules(**({"eod_id": EOD} | flags | values))  # type: ignore[arg-type]


def masks_by_loop(
    tokens: list[int], labels: list[int]
) -> tuple[list[bool], list[int], list[list[bool]]]:
    """Return counted labels, positions and visible tokens of a sample, document by document."""
    size = len(tokens)
    sees = [[k <= j for k in range(size)] for j in range(size)]
    positions = list(range(size))
    padding_follows = [token >= 0 > after for token, after in pairwise([*tokens, 0])]
    for at in (i for i, token in enumerate(tokens) if token == EOD or padding_follows[i]):
        for j in range(at + 1, size):
            positions[j] = j - at - 1
            for k in range(at + 1):
                sees[j][k] = False
    counts = [token != EOD and label != -1 for token, label in zip(tokens, labels, strict=True)]
    return counts, positions, sees


@settings(deadline=None)
@given(ROWS)
def test_masks_equal_those_of_the_loop(rows: list[list[int]]) -> None:
    batch = torch.tensor(rows)
    model_input = rules().read(batch)
    assert model_input.loss_mask is not None
    assert model_input.position_ids is not None
    assert model_input.documents is not None
    size = batch.shape[1] - 1
    bias, _ = attention_mask(
        queries=size,
        keys=size,
        causal=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
        documents=model_input.documents,
    )
    assert bias is not None
    assert bias.shape == (len(rows), 1, batch.shape[1] - 1, batch.shape[1] - 1)
    assert set(bias.unique().tolist()) <= {0.0, -torch.inf}
    for number, row in enumerate(rows):
        counts, positions, sees = masks_by_loop(row[:-1], row[1:])
        assert model_input.tokens[number].tolist() == [max(token, 0) for token in row[:-1]]
        assert model_input.labels[number].tolist() == [max(token, 0) for token in row[1:]]
        assert model_input.loss_mask[number].tolist() == counts
        assert model_input.position_ids[number].tolist() == positions
        assert (bias[number, 0] == 0).tolist() == sees


def test_a_batch_without_masks_is_not_copied() -> None:
    batch = torch.tensor([[1, EOD, 2, 4]])
    model_input = MaskRules.of(data_config(), EOD).read(batch)
    assert (model_input.loss_mask, model_input.position_ids, model_input.documents) == (
        None,
        None,
        None,
    )
    assert model_input.tokens.data_ptr() == batch.data_ptr()
    assert model_input.labels.data_ptr() == batch[:, 1:].data_ptr()


def test_each_rule_applies_separately() -> None:
    batch = torch.tensor([[1, EOD, 2, -1]])
    off = {
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "padded": False,
    }
    assert rules(**off | {"eod_mask_loss": True}).read(batch).loss_mask.tolist() == [
        [True, False, True]
    ]  # type: ignore[union-attr]
    assert rules(**off | {"padded": True}).read(batch).loss_mask.tolist() == [[True, True, False]]  # type: ignore[union-attr]
    positions = rules(**off | {"reset_position_ids": True}).read(batch)
    assert (positions.loss_mask, positions.documents) == (None, None)
    assert positions.position_ids.tolist() == [[0, 1, 0]]  # type: ignore[union-attr]
    documents = rules(**off | {"reset_attention_mask": True}).read(batch)
    assert (documents.loss_mask, documents.position_ids) == (None, None)
    assert documents.documents.tolist() == [[0, 0, 1]]  # type: ignore[union-attr]


def test_padding_is_a_document_of_its_own_with_valid_ids_and_no_loss() -> None:
    # A document without an end, as fill-in-the-middle may leave one, is followed by padding.
    model_input = rules().read(torch.tensor([[1, 2, EOD, 4, 5, -1, -1, -1]]))
    assert model_input.documents is not None
    assert model_input.documents.tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert model_input.position_ids is not None
    assert model_input.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert model_input.tokens.tolist() == [[1, 2, EOD, 4, 5, 0, 0]]
    assert model_input.loss_mask is not None
    assert model_input.loss_mask.tolist() == [[True, True, False, True, False, False, False]]


@pytest.mark.parametrize(
    ("values", "padded"),
    [
        ({}, False),
        ({"eod_mask_loss": True}, False),
        ({"packing": "unpacked"}, True),
        ({"packing": "best_fit"}, True),
        ({"add_extra_token": False}, True),
        ({"drop_last_partial": False}, True),
        ({"fim": {}}, True),
    ],
)
def test_padding_is_expected_only_where_it_can_occur(
    values: dict[str, object], padded: bool
) -> None:
    assert MaskRules.of(data_config(**values), EOD).padded == padded


def losses(model: GPTModel, model_input: ModelInput) -> Tensor:
    terms = model.run(model_input)
    assert isinstance(terms, dict)
    return terms["lm_loss"].losses


def gradients(model: GPTModel, loss_tensors: Iterator[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    for loss in loss_tensors:
        loss.sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_documents_of_a_sample_are_trained_separately(recompute: str, groups: int | None) -> None:
    config = tiny_config(train={"recompute": recompute}, num_query_groups=groups)
    model = build_model(config, 32, ProcessMesh.serial()).double()
    batch = torch.tensor([[5, 6, 7, EOD, 8, 9, EOD, 10, 11, 12, 13, 14, 15]])
    model_input = rules(padded=False, eod_mask_loss=False).read(batch)
    together = losses(model, model_input)
    separate = [
        loss_of(model, batch[:, a:b], batch[:, a + 1 : b + 1]) for a, b in ((0, 4), (4, 7), (7, 12))
    ]
    torch.testing.assert_close(together, torch.cat(separate, 1))
    expected = gradients(model, iter([torch.cat(separate, 1)]))
    actual = gradients(
        model,
        iter([losses(model, model_input)]),
    )
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_mask_of_one_document_is_the_causal_mask() -> None:
    config = tiny_config()
    model = build_model(config, 32, ProcessMesh.serial()).double()
    tokens = torch.arange(12)[None]
    documents, positions = torch.zeros_like(tokens), torch.arange(12)[None]
    plain = loss_of(model, tokens, tokens)
    masked = losses(model, ModelInput(tokens, tokens, position_ids=positions, documents=documents))
    torch.testing.assert_close(masked, plain)


def test_only_labels_that_count_enter_the_loss() -> None:
    config = _runs.config(data={"eod_mask_loss": True, "add_extra_token": False})
    stage = Stage(config, 32, ProcessMesh.serial(), special_tokens=SpecialTokens(eod=EOD))
    batches = [torch.tensor([[1, EOD, 2, 5, -1], [4, 4, EOD, -1, -1]]), torch.full((1, 5), -1)]
    totals = LossTotals(1, None, stage.device)
    (total, count), *_ = stage.loss_sum(iter(batches), [2, 1], totals).tolist()
    model = stage.chunks[0].eval()
    with torch.no_grad():
        losses = loss_of(
            model, batches[0][:, :-1].clamp(min=0), batches[0][:, 1:].clamp(min=0)
        ).double()
    # Of the first sample 1 -> EOD and 2 -> 5; of the second 4 -> 4 and 4 -> EOD.
    assert count == 4
    assert total == pytest.approx(float(losses[0, [0, 2]].sum() + losses[1, :2].sum()), rel=1e-6)


def test_t5_needs_a_start_token_for_its_decoder() -> None:
    config = tiny_config().model_copy(update={"family": "t5"})
    model_input = input_rules(config, SpecialTokens(pad=5)).read(
        torch.zeros(1, 80, dtype=torch.int64)
    )
    assert model_input.decoder_tokens is not None
    assert model_input.decoder_tokens[0, :2].tolist() == [5, 0]
    with pytest.raises(ConfigError, match="begins what its decoder reads with the padding token"):
        input_rules(config, SpecialTokens(eod=0))


def test_a_part_has_its_tokens_and_the_positions_and_documents_of_the_whole() -> None:
    batch = torch.tensor([[1, 2, 3, 4, 5, 3, 6, 7, 8]])
    whole = rules(padded=False).read(batch)
    parts = [whole.part(ParallelGroup(None, rank, 2)) for rank in range(2)]
    assert [part.tokens.tolist() for part in parts] == [[[1, 2, 6, 7]], [[3, 4, 5, 3]]]
    assert [part.labels.tolist() for part in parts] == [[[2, 3, 7, 8]], [[4, 5, 3, 6]]]
    masks = [part.loss_mask.tolist() for part in parts if part.loss_mask is not None]
    assert masks == [[[True] * 4], [[False, True, True, False]]]
    for part in parts:
        assert part.count == 6
        assert part.documents is whole.documents
        assert part.position_ids is whole.position_ids
    assert whole.part(SINGLE_RANK) is whole
