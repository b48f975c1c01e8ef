"""Verdict and text of the parity report."""

import json
import math

import pytest

from megacore.convert.report import ParityReport, same_to_four_digits


@pytest.mark.parametrize(
    ("value", "reference", "same"),
    [
        (119.04, 119.0, True),
        (119.06, 119.0, False),
        (1.0004, 1.0, True),
        (1.0006, 1.0, False),
        (9994.4, 9994.0, True),
        (9994.6, 9994.0, False),
        (12.345001, 12.344999, True),
        (math.nan, 12.0, False),
        (math.inf, math.inf, False),
        (0.0, 0.0, True),
    ],
)
def test_values_are_compared_to_four_digits(value: float, reference: float, same: bool) -> None:
    assert same_to_four_digits(value, reference) is same


def test_a_report_without_problems_passes() -> None:
    report = ParityReport(tolerance=1e-4, samples=2, greedy_tokens=64)
    assert report.passed
    assert report.to_json()["passed"] is True
    assert "64 greedy tokens equal" in report.sentence()


def test_a_failing_report_names_problems_numbers_and_layer() -> None:
    report = ParityReport(
        tolerance=1e-4, samples=2, max_abs_logit_difference=math.nan, problems=["its logits differ"]
    )
    report.first_differing_layer = "encoder.layers.1.mlp"
    report.layer_differences = {"encoder.layers.1.mlp": math.inf}
    written = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(written)["passed"] is False
    assert json.loads(written)["max_abs_logit_difference"] == "nan"
    assert report.sentence().startswith("its logits differ; on 2 validation samples")
    assert report.sentence().endswith("first differing layer: encoder.layers.1.mlp")
