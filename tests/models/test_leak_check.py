"""No document sees another one: the check before a training, and whole models to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import LeakError
from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels
from megacore.kernels.cpu.common import runs_fp32
from megacore.kernels.spans import Spans
from megacore.models.base import Model
from megacore.models.leak_check import check_documents
from tests import _families, _family_ranks
from tests._dist import run_distributed
from tests._families import DECODERS, FIRST

CPU = torch.device("cpu")


def kernels(name: str, kind: str) -> Kernels:
    softcapped = "attn_logit_softcapping" in DECODERS[name]
    if kind == "plain":
        return plain_kernels()
    return choose_kernels(CPU, torch.float32, softcapped=softcapped)


def model(name: str, kind: str, **options: Any) -> Model:
    return _families.model(_families.spec(name), kernels=kernels(name, kind), **options).float()


KINDS = ["plain", *(["chosen"] if runs_fp32() else [])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_changed_document_changes_no_bit_of_another(name: str, kind: str) -> None:
    """Losses, and gradients of every parameter: whole, recomputed, and as a pipeline's chunks."""
    pieces = _families.chunks(_families.spec(name))
    assert _families.leaks(lambda: [model(name, kind)]) == []
    assert _families.leaks(lambda: [model(name, kind, recompute="selective")]) == []
    assert _families.leaks(lambda: [model(name, kind, chunk=chunk) for chunk in pieces]) == []


def test_a_changed_document_changes_no_bit_on_two_ranks() -> None:
    """With tensor and sequence parallelism, with the chosen kernels and with plain torch."""
    for leaks in run_distributed(2, _family_ranks.leaks, 2):
        assert len(leaks) > 20
        assert not any(leaks.values()), leaks


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


@pytest.fixture(params=["spans", "bias"])
def leaking(request: pytest.FixtureRequest) -> Model:
    """A model whose kernel lets tokens see the previous document's last token."""
    chosen = kernels("llama", KINDS[-1])

    def attend(*parts: Tensor, spans: Spans | None = None, bias: Tensor | None, **rest: Any) -> Any:
        if spans is not None:
            spans = Spans((spans.first - 1).clamp(min=0), spans.last)
        if bias is not None:
            bias = torch.maximum(bias, bias.roll(-1, -1))
        return chosen.attention(*parts, spans=spans, bias=bias, **rest)

    faulty = replace(chosen, attention=attend, spanned=request.param == "spans")
    return _families.model(_families.spec("llama"), kernels=faulty).float()


def test_a_leak_is_a_typed_error(leaking: Model) -> None:
    with pytest.raises(LeakError, match=r"layer 0's \w+ ?\w* depends on another document"):
        check_documents([leaking], 300, CPU)
