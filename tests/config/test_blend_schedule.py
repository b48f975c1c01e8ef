"""Steps of a blend's weights: reading, refusals, and what a resume may change."""

from typing import Any

import pytest
from pydantic import ValidationError

from megacore.config.blend_schedule import (
    blend_steps,
    check_blends,
    check_past_weights,
    source_names,
)
from megacore.config.data import DataConfig
from megacore.errors import ConfigError


def member(file: str, weight: float | None = 1.0, **values: Any) -> dict[str, Any]:
    return {"weight": weight, "source": {"kind": "prefix", "prefix": f"/data/{file}"}, **values}


def data(*steps: dict[str, Any], **values: Any) -> DataConfig:
    defaults: dict[str, Any] = {"blend": [member("a"), member("b")], "seq_length": 16}
    if steps:
        defaults["blend_schedule"] = steps
    return DataConfig.model_validate(defaults | values)


def step(samples: int | None = None, *weights: float, **values: Any) -> dict[str, Any]:
    return {"samples": samples, "weights": weights or (1.0, 2.0), **values}


def test_tokens_are_the_first_sample_that_begins_at_or_after_them() -> None:
    run = data(step(8), step(None, tokens=160), step(None, tokens=161))
    assert [first for first, _ in blend_steps(run)] == [8, 10, 11]
    check_blends(run)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (data(step(8, 1.0)), r"\[0\]\.weights has 1 numbers for 2 sources"),
        (data(step(8, 0.0, 0.0)), r"\[0\]\.weights are all 0"),
        (data(step(None)), "needs either samples or tokens"),
        (data(step(8, tokens=9)), "needs either samples or tokens"),
        (data(step(8), step(None, tokens=128)), r"\[1\] begins at sample 8, .* not exceed 8"),
        (data(step(8), blend=None, source={"kind": "source_tree"}), "without data.blend"),
        (data(blend=[member("a"), member("b", None)]), r"blend\[1\] has no weight: give it one"),
        (data(blend_temperature=2.0), r"blend\[0\]\.weight is 1 and data\.blend_temperature 2"),
        (data(blend=[member("a"), member("b", 0.0)]), r"blend\[1\]\.weight is 0, so that nothing"),
        (
            data(step(8, 1.0, 0.0), blend=[member("a"), member("b", 0.0)]),
            r"blend\[1\]\.weight is 0",
        ),
        (
            data(step(8), blend=[member("a", 0.0), member("b", 0.0)]),
            "all weights of data.blend are 0",
        ),
        (
            data(blend=[member("a", name="x"), member("b", name="x")]),
            "two sources of the blend have the name x",
        ),
        (
            data(
                blend=None,
                split_blends={
                    "train": [member("a")],
                    "valid": [member("b", max_epochs=2)],
                    "test": [member("c")],
                },
            ),
            r"split_blends\.valid\[0\]\.max_epochs is 2, but only the train split",
        ),
    ],
)
def test_what_does_not_fit_is_refused(run: DataConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_blends(run)


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        data(step(8, 1.0, -1.0))


def test_names_are_given_or_derived_and_distinct() -> None:
    hub = {"weight": 1, "source": {"kind": "hub", "dataset": "some/texts"}}
    files = {"weight": 1, "source": {"kind": "jsonl", "files": ["/data/web *.jsonl.zst"]}}
    run = data(blend=[member("a", name="books"), member("b_text"), hub, files])
    assert source_names(run) == ("books", "1-b-text", "2-texts", "3-web-jsonl-zst")
    assert source_names(data(blend=None, source=hub["source"])) == ("0-texts",)


def test_a_resume_may_change_steps_that_are_not_reached() -> None:
    before = data(step(100, 2.0, 2.0)).model_dump(mode="json")
    check_past_weights(before, data(step(100, 1.0, 1.0), step(200)), 150, "iter_5")
    check_past_weights(before, data(), 100, "iter_5")  # sample 100 is still to come
    check_past_weights(data().model_dump(mode="json"), data(step(100)), 100, "iter_5")
    check_past_weights({}, data(), 100, "iter_5")  # of an older version
    for now, sample in (
        (data(), 100),
        (data(step(100, 1.0, 3.0)), 100),
        (data(step(50), step(100, 1.0, 1.0)), 50),
    ):
        with pytest.raises(ConfigError, match=f"trained on 150 samples, .* at sample {sample}:"):
            check_past_weights(before, now, 150, "iter_5")
