"""What differs from a checkpoint's configuration, and what may."""

from typing import Any

import pytest

from megacore.config.difference import changes_of, check_resume, described
from megacore.config.run import RunConfig
from megacore.errors import ConfigError
from tests.train import _runs


def changed(**sections: Any) -> RunConfig:
    """The small run with other values in some sections; a key `top` holds values beside them."""
    values = _runs.config().model_dump(mode="json")
    for section, changes in sections.items():
        if section == "top":
            values |= changes
        else:
            values[section] |= changes
    return RunConfig.model_validate(values)


BEFORE = _runs.config().model_dump(mode="json")


def fields(now: RunConfig, *, another_run: bool = False, keyed: bool | None = None) -> list[str]:
    found = changes_of(BEFORE, now, another_run=another_run)
    return [change.field for change in found if keyed in (None, change.keyed)]


def test_nothing_differs_from_itself() -> None:
    assert changes_of(BEFORE, _runs.config()) == []
    assert described([]) == "none"


@pytest.mark.parametrize(
    ("now", "field", "keyed"),
    [
        (changed(optim={"lr": 2e-2}), "optim.lr", True),
        (changed(train={"global_batch_size": 16}), "train.global_batch_size", True),
        (changed(top={"seed": 7}), "seed", True),
        (changed(model={"num_layers": 4}), "model.num_layers", True),
        (changed(data={"eod_mask_loss": True}), "data.eod_mask_loss", True),
        (changed(train={"train_iters": 9}), "train.train_iters", False),
        (changed(train={"log_interval": 2, "exit_interval": 3}), "train.log_interval", False),
        (changed(checkpoint={"save_interval": 2}), "checkpoint.save_interval", False),
        (
            changed(parallel={"tensor_model_parallel_size": 2}, launch={"nproc_per_node": 2}),
            "parallel.",
            False,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_change_is_found_and_only_keyed_ones_need_to_be_allowed(
    now: RunConfig, field: str, keyed: bool
) -> None:
    found = [change for change in changes_of(BEFORE, now) if change.field.startswith(field)]
    assert [change.keyed for change in found] == [keyed]
    if keyed:
        with pytest.raises(
            ConfigError, match=rf"iter_3 was written with .*{field}: .* -> .*override: \[{field}\]"
        ):
            check_resume(found, (), "iter_3")
    check_resume(found, (field.rstrip("."),), "iter_3")


def test_a_sections_name_allows_what_is_in_it() -> None:
    found = changes_of(BEFORE, changed(optim={"lr": 2e-2, "weight_decay": 0.0}))
    check_resume(found, ("optim",), "iter_3")
    with pytest.raises(ConfigError, match=r"override: \[optim.lr\]"):
        check_resume(found, ("optim.weight_decay",), "iter_3")


def test_where_tokens_come_from_matters_to_another_run_alone() -> None:
    now = changed(data={"tokenizer": {"kind": "train-bpe", "vocab_size": 600}})
    assert fields(now) == []
    assert fields(now, another_run=True, keyed=True) == ["data.tokenizer.vocab_size"]


def test_later_stages_and_names_are_left_out() -> None:
    now = changed(
        evaluate={"max_samples": 3, "micro_batch_size": 2, "zero_shot": {"wikitext": "text"}},
        export={"dtype": "bfloat16"},
        tracking={"registered_model": "one"},
        top={"name": "other"},
    )
    assert fields(now) == []
    assert fields(now, another_run=True) == []


def test_what_makes_the_tokens_counts_as_what_is_declared() -> None:
    now = changed(data={"append_eod": False, "workers": 3}, train={"eval_iters": 7})
    assert fields(now) == ["data.workers", "train.eval_iters"]
    assert fields(now, another_run=True, keyed=True) == ["data.append_eod"]


def test_a_field_that_came_later_counts_as_its_default() -> None:
    train = {
        name: value
        for name, value in BEFORE["train"].items()
        if name not in ("z_loss", "skip_samples")
    }
    before = BEFORE | {"train": train}
    assert changes_of(before, _runs.config()) == []
    (change,) = changes_of(before, changed(train={"z_loss": 1e-4}))
    assert (str(change), change.keyed) == ("train.z_loss: absent -> 0.0001", True)


def test_what_was_null_and_is_a_section_counts_as_keyed() -> None:
    rampup = {"start": 2, "increment": 2, "samples": 18}
    found = changes_of(BEFORE, changed(train={"rampup_batch_size": rampup}))
    assert {change.field for change in found} == {
        "train.rampup_batch_size",
        *(f"train.rampup_batch_size.{name}" for name in rampup),
    }
    assert all(change.keyed for change in found)


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        (
            {"override": ["optim.lrr"]},
            "resume.override has 'optim.lrr', which has no value 'lrr', did you mean lr",
        ),
        ({"override": ["nothing"]}, "has no value 'nothing'"),
    ],
)
def test_a_name_that_does_not_exist_is_refused(resume: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(resume=resume)


def test_two_ways_to_begin_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"resume.checkpoint is a and train.pretrained_checkpoint is b: give the first",
    ):
        changed(resume={"checkpoint": "a"}, train={"pretrained_checkpoint": "b"})


@pytest.mark.parametrize("item", ["5-3", "a", "1-2-3", "-4", "3-", ""])
def test_what_is_no_range_of_samples_is_refused(item: str) -> None:
    with pytest.raises(ValueError, match="give a sample's number, as 4096, or the first and last"):
        changed(train={"skip_samples": [item]})


def test_ranges_of_samples_are_numbers_in_order() -> None:
    ranges = changed(train={"skip_samples": ["40-47", 3]}).train.skipped_ranges
    assert ranges == [range(3, 4), range(40, 48)]


def test_a_section_that_is_new_and_holds_json_is_shown_value_by_value() -> None:
    """The user's JSON for DeepSpeed has names that no section knows."""
    zero = {"zero_optimization": {"stage": 1}}
    found = changes_of(BEFORE, changed(top={"engine": "deepspeed"}, deepspeed={"config": zero}))
    assert "deepspeed.config.zero_optimization.stage: absent -> 1" in map(str, found)
    check_resume(found, (), "iter_3")


def test_the_names_that_are_advised_are_ones_that_may_be_given() -> None:
    """A source of another kind has not the fields of the one before."""
    source = {"kind": "huggingface", "repository": "openwebtext", "revision": "main"}
    before = BEFORE | {"data": BEFORE["data"] | {"source": source}}
    now = _runs.config()
    with pytest.raises(ConfigError) as caught:
        check_resume(changes_of(before, now, another_run=True), (), "iter_3")
    advised = str(caught.value).rpartition("resume.override: [")[2].rstrip("]").split(", ")
    assert "data.source" in advised
    allowing = changed(top={"resume": {"override": advised}})
    check_resume(changes_of(before, allowing, another_run=True), allowing.resume.override, "iter_3")
