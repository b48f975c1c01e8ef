"""Estimates of activations compared with what autograd saves, for every family.

GPT-2's are in test_memory.
"""

import pytest

from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan.memory import Activations
from megacore.plan.throughput import recomputed_layers
from tests.plan._models import BERT, GEMMA2, LLAMA, OLMO2, T5, VOCAB_SIZE, family, saved_bytes


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "overrides",
    [
        LLAMA,
        GEMMA2,
        OLMO2,
        OLMO2 | {"model.num_query_groups": None},
        BERT,
        BERT | {"model.norm_position": "post"},
        T5,
        T5 | {"model.activation": "relu"},
    ],
    ids=[
        "llama",
        "gemma2",
        "olmo2",
        "olmo2 all heads",
        "bert",
        "bert post",
        "t5 gated",
        "t5 relu",
    ],
)
def test_activations_of_every_family_are_close_to_what_autograd_saves(
    overrides: dict[str, object], dropout: float, recompute: str
) -> None:
    dropouts = {"model.hidden_dropout": dropout, "model.attention_dropout": dropout}
    config = family(**overrides | dropouts | {"train.recompute": recompute})
    (chunk,) = chunks_of(config, VOCAB_SIZE)
    assert Activations(config, 4, "cpu").chunk(chunk) == pytest.approx(
        saved_bytes(config, "fp32"), rel=0.08
    )


@pytest.mark.parametrize(("limit", "layers"), [(1, (1, 0)), (4, (3, 1))])
def test_the_recomputation_limit_counts_layers_of_both_stacks(
    limit: int, layers: tuple[int, int]
) -> None:
    config = family(**T5 | {"train.recompute": "full", "train.recompute_num_layers": limit})
    (chunk,) = chunks_of(config, VOCAB_SIZE)
    assert recomputed_layers([chunk], limit) == layers
    assert Activations(config, 4, "cpu").chunk(chunk) == pytest.approx(
        saved_bytes(config, "fp32"), rel=0.08
    )
