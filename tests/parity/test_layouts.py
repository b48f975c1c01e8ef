"""Losses and gradient norms in every layout, compared with the serial run.

Weights are not compared: gradients that are zero in theory become Adam steps of rounding noise.
"""

from dataclasses import replace
from typing import Any

import pytest

from megacore.kernels.cpu.common import runs_bf16
from tests._dist import run_distributed
from tests.parity._training import SOURCES, STEPS, Case, Result, leaks, train, train_all

TP2 = {"tensor_model_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
CP2 = {"context_parallel_size": 2}
CP4 = {"context_parallel_size": 4}
SP = {"sequence_parallel": True}
INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}
GPIPE = {"pipeline_schedule": "gpipe"}
DELAYED = {"delay_weight_gradients": True}
ZERO1, ZERO2, ZERO3 = (
    {"data_parallel_sharding": state} for state in ("optimizer", "gradients", "parameters")
)
SMALL_BUCKETS = {"grad_reduce_bucket_mb": 0.05}
GQA = {"num_query_groups": 2}
SMOOTH = {"label_smoothing": 0.1, "z_loss": 1e-3}
SMALL = {"num_layers": 2}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
"""Options of separate documents.

The mean of a micro batch is over the unmasked labels, so micro batches must be the serial run's.
"""
M4 = {"micro_batch_size": 2}
"""Four micro batches."""
M8 = {"micro_batch_size": 1}
FP16 = {"loss_scale": {"initial": 1024.0}}
BF16 = {"precision": "bf16"}
PLAIN = {"kernels": "plain"}
"""Kernels without C++, which the serial run uses on CPUs with AVX-512."""
WINDOW = {"sliding_window": 9}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
"""Dropout: the same elements in every layout without tensor parallelism."""
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
GEMMA2 = LLAMA | {
    "activation": "geglu_tanh",
    "norm_position": "sandwich",
    "apply_layernorm_1p": True,
    "scale_embeddings": True,
    "sliding_window": 5,
    "window_attn_skip_freq": 2,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "untie_embeddings_and_output_weights": False,
}
OLMO2 = LLAMA | {
    "norm_position": "reordered",
    "qk_layernorm": True,
    "qk_layernorm_scope": "projection",
    "init_method_std": 0.1,
}
"""Its norms magnify the rounding of small initial values."""
QWEN2 = LLAMA | {
    "add_qkv_bias": True,
    "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
}
LLAMA3 = LLAMA | {
    "untie_embeddings_and_output_weights": False,
    "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 8},
}
DYNAMIC = LLAMA | {
    "sliding_window": 9,
    "rotary_percent": 0.5,
    "rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
}
T5 = {
    "num_layers": 2,
    "position_embedding_type": "relative",
    "normalization": "rmsnorm",
    "add_bias_linear": False,
    "activation": "relu",
}
T5_V11 = T5 | {
    "activation": "geglu_tanh",
    "untie_embeddings_and_output_weights": True,
    "kv_channels": 16,
}


def muon(parallel: dict[str, Any], model: dict[str, Any] = SMALL, **values: Any) -> Case:
    return Case(parallel, model=model, optim={"name": "muon"}, **values)


def llama(parallel: dict[str, Any], model: dict[str, Any] = LLAMA, **values: Any) -> Case:
    return Case(parallel, model=model, **values)


def olmo2(parallel: dict[str, Any], **values: Any) -> Case:
    return Case(parallel, model=OLMO2, optim={"lr": 3e-3}, **values)


def bert(parallel: dict[str, Any], **model: Any) -> Case:
    return Case(parallel, model=SMALL | model, optim={"lr": 3e-3}, family="bert")


def t5(parallel: dict[str, Any], model: dict[str, Any] = T5, **values: Any) -> Case:
    return Case(parallel, model=model, optim={"lr": 3e-3}, family="t5", **values)


