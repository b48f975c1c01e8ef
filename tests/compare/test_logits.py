"""Probe of two models, and the distance of their logits."""

import torch

from megacore.compare.fields import cause_of_field
from megacore.compare.logits import OUTPUT_LAYER, Outputs, distance, make_probe
from tests.convert._models import tiny_spec


def test_own_samples_are_not_cut_to_the_length_of_random_ones() -> None:
    spec = tiny_spec("llama")
    positions = spec.max_position_embeddings
    ids = [3] * positions
    assert make_probe(spec, 50, length=4, tokens=[ids]).tokens.shape == (1, positions)
    assert make_probe(spec, 50, length=4, tokens=[ids, ids[:7]]).tokens.shape == (2, 7)
    assert make_probe(spec, 50, length=4, samples=3).tokens.shape == (3, 4)
    assert make_probe(spec, 50, length=10**6).tokens.shape == (2, positions)


def test_logits_that_agree_have_no_first_layer() -> None:
    logits = torch.full((1, 2, 3), 200.0)
    for difference, first in ((1.5e-4, None), (3e-4, OUTPUT_LAYER)):
        outputs = [Outputs(logits.double() + each, None, {}) for each in (0.0, difference)]
        found = distance(*outputs, 1e-4)
        assert found.within(1e-4) is (first is None)
        assert found.first_layer == first


def test_settings_without_effect_are_remarks() -> None:
    for field in ("data.curate_workers", "data.curate_executor.kind", "resume.override"):
        assert cause_of_field(field) == "remark"
    assert cause_of_field("optim.loss_scale.initial") == "loss_scale"
    assert cause_of_field("data.curate") == "samples"
