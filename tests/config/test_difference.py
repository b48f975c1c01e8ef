"""Differences between a run's configuration and its checkpoint's, and which are allowed."""

from typing import Any

import pytest

from megacore.config.difference import (
    changed_warmup,
    check_resume,
    compare_configurations,
    described,
)
from megacore.config.run import RunConfig
from megacore.errors import CheckpointError, ConfigError
from tests.train import _runs


def changed(**sections: Any) -> RunConfig:
    """Return the small run with other values in some sections; `top` has top-level values."""
    values = _runs.config().model_dump(mode="json")
    for section, changes in sections.items():
        if section == "top":
            values |= changes
        else:
            values[section] |= changes
    return RunConfig.model_validate(values)


BEFORE = _runs.config().model_dump(mode="json")


def fields(now: RunConfig, *, another_run: bool = False, keyed: bool | None = None) -> list[str]:
    changes = compare_configurations(BEFORE, now, another_run=another_run)
    return [change.field for change in changes if keyed in (None, change.keyed)]


def test_equal_configurations_have_no_changes() -> None:
    assert compare_configurations(BEFORE, _runs.config()) == []
    assert described([]) == "none"


def without_optimizer(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of a version that had only AdamW."""
    fields = {"name", "muon_momentum"}
    optim = {name: value for name, value in values["optim"].items() if name not in fields}
    return values | {"optim": optim}


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
def test_only_changes_of_keyed_fields_need_an_override(
    now: RunConfig, field: str, keyed: bool
) -> None:
    changes = [
        change for change in compare_configurations(BEFORE, now) if change.field.startswith(field)
    ]
    assert [change.keyed for change in changes] == [keyed]
    if keyed:
        with pytest.raises(
            ConfigError, match=rf"iter_3 was written with .*{field}: .* -> .*override: \[{field}\]"
        ):
            check_resume(changes, (), "iter_3")
    check_resume(changes, (field.rstrip("."),), "iter_3")


def test_an_override_of_a_section_allows_its_fields() -> None:
    changes = compare_configurations(BEFORE, changed(optim={"lr": 2e-2, "weight_decay": 0.0}))
    check_resume(changes, ("optim",), "iter_3")
    with pytest.raises(ConfigError, match=r"override: \[optim.lr\]"):
        check_resume(changes, ("optim.weight_decay",), "iter_3")


@pytest.mark.parametrize("before", [BEFORE, without_optimizer(BEFORE)])
def test_another_optimizer_is_refused_despite_an_override(before: dict[str, Any]) -> None:
    changes = compare_configurations(before, changed(optim={"name": "muon"}))
    with pytest.raises(
        ConfigError, match=r"iter_3 was written with optim.name adam, whose state muon cannot"
    ):
        check_resume(changes, ("optim", "optim.name"), "iter_3")


def test_a_checkpoint_older_than_the_optimizers_name_continues_with_adam() -> None:
    assert compare_configurations(without_optimizer(BEFORE), _runs.config()) == []


def test_the_tokenizer_is_compared_only_with_another_run() -> None:
    now = changed(data={"tokenizer": {"kind": "train-bpe", "vocab_size": 600}})
    assert fields(now) == []
    assert fields(now, another_run=True, keyed=True) == ["data.tokenizer.vocab_size"]


def test_names_and_later_stages_are_not_compared() -> None:
    now = changed(
        evaluate={"max_samples": 3, "micro_batch_size": 2, "zero_shot": {"wikitext": "text"}},
        export={"dtype": "bfloat16"},
        tracking={"registered_model": "one"},
        top={"name": "other"},
    )
    assert fields(now) == []
    assert fields(now, another_run=True) == []


def test_token_settings_are_keyed_as_their_fields_declare() -> None:
    now = changed(data={"append_eod": False, "workers": 3}, train={"eval_iters": 7})
    assert fields(now) == ["data.workers", "train.eval_iters"]
    assert fields(now, another_run=True, keyed=True) == ["data.append_eod"]


def test_a_missing_field_counts_as_its_default() -> None:
    train = {
        name: value
        for name, value in BEFORE["train"].items()
        if name not in ("z_loss", "skip_samples")
    }
    before = BEFORE | {"train": train}
    assert compare_configurations(before, _runs.config()) == []
    (change,) = compare_configurations(before, changed(train={"z_loss": 1e-4}))
    assert (str(change), change.keyed) == ("train.z_loss: absent -> 0.0001", True)


def test_a_members_newer_fields_count_as_null_in_an_older_blend() -> None:
    members = [{"weight": 1.0, "source": {"kind": "prefix", "prefix": name}} for name in ("a", "b")]
    now = changed(data={"source": None, "blend": members})
    before = now.model_dump(mode="json")
    before["data"]["blend"] = members
    assert compare_configurations(before, now, another_run=True) == []
    before["data"]["blend"] = [members[0], members[1] | {"weight": 2.0}]
    (change,) = compare_configurations(before, now, another_run=True)
    assert change.field == "data.blend"


def test_a_section_in_place_of_null_is_keyed() -> None:
    rampup = {"start": 2, "increment": 2, "samples": 18}
    changes = compare_configurations(BEFORE, changed(train={"rampup_batch_size": rampup}))
    assert {change.field for change in changes} == {
        "train.rampup_batch_size",
        *(f"train.rampup_batch_size.{name}" for name in rampup),
    }
    assert all(change.keyed for change in changes)


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
def test_an_override_of_an_unknown_name_is_refused(resume: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(resume=resume)


def test_resume_and_pretrained_checkpoint_together_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"resume.checkpoint is a and train.pretrained_checkpoint is b: give the first",
    ):
        changed(resume={"checkpoint": "a"}, train={"pretrained_checkpoint": "b"})


@pytest.mark.parametrize("item", ["5-3", "a", "1-2-3", "-4", "3-", ""])
def test_a_malformed_range_of_samples_is_refused(item: str) -> None:
    with pytest.raises(ValueError, match="give a sample's number, such as 4096, or the first"):
        changed(train={"skip_samples": [item]})


def test_ranges_of_skipped_samples_are_sorted() -> None:
    ranges = changed(train={"skip_samples": ["40-47", 3]}).train.skipped_ranges
    assert ranges == [range(3, 4), range(40, 48)]


def test_a_new_section_with_json_is_listed_value_by_value() -> None:
    """The user's JSON for DeepSpeed has names that no section knows."""
    zero = {"zero_optimization": {"stage": 1}}
    changes = compare_configurations(
        BEFORE, changed(top={"engine": "deepspeed"}, deepspeed={"config": zero})
    )
    assert "deepspeed.config.zero_optimization.stage: absent -> 1" in map(str, changes)
    check_resume(changes, (), "iter_3")


def test_advised_override_names_are_accepted() -> None:
    """A source of another kind does not have the fields of the previous one."""
    source = {"kind": "huggingface", "repository": "openwebtext", "revision": "main"}
    before = BEFORE | {"data": BEFORE["data"] | {"source": source}}
    now = _runs.config()
    with pytest.raises(ConfigError) as caught:
        check_resume(compare_configurations(before, now, another_run=True), (), "iter_3")
    advised = str(caught.value).rpartition("resume.override: [")[2].rstrip("]").split(", ")
    assert "data.source" in advised
    allowed = changed(top={"resume": {"override": advised}})
    check_resume(
        compare_configurations(before, allowed, another_run=True), allowed.resume.override, "iter_3"
    )


def test_warm_up_in_samples_refuses_another_batch_size_until_it_is_over() -> None:
    """Samples are converted to iterations as if the batch size held from the start."""
    optim = {"lr_warmup_iters": None, "lr_warmup_samples": 40, "lr_decay_iters": 20}
    before = changed(optim=optim).model_dump(mode="json")
    batch = before["train"]["global_batch_size"]
    assert batch == 8
    larger = changed(optim=optim, train={"global_batch_size": 16})

    def change(now: RunConfig, samples: int, steps: int) -> str | None:
        return changed_warmup(before, now, "c", consumed_samples=samples, applied_iterations=steps)

    assert change(changed(optim=optim), 8, 1) is None
    with pytest.raises(
        ConfigError,
        match=r"lr_warmup_samples 40 took 5 iterations with the batches of c .*_size 8\), and "
        r"takes 3 with train.global_batch_size 16, but c is within that warm-up, at sample 39 "
        r"after 5 .* optim.lr_warmup_iters to 5, .* or resume after the warm-up$",
    ):
        change(larger, 39, 5)
    with pytest.raises(ConfigError, match="at sample 40 after 4 optimizer steps"):
        change(larger, 40, 4)  # the update of one iteration was not applied
    assert "changes the learning rates of the decay" in str(change(larger, 40, 5))
    constant = changed(
        optim=optim | {"lr_decay_style": "constant"}, train={"global_batch_size": 16}
    )
    assert change(constant, 40, 5) is None
    kept = changed(optim={"lr_warmup_iters": 5}, train={"global_batch_size": 16})
    assert change(kept, 8, 1) is None


@pytest.mark.parametrize("style", ["constant", "WSD"])
def test_a_smaller_batch_does_not_return_to_the_warm_up(style: str) -> None:
    """The learning rate depends on the optimizer steps: 20 batches of 2 instead of 5 of 8."""
    optim = {
        "lr_warmup_iters": None,
        "lr_warmup_samples": 40,
        "lr_decay_iters": 40,
        "lr_decay_style": style,
        "lr_wsd_decay_iters": 2 if style == "WSD" else None,
    }
    before = changed(optim=optim, train={"train_iters": 40}).model_dump(mode="json")
    smaller = changed(optim=optim, train={"global_batch_size": 2, "train_iters": 40})
    with pytest.raises(
        ConfigError,
        match=r"takes 20 with train.global_batch_size 2, but c is within that warm-up, at sample "
        r"48 after 6 .*lr_warmup_iters to 5, and name both in resume.override$",
    ):
        changed_warmup(before, smaller, "c", consumed_samples=48, applied_iterations=6)
    assert changed_warmup(before, smaller, "c", consumed_samples=160, applied_iterations=20) is None


@pytest.mark.parametrize("train", [None, {"global_batch_size": "x"}])
def test_a_damaged_configuration_of_the_checkpoint_is_a_checkpoint_error(train: Any) -> None:
    optim = {"lr_warmup_iters": None, "lr_warmup_samples": 40}
    before = changed(optim=optim).model_dump(mode="json") | {"train": train}
    if train is None:
        del before["train"]
    with pytest.raises(CheckpointError, match="configuration in c does not show its batches"):
        changed_warmup(before, changed(optim=optim), "c", consumed_samples=8, applied_iterations=1)