TWO_RANKS = {
    "tp2": Case(TP2),
    "tp2 sp": Case(TP2 | SP, steps=STEPS),
    "tp2 sp, one sample at a time": Case(TP2 | SP, {"micro_batch_size": 1}),
    "tp2 gqa": Case(TP2, model=GQA),
    "muon tp2 sp": muon(TP2 | SP),
    "muon pp2": muon(PP2, train=M4),
    "muon dp2 distributed optimizer": muon(ZERO1),
    "muon dp2 distributed optimizer, small buckets": muon(ZERO1 | {"grad_reduce_bucket_mb": 0.05}),
    "muon llama tp2": muon(TP2, LLAMA),
    "muon llama tp2 bf16": muon(TP2, LLAMA, train=BF16),
    "tp2, plain kernels": Case(TP2, PLAIN),
    "tp2 sp bf16, plain kernels": Case(TP2 | SP, BF16 | PLAIN, SMALL),
    "tp2, label smoothing and z-loss": Case(TP2, SMOOTH),
    "tp2 sp, separate documents": Case(TP2 | SP, data=DOCUMENTS),
    "pp2": Case(PP2, M4),
    "pp2 interleaved, separate documents": Case(PP2 | INTERLEAVED, data=DOCUMENTS),
    "pp2 gpipe": Case(PP2 | GPIPE, M4),
    "pp2 interleaved": Case(PP2 | INTERLEAVED, M4, steps=STEPS),
    "pp2 delayed": Case(PP2 | DELAYED, M4),
    "pp2 interleaved, delayed": Case(PP2 | INTERLEAVED | DELAYED, M4 | {"recompute": "full"}),
    "muon pp2 delayed": muon(PP2 | DELAYED, train=M4),
    "pp2 uneven": Case(PP2 | {"pipeline_partition": [3, 1]}),
    "dp2": Case(),
    "dp2 distributed optimizer": Case(ZERO1, steps=STEPS),
    "dp2 gradients, small buckets": Case(ZERO2 | SMALL_BUCKETS, M4, steps=STEPS),
    "dp2 parameters, small buckets": Case(
        ZERO3 | SMALL_BUCKETS, M4 | {"recompute": "full"}, steps=STEPS
    ),
    "dp2 parameters bf16": Case(ZERO3, BF16, SMALL, steps=STEPS),
    "llama dp2 parameters": llama(ZERO3 | SMALL_BUCKETS),
    "muon dp2 gradients": muon(ZERO2, train=M4),
    "muon dp2 parameters": muon(ZERO3, train=M4),
    "t5 dp2 parameters": t5(ZERO3, T5_V11),
    "dp2 distributed optimizer, small buckets": Case(ZERO1 | {"grad_reduce_bucket_mb": 0.05}),
    "tp2 bf16": Case(TP2, BF16, SMALL, steps=STEPS),
    "pp2 bf16": Case(PP2, BF16, SMALL, steps=STEPS),
    "dp2 distributed optimizer bf16": Case(ZERO1, BF16, SMALL, steps=STEPS),
    "tp2 sp fp16": Case(TP2 | SP, {"precision": "fp16"}, SMALL, FP16),
    "pp2 fp16": Case(PP2, {"precision": "fp16"}, SMALL, FP16),
    "dp2 distributed optimizer fp16": Case(ZERO1, {"precision": "fp16"}, SMALL, FP16, steps=STEPS),
    "llama tp2": llama(TP2),
    "llama tp2 sp": llama(TP2 | SP),
    "llama pp2": llama(PP2, train=M4),
    "llama pp2 delayed": llama(PP2 | DELAYED, train=M4),
    "llama pp2, plain kernels": llama(PP2, train=M4 | PLAIN),
    "llama dp2 distributed optimizer": llama(ZERO1),
    "gemma2 tp2 sp": llama(TP2 | SP, GEMMA2),
    "gemma2 pp2": llama(PP2, GEMMA2, train=M4),
    "gemma2 tp2 bf16": llama(TP2, GEMMA2, train=BF16),
    "olmo2 tp2": olmo2(TP2),
    "olmo2 tp2 sp, selective recomputation": olmo2(TP2 | SP, train={"recompute": "selective"}),
    "olmo2 pp2": olmo2(PP2, train=M4),
    "olmo2 tp2 bf16": olmo2(TP2, train=BF16),
    "qwen2 tp2 sp": replace(llama(TP2 | SP), model=QWEN2),
    "qwen2 pp2": replace(llama(PP2, train=M4), model=QWEN2),
    "llama 3 tp2": replace(llama(TP2), model=LLAMA3),
    "llama 3 pp2": replace(llama(PP2, train=M4), model=LLAMA3),
    "partial dynamic rope tp2 sp": replace(llama(TP2 | SP), model=DYNAMIC),
    "partial dynamic rope pp2": replace(llama(PP2, train=M4), model=DYNAMIC),
    "cp2": Case(CP2, steps=STEPS),
    "cp2, separate documents": Case(CP2, data=DOCUMENTS),
    "cp2, documents and windows": Case(CP2, model=WINDOW | GQA, data=DOCUMENTS),
    "cp2, distributed optimizer, small buckets": Case(
        CP2 | ZERO1 | {"grad_reduce_bucket_mb": 0.05}, M4
    ),
    "cp2, label smoothing and z-loss": Case(CP2, SMOOTH),
    "cp2, plain kernels, selective recomputation": Case(CP2, PLAIN | {"recompute": "selective"}),
    "cp2, full recomputation": Case(CP2, {"recompute": "full"}),
    "cp2 bf16": Case(CP2, BF16, SMALL),
    "llama cp2": Case(CP2, model=LLAMA),
    "llama cp2, documents": Case(CP2, model=LLAMA, data=DOCUMENTS),
    "gemma2 cp2": llama(CP2, GEMMA2),
    "cp2, dropout": Case(CP2, model=SMALL | DROPOUT),
    "cp2, dropout, plain kernels": Case(CP2, PLAIN, model=SMALL | DROPOUT),
    "cp2, dropout, documents and full recomputation": Case(
        CP2, {"recompute": "full"}, GQA | DROPOUT, data=DOCUMENTS
    ),
    "gemma2 cp2, dropout and selective recomputation": llama(
        CP2, GEMMA2 | DROPOUT, train={"recompute": "selective"}
    ),
    "olmo2 cp2": olmo2(CP2),
    "partial dynamic rope cp2": replace(llama(CP2), model=DYNAMIC),
    "bert tp2 sp": bert(TP2 | SP),
    "bert pp2": bert(PP2, norm_position="post", activation="gelu"),
    "bert pp2 delayed, dropout": bert(PP2 | DELAYED, **DROPOUT),
    "bert pp2, dropout": bert(PP2, **DROPOUT),
    "bert dp2": bert({}, norm_position="post", activation="gelu"),
    "bert dp2, plain kernels": replace(
        bert({}, norm_position="post", activation="gelu"), train=PLAIN
    ),
    "t5 tp2": t5(TP2),
    "t5 tp2 sp": t5(TP2 | SP, T5_V11),
    "t5 pp2": t5(PP2),
    "t5 pp2 delayed": t5(PP2 | DELAYED),
    "t5 pp2, dropout and full recomputation": t5(PP2, T5 | DROPOUT, train={"recompute": "full"}),
    "t5 dp2 distributed optimizer": t5(ZERO1, T5_V11),
    "t5 dp2 distributed optimizer, plain kernels": t5(ZERO1, T5_V11, train=PLAIN),
}
FOUR_RANKS = {
    "tp4": Case(TP4),
    "tp4 sp": Case(TP4 | SP),
    "olmo2 tp4 sp, fewer key-value heads than ranks": olmo2(TP4 | SP),
    "tp4, fewer key-value heads than ranks": Case(TP4, model=GQA),
    "tp4 sp, fewer key-value heads than ranks": Case(TP4 | SP, model=GQA),
    "pp4": Case(PP4, M8),
    "cp4": Case(CP4),
    "cp4, documents and windows": Case(CP4, model=WINDOW, data=DOCUMENTS),
    "llama cp4": Case(CP4, model=LLAMA),
    "llama cp4, dropout": llama(CP4, LLAMA | DROPOUT),
    "cp2 pp2, dropout": Case(CP2 | PP2, M4, DROPOUT),
    "llama cp2 tp2 sp": Case(CP2 | TP2 | SP, model=LLAMA),
    "cp2 tp2 sp, documents": Case(CP2 | TP2 | SP, data=DOCUMENTS),
    "cp2 dp2, distributed optimizer": Case(CP2 | ZERO1, M4),
    "llama cp2 pp2": Case(CP2 | PP2, M4, model=LLAMA),
    "cp2 pp2 interleaved, documents": Case(CP2 | PP2 | INTERLEAVED, data=DOCUMENTS),
    "tp2 pp2": Case(TP2 | PP2, M4, steps=STEPS),
    "tp2 pp2, full recomputation": Case(TP2 | PP2, {"recompute": "full"}),
    "tp2 pp2, selective recomputation": Case(TP2 | PP2, {"recompute": "selective"}),
    "tp2 pp2 sp interleaved, recomputation of one layer": Case(
        TP2 | PP2 | SP | INTERLEAVED, {"recompute": "full", "recompute_num_layers": 1}
    ),
    "pp4 delayed": Case(PP4 | DELAYED, M8),
    "tp2 pp2 sp delayed, bf16": Case(TP2 | PP2 | SP | DELAYED, BF16 | M4, SMALL),
    "dp2 pp2 interleaved, delayed, distributed optimizer": Case(
        PP2 | INTERLEAVED | DELAYED | ZERO1 | SMALL_BUCKETS, M8
    ),
    "llama cp2 pp2 delayed": Case(CP2 | PP2 | DELAYED, M4, model=LLAMA),
    "pp4, separate documents": Case(PP4, data=DOCUMENTS),
    "dp2 pp2 interleaved, distributed optimizer": Case(
        PP2 | INTERLEAVED | ZERO1, {"micro_batch_size": 1}
    ),
    "dp2 tp2 sp, distributed optimizer": Case(TP2 | SP | ZERO1, steps=STEPS),
    "dp4 gradients": Case(ZERO2, M8),
    "dp4 parameters": Case(ZERO3, M8),
    "dp2 pp2 interleaved, gradients": Case(PP2 | INTERLEAVED | ZERO2, M8),
    "dp2 tp2 sp, parameters": Case(TP2 | SP | ZERO3, M4),
    "cp2 dp2, parameters, separate documents": Case(CP2 | ZERO3, M4, data=DOCUMENTS),
    "muon dp2 tp2, gradients": muon(TP2 | ZERO2, LLAMA),
    "dp4": Case(train=M4),
    "muon dp4 distributed optimizer": muon(ZERO1, train=M4),
    "muon dp2 tp2, distributed optimizer": muon(TP2 | ZERO1, LLAMA),
    "muon gqa tp4": muon(TP4, GQA),
    "tp2 pp2 sp bf16": Case(TP2 | PP2 | SP, BF16, SMALL),
    "tp2 pp2 sp fp16": Case(TP2 | PP2 | SP, {"precision": "fp16"}, SMALL, FP16),
    "bert tp2 pp2 sp": bert(TP2 | PP2 | SP),
    "t5 pp4, two stages each": t5(PP4 | {"pipeline_model_parallel_split_rank": 2}),
    "t5 pp4, gpipe, one stage of the encoder": t5(
        PP4 | GPIPE | {"pipeline_model_parallel_split_rank": 1}, T5_V11 | {"num_decoder_layers": 3}
    ),
    "t5 tp2 pp2": t5(TP2 | PP2, T5_V11),
    "t5 tp2 pp2 sp": t5(TP2 | PP2 | SP),
    "t5 dp2 pp2, distributed optimizer": t5(PP2 | ZERO1),
}
FAST = {
    "tp2 sp",
    "muon dp2 distributed optimizer",
    "pp2 interleaved, separate documents",
    "dp2 gradients, small buckets",
    "dp2 parameters, small buckets",
    "dp2 distributed optimizer",
    "tp2 bf16",
    "cp2, documents and windows",
    "cp2, dropout",
    "llama tp2 sp",
    "llama pp2",
    "pp2 interleaved, delayed",
    "bert dp2",
    "t5 pp2",
    "t5 dp2 distributed optimizer",
}
"""Cases of two ranks that `make test` runs."""
LONG = {
    "tp2 sp, one sample at a time",
    "muon dp2 distributed optimizer, small buckets",
    "muon dp2 gradients",
    "muon llama tp2 bf16",
    "tp2 sp bf16, plain kernels",
    "pp2 fp16",
    "dp2 distributed optimizer fp16",
    "llama pp2 delayed",
    "llama pp2, plain kernels",
    "llama dp2 distributed optimizer",
    "gemma2 tp2 bf16",
    "olmo2 tp2 bf16",
    "qwen2 pp2",
    "llama 3 tp2",
    "partial dynamic rope pp2",
    "partial dynamic rope cp2",
    "cp2, label smoothing and z-loss",
    "cp2, plain kernels, selective recomputation",
    "cp2, full recomputation",
    "cp2, dropout, plain kernels",
    "cp2 bf16",
    "bert dp2, plain kernels",
    "t5 tp2",
    "t5 dp2 distributed optimizer, plain kernels",
    "tp4",
    "tp4 sp, fewer key-value heads than ranks",
    "cp4",
    "cp2 pp2, dropout",
    "cp2 tp2 sp, documents",
    "tp2 pp2, selective recomputation",
    "tp2 pp2 sp fp16",
    "pp4 delayed",
    "dp4 gradients",
    "muon dp2 tp2, gradients",
    "muon gqa tp4",
    "t5 tp2 pp2 sp",
}
"""Cases that combine what others contain, which `make test-long` runs."""
OPTIONS_OF_THE_LAYOUT = ("recompute", "kernels", "compile")
"""Prefixes of training options that the serial run leaves at their defaults."""
TOLERANCES = {
    "fp32": (1e-5, 1e-5),
    "bf16": (5e-4 if runs_bf16() else 8e-4, 2e-2),
    "fp16": (1e-4, 2e-3),
}
"""Relative tolerances of losses and gradient norms.

Sums in another order are rounded differently, to 2^-8 or 2^-11. Torch rounds to bf16 more often
than the C++ kernels of CPUs with AVX512-BF16.
"""


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> list[dict[str, Result]]:
    return run_distributed(2, train_all, selected(TWO_RANKS, request))


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest) -> list[dict[str, Result]]:
    return run_distributed(4, train_all, selected(FOUR_RANKS, request))


