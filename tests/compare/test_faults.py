"""Planted faults of conversions: the comparison names each."""

import shutil
from pathlib import Path

import pytest
import torch

from megacore.checkpoint.save import save_checkpoint
from megacore.compare.fields import field_findings
from megacore.compare.models import compare_models
from megacore.compare.relations import relate
from megacore.compare.report import Report
from megacore.config.spec import ModelSpec
from megacore.convert.hf.write import write_model
from tests.compare._faults import FAULTS, Fault
from tests.convert._models import MODELS, our_model, tiny_spec

Original = tuple[ModelSpec, Path, Path]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    """Return specification, checkpoint and transformers directory of each model."""
    result = {}
    root = tmp_path_factory.mktemp("originals")
    for name in MODELS:
        spec = tiny_spec(name, num_layers=2)
        tensors = {key: value.detach() for key, value in our_model(spec).named_parameters()}
        write_model(root / name / "hf", spec, tensors)
        checkpoint = save_checkpoint(
            root / name / "checkpoints",
            5,
            {f"model.{key}": value for key, value in tensors.items()},
            {"model": spec.model_dump(mode="json")},
        )
        result[name] = spec, checkpoint, root / name / "hf"
    return result


def damaged(fault: Fault, original: Original, target: Path) -> Report:
    spec, checkpoint, directory = original
    shutil.copytree(directory, target / "damaged")
    fault.damage(target / "damaged", spec)
    return compare_models(checkpoint, target / "damaged")


@pytest.mark.parametrize("name", MODELS)
def test_a_conversion_without_a_fault_is_equal(name: str, originals: dict[str, Original]) -> None:
    _, checkpoint, directory = originals[name]
    report = compare_models(checkpoint, directory)
    assert report.equal, report.differences
    assert report.facts["logits"]["transformers_b"] <= 1e-4


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_planted_fault_is_named(
    fault: Fault, originals: dict[str, Original], tmp_path: Path
) -> None:
    report = damaged(fault, originals[fault.model], tmp_path)
    assert not report.equal
    assert fault.cause in report.causes, report.differences
    effective = {each.cause for each in report.differences if each.explains in ("all", "part")}
    if fault.explains and fault.cause != "unexplained":
        assert fault.cause in effective, report.differences


def test_values_that_are_no_numbers_differ_from_zeros_and_large_numbers() -> None:
    infinity, largest = float("inf"), torch.finfo(torch.float32).max
    for first, second in ((0.0, float("nan")), (largest, infinity), (infinity, -infinity)):
        relation = relate(torch.tensor([first, 1.0]), torch.tensor([second, 1.0]))
        assert relation is not None
        assert relation.kind == "not finite"
    same = torch.tensor([float("nan"), infinity, 1.0])
    assert relate(same, same.clone()) is None


def test_a_field_that_an_export_fills_in_or_drops_is_no_difference() -> None:
    ours = tiny_spec("gemma2", query_pre_attn_scalar=None, residual_init_std=0.01)
    theirs = tiny_spec("gemma2", query_pre_attn_scalar=ours.model.head_dim)
    assert not [each for each in field_findings(ours, theirs) if each.differs]
    theirs = tiny_spec("gemma2", query_pre_attn_scalar=ours.model.head_dim + 1)
    assert [each.where for each in field_findings(ours, theirs) if each.differs] == [
        ("query_pre_attn_scalar",)
    ]
