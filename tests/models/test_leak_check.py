"""No document sees another one: the check before a training, and whole models to the bit."""

from collections.abc import Iterator
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
from megacore.models.gpt import GPTModel
from megacore.models.inputs import MaskRules, ModelInput
from megacore.models.leak_check import check_documents
from tests import _families
from tests._families import DECODERS, LENGTH, VOCAB

CPU = torch.device("cpu")
END = 1
"""Id that ends a document."""
FIRST = slice(0, 5)
"""Places of the first document in `rows`."""
RULES = MaskRules(
    END, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=False, padded=False
)


def kernels(name: str, kind: str) -> Kernels:
    softcapped = "attn_logit_softcapping" in DECODERS[name]
    if kind == "plain":
        return plain_kernels()
    return choose_kernels(CPU, torch.float32, softcapped=softcapped)


def model(name: str, kind: str, **options: Any) -> Model:
    return _families.model(_families.spec(name), kernels=kernels(name, kind), **options).float()


def rows(seed: int) -> Tensor:
    """Return ids [2, s + 1]: a document of five tokens, drawn with the seed, then others."""
    ids = torch.randint(2, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    ids[:, FIRST] = torch.randint(2, VOCAB, (2, 5), generator=torch.Generator().manual_seed(seed))
    ids[:, 4] = ids[1, 8] = END
    return ids


def read(seed: int, *, rotary: bool = True) -> ModelInput:
    """Return a micro batch whose labels count only after the first document."""
    counts = torch.arange(LENGTH).expand(2, -1) >= 5
    return replace(RULES.read(rows(seed)), loss_mask=counts)


KINDS = ["plain", *(["chosen"] if runs_fp32() else [])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_changed_document_changes_no_bit_of_another(name: str, kind: str) -> None:
    """Losses, and gradients of every parameter, in one chunk and in chunks as of a pipeline."""
    model_spec = _families.spec(name)
    for parts in (
        lambda: [model(name, kind)],
        lambda: [model(name, kind, chunk=chunk) for chunk in _families.chunks(model_spec)],
        lambda: [model(name, kind, recompute="selective")],
    ):
        first, second = (_families.backward(parts(), read(seed)) for seed in (2, 3))
        own = [float(part["losses of lm_loss"][:, FIRST].sum()) for part in (first, second)]
        assert own[0] != own[1]
        for what, before in first.items():
            after = second[what]
            if what == "losses of lm_loss":
                before, after = before[:, 5:], after[:, 5:]
            assert torch.equal(before, after), what


@pytest.mark.parametrize("name", DECODERS)
def test_spans_equal_the_dense_mask_in_every_decoder(name: str) -> None:
    dense, spanned = (
        _families.backward([model(name, kind)], read(2)) for kind in ("plain", KINDS[-1])
    )
    for what, value in dense.items():
        assert _families.difference(spanned[what], value) < 2e-5, what


def test_a_document_reads_like_one_of_its_own() -> None:
    """With positions that restart, learned or rotary, its losses are those of the document."""
    for name in ("gpt2", "llama", "mistral"):
        module = model(name, KINDS[-1])
        batch = rows(2)
        together = module.run(RULES.read(batch))
        alone = module.run(RULES.read(batch[:1, 5:]))
        assert isinstance(together, dict)
        assert isinstance(alone, dict)
        torch.testing.assert_close(
            together["lm_loss"].losses[:1, 5:], alone["lm_loss"].losses, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_the_check_passes_for_every_decoder(name: str, kind: str) -> None:
    assert "checked on 300 tokens" in check_documents([model(name, kind)], 300, CPU)


@pytest.fixture(params=["spans", "bias"])
def leaking(request: pytest.FixtureRequest) -> Iterator[Model]:
    """A model whose kernel lets tokens see the previous document's last token."""
    chosen = kernels("llama", KINDS[-1])

    def attend(*parts: Tensor, spans: Spans | None = None, bias: Tensor | None, **rest: Any) -> Any:
        if spans is not None:
            spans = Spans((spans.first - 1).clamp(min=0), spans.last)
        if bias is not None:
            bias = torch.maximum(bias, bias.roll(-1, -1))
        return chosen.attention(*parts, spans=spans, bias=bias, **rest)

    faulty = replace(chosen, attention=attend, spanned=request.param == "spans")
    yield _families.model(_families.spec("llama"), kernels=faulty).float()


def test_a_leak_is_a_typed_error(leaking: Model) -> None:
    with pytest.raises(LeakError, match=r"layer 0's \w+ ?\w* depends on another document"):
        check_documents([leaking], 300, CPU)


def test_only_causal_models_are_checked() -> None:
    assert isinstance(model("gpt2", "plain"), GPTModel)