@pytest.fixture(scope="module")
def serial() -> dict[str, Result]:
    return {}


def selected(cases: dict[str, Case], request: pytest.FixtureRequest) -> dict[str, Case]:
    """Return the cases whose tests run in this session: one spawn of processes runs them all.

    Cases with delayed weight gradients are compared with those without.
    """
    names = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    }
    names |= {name.replace(" delayed", "") for name in names}
    return {name: case for name, case in cases.items() if name in names}


def slow_unless(cases: dict[str, Case], fast: set[str], long: set[str]) -> list[Any]:
    """Return the names of the cases as parameters, marked slow unless they are fast or long."""
    assert fast <= cases.keys()
    marks = {name: pytest.mark.long if name in long else pytest.mark.slow for name in cases}
    return [pytest.param(name, marks=() if name in fast else marks[name]) for name in cases]


def compare(
    case: Case, name: str, ranks: list[dict[str, Result]], serial: dict[str, Result]
) -> None:
    precision, z_loss = case.train.get("precision"), case.train.get("z_loss")
    values = (case.model, case.optim, case.data, precision, z_loss, case.steps, case.family)
    micro_batch_size = case.train.get("micro_batch_size") if case.data == DOCUMENTS else None
    key = repr((*values, micro_batch_size))
    if key not in serial:
        options = {
            name: value
            for name, value in case.train.items()
            if not name.startswith(OPTIONS_OF_THE_LAYOUT)
        }
        serial[key] = train(
            replace(case, parallel={}, train=options, engine="native", deepspeed={})
        )
    expected = serial[key]
    loss_tolerance, norm_tolerance = TOLERANCES[case.train.get("precision", "fp32")]
    assert expected.losses[-1] < expected.losses[0]
    for rank in ranks:
        result = rank[name]
        assert result.differing == []
        assert result.leaking == []
        assert result.losses == pytest.approx(expected.losses, rel=loss_tolerance)
        assert result.terms == {
            name: pytest.approx(losses, rel=loss_tolerance)
            for name, losses in expected.terms.items()
        }
        assert result.grad_norms == pytest.approx(expected.grad_norms, rel=norm_tolerance)
    sums = sum_over_layout(case, [rank[name].validation for rank in ranks])
    whole = len(expected.terms)
    assert sums[:whole] == pytest.approx(expected.validation[:whole], rel=loss_tolerance)
    # A range or source has few tokens, so that less of their rounding in half precision averages
    # out.
    ranges = loss_tolerance * (1 if loss_tolerance == TOLERANCES["fp32"][0] else 8)
    assert sums[whole:] == pytest.approx(expected.validation[whole:], rel=ranges)
    assert sum(sums[-SOURCES:]) == pytest.approx(sums[0], rel=1e-6)
    tokens = sum_over_layout(case, [rank[name].source_tokens for rank in ranks])
    assert tokens == expected.source_tokens
    assert all(rank[name].losses == ranks[0][name].losses for rank in ranks)
    assert all(rank[name].grad_norms == ranks[0][name].grad_norms for rank in ranks)


