"""Estimates of activations compared with what autograd saves for every family, and formulas.

Those of GPT-2's whole ranks are in test_memory.
"""

import pytest
import torch

from megacore.kernels import cross_entropy
from megacore.kernels.spans import Spans
from megacore.pipeline_parallel import executor
from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan import activations
from megacore.plan.activations import Activations
from megacore.plan.throughput import recomputed_layers
from tests.plan._models import (
    BERT,
    GEMMA2,
    LLAMA,
    OLMO2,
    T5,
    VOCAB_SIZE,
    family,
    layout,
    saved_bytes,
    tiny,
)


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


def test_the_planner_knows_the_blocks_of_the_loss() -> None:
    assert activations._LOSS_BLOCK == cross_entropy._GPU_ELEMENTS


def test_the_planner_knows_how_many_messages_are_received_in_advance() -> None:
    assert activations._AHEAD == executor.AHEAD


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_reset_attention_mask_adds_one_bias_for_all_layers(recompute: str) -> None:
    plain = {"train.kernels": "plain"}  # which takes a dense mask on GPUs
    config = tiny(0.0, recompute, **{"data.reset_attention_mask": True} | plain)
    added = saved_bytes(config, "fp32") - saved_bytes(tiny(0.0, recompute), "fp32")
    # On a CPU, autograd also saves a few statistics.
    assert added == pytest.approx(4 * 128 * 128 * 4, rel=0.2)
    chunk = chunks_of(config, VOCAB_SIZE)[0]
    assert Activations(config, 4, "cuda").chunk(chunk) - Activations(
        tiny(0.0, recompute, **plain), 4, "cuda"
    ).chunk(chunk) == (4 * 128 * 128 * 4)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_documents_add_two_numbers_per_token_on_cpus(kernels: str) -> None:
    chosen = {"train.kernels": kernels}
    config = tiny(**{"data.reset_attention_mask": True} | chosen)
    chunk = chunks_of(config, VOCAB_SIZE)[0]
    added = Activations(config, 4, "cpu").chunk(chunk)
    added -= Activations(tiny(**chosen), 4, "cpu").chunk(chunk)
    places = torch.zeros(4, 128, dtype=torch.long)
    spans = Spans.of(128, 128, causal=True, device=torch.device("cpu"), documents=places)
    assert added == spans.first.nbytes + spans.last.nbytes == 4 * 128 * 8


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "sbh"),
    [(1, False, 34), (2, False, 10 + 24 / 2), (4, False, 16), (4, True, 34 / 4)],
)
def test_activations_of_a_layer_equal_the_papers_formula(
    tp: int, sequence_parallel: bool, sbh: float
) -> None:
    config = layout(tp, **{"parallel.sequence_parallel": sequence_parallel})
    tokens = config.train.micro_batch_size * config.data.seq_length
    assert Activations(config, 2, "cuda").layer == sbh * tokens * config.model.hidden_size


def test_grouped_queries_keep_fewer_keys_and_values() -> None:
    def layer_bytes(tp: int, groups: int | None) -> int:
        return Activations(layout(tp, **{"model.num_query_groups": groups}), 4, "cuda").layer

    tokens, head_dim, element = 2 * 128, 32, 4
    assert layer_bytes(1, None) - layer_bytes(1, 2) == tokens * element * 2 * 2 * head_dim
    assert layer_bytes(2, None) - layer_bytes(2, 2) == tokens * element * 2 * 1 * head_dim
    # two gathered groups for one local head
    assert layer_bytes(4, 2) - layer_bytes(4, None) == tokens * element * 2 * 1 * head_dim


@pytest.mark.parametrize("parts", [2, 4])
def test_divided_sequences_keep_their_part_and_the_gathered_keys_and_values(parts: int) -> None:
    def layer_bytes(parts: int, recompute: str) -> int:
        values = {"parallel.context_parallel_size": parts, "train.recompute": recompute}
        grouped = layout(**values | {"model.num_query_groups": 2})
        return Activations(grouped, 4, "cuda").recomputed_layer

    tokens, head_dim, element = 2 * 128, 32, 4
    gathered = (parts - 1) * tokens // parts * element * 2 * 2 * head_dim
    assert layer_bytes(parts, "none") == layer_bytes(1, "none") // parts + gathered
    assert layer_bytes(parts, "selective") == layer_bytes(1, "selective") // parts


def test_selective_recomputation_drops_the_attention_scores() -> None:
    config = layout(2, **{"train.recompute": "selective"})
    heads, s, b = 4, 128, 2
    storage = Activations(config, 4, "cpu")
    assert (
        storage.layer - storage.recomputed_layer
        == storage.attention
        == 3 * 4 * b * (heads // 2) * s * s
    )
    assert Activations(config, 4, "cuda").attention == 0
