"""No document sees another one: the check before a training, and whole models to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megacore.engine.build import Compiler
from megacore.errors import LeakError
from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels
from megacore.kernels.cpu.common import runs_fp32
from megacore.kernels.implementation import Setting
from megacore.kernels.spans import Spans
from megacore.models.base import Model
from megacore.models.gpt import GPTModel
from megacore.models.leak_check import check_documents
from megacore.parallel.context import positions_of_rank
from megacore.parallel.mesh import ParallelGroup
from tests import _families, _family_ranks
from tests._dist import run_distributed
from tests._families import DECODERS, FIRST, LENGTH
from tests._family_ranks import LONG

CPU = torch.device("cpu")


def kernels(name: str, kind: str, dtype: torch.dtype = torch.float32) -> Kernels:
    softcapped = "attn_logit_softcapping" in DECODERS[name]
    if kind == "plain":
        return plain_kernels()
    return choose_kernels(Setting(CPU, dtype, softcapped=softcapped))


def model(
    name: str,
    kind: str,
    *,
    length: int = LENGTH,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Model:
    spec = _families.spec(name, max_position_embeddings=length)
    return _families.model(spec, kernels=kernels(name, kind, dtype), **options).to(dtype)


KINDS = ["plain", *(["chosen"] if runs_fp32() else [])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_changed_document_changes_no_bit_of_another(name: str, kind: str) -> None:
    """Losses, and gradients of every parameter: whole, recomputed, and as a pipeline's chunks."""
    pieces = _families.chunks(_families.spec(name))
    assert _families.leaks(lambda: [model(name, kind)]) == []
    assert _families.leaks(lambda: [model(name, kind, recompute="selective")]) == []
    assert _families.leaks(lambda: [model(name, kind, chunk=chunk) for chunk in pieces]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_changed_document_changes_no_bit_over_several_blocks(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    assert _families.leaks(lambda: [model(name, kind, length=LONG, dtype=dtype)], LONG) == []


def test_a_changed_document_changes_no_bit_on_two_ranks() -> None:
    """With tensor, sequence and context parallelism, in fp32 and bf16."""
    for leaks in run_distributed(2, _family_ranks.leaks, 2):
        assert len(leaks) > 100
        assert not any(leaks.values()), leaks


def test_layers_of_divided_sequences_share_one_mask() -> None:
    """Plain torch would otherwise keep a dense mask for each layer."""
    parts = [model("gemma2", "plain", cp=ParallelGroup(None, rank, 2)) for rank in range(2)]
    whole, like = model("gemma2", "plain"), torch.empty(0)
    documents = _families.documents(2).documents
    assert isinstance(whole, GPTModel)
    expected = whole.shared(LENGTH, None, like, documents=documents)
    for part in parts:
        assert isinstance(part, GPTModel)
        shared = part._divided(LENGTH, None, like, documents)
        places = positions_of_rank(LENGTH, part.cp, CPU)
        for masks, dense in ((shared, expected), (shared.windowed, expected.windowed)):
            assert masks is not None
            assert dense is not None
            assert masks.bias is not None
            assert dense.bias is not None
            assert masks.spans is None
            assert masks.bias.equal(dense.bias[:, :, places])


@pytest.mark.parametrize("name", DECODERS)
def test_spans_equal_the_dense_mask_in_every_decoder(name: str) -> None:
    dense, spanned = (
        _families.backward([model(name, kind)], _families.documents(2))
        for kind in ("plain", KINDS[-1])
    )
    for what, value in dense.items():
        assert _families.difference(spanned[what], value) < 2e-5, what


def test_a_document_reads_like_one_of_its_own() -> None:
    """With positions that restart, learned or rotary, its losses are those of the document."""
    for name in ("gpt2", "llama", "mistral"):
        module = model(name, KINDS[-1])
        batch, rules = _families.document_rows(2), _families.document_rules()
        together = module.run(rules.read(batch))
        alone = module.run(rules.read(batch[:1, FIRST:]))
        assert isinstance(together, dict)
        assert isinstance(alone, dict)
        torch.testing.assert_close(
            together["lm_loss"].losses[:1, FIRST:], alone["lm_loss"].losses, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_the_check_passes_for_every_decoder(name: str, kind: str) -> None:
    assert "checked on 300 tokens" in check_documents([model(name, kind)], 300, CPU)
    for rank in range(2):
        part = model(name, kind, cp=ParallelGroup(None, rank, 2))
        assert "checked on 300 tokens" in check_documents([part], 302, CPU)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_cache")
def test_compiled_layers_leak_nothing() -> None:
    """Outputs and gradients of whole models, and the attention that the check compiles."""
    compiler = Compiler(CPU)

    def build() -> list[Model]:
        module = model("gemma2", KINDS[-1])
        assert compiler.compile_layers([module]) == "torch.compile of each layer"
        return [module]

    counters.clear()
    assert _families.leaks(build) == []
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    assert "checked on 300 tokens" in check_documents(build(), 300, CPU)
    assert counters["stats"]["unique_graphs"] > graphs
    assert compiler.failed is None


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_cache")
def test_the_check_passes_for_compiled_layers_with_attention_dropout() -> None:
    """A compiled graph does not seed the dropout that it draws, which the layer does before it."""
    module = _families.model(_families.spec("llama", attention_dropout=0.1)).float()
    Compiler(CPU).compile_layers([module])
    assert "checked on 300 tokens" in check_documents([module], 300, CPU)


@pytest.fixture(params=[("spans", 1), ("bias", 1), ("spans", 2), ("bias", 2)], ids=str)
def leaking(request: pytest.FixtureRequest) -> Model:
    """A model whose kernel lets tokens see the previous document's last token."""
    chosen = kernels("llama", KINDS[-1])

    def attend(*parts: Tensor, spans: Spans | None = None, bias: Tensor | None, **rest: Any) -> Any:
        if spans is not None:
            spans = Spans((spans.first - 1).clamp(min=0), spans.last)
        if bias is not None:
            bias = torch.maximum(bias, bias.roll(-1, -1))
        return chosen.attention(*parts, spans=spans, bias=bias, **rest)

    masks, parts = request.param
    faulty = replace(chosen, attention=attend, masks="spans" if masks == "spans" else "dense")
    cp = ParallelGroup(None, 0, parts)
    return _families.model(_families.spec("llama"), kernels=faulty, cp=cp).float()


def test_a_leak_is_a_typed_error(leaking: Model) -> None:
    with pytest.raises(LeakError, match=r"layer 0's \w+ ?\w* depends on another document"):
        check_documents([leaking], 300, CPU)