def sum_over_layout(case: Case, validations: list[list[float]]) -> list[float]:
    """Return the sums over replicas, each scored alike on all its tensor-parallel ranks."""
    tensor = case.parallel.get("tensor_model_parallel_size", 1)
    return [sum(term) / tensor for term in zip(*validations, strict=True)]


@pytest.mark.parametrize("name", slow_unless(TWO_RANKS, FAST, LONG))
def test_two_ranks_match_the_serial_run(
    name: str, two_ranks: list[dict[str, Result]], serial: dict[str, Result]
) -> None:
    compare(TWO_RANKS[name], name, two_ranks, serial)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["pp2 delayed", "muon pp2 delayed", "bert pp2 delayed, dropout", "t5 pp2 delayed"]
)
def test_delayed_weight_gradients_give_the_same_bits(
    name: str, two_ranks: list[dict[str, Result]]
) -> None:
    for rank in two_ranks:
        whole, delayed = rank[name.replace(" delayed", "")], rank[name]
        assert delayed.losses == whole.losses
        assert delayed.grad_norms == whole.grad_norms
        assert delayed.validation == whole.validation


@pytest.mark.parametrize("name", slow_unless(FOUR_RANKS, set(), LONG))
def test_four_ranks_match_the_serial_run(
    name: str, four_ranks: list[dict[str, Result]], serial: dict[str, Result]
) -> None:
    compare(FOUR_RANKS[name], name, four_ranks, serial)


@pytest.mark.parametrize("name", ["without masks", "with masks"])
def test_a_leak_between_documents_is_found(name: str) -> None:
    """Check the search for leaks: without masks, documents see each other."""
    masked = name == "with masks"
    leaking = leaks(Case(model=SMALL, data={"reset_attention_mask": masked}))
    assert bool(leaking) is not masked
    assert masked or {"losses", "losses by position"} <= set(leaking)
