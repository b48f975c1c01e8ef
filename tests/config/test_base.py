"""Which values are part of a stage's key."""

import json
from typing import Any

import pytest

from megacore.config import RunConfig, load_config
from megacore.config.base import Section, is_keyed, key_parameters, keyed, unkeyed
from tests.config.test_load import CONF_DIR


class Inner(Section):
    """An inner section."""

    width: int = keyed(3)
    """Keyed."""
    workers: int = unkeyed(1)
    """Not keyed."""


class Outer(Section):
    """An outer section."""

    inner: Inner = keyed(Inner())
    """Keyed."""
    quiet: Inner = unkeyed(Inner())
    """Not keyed."""
    files: tuple[str, ...] = keyed(("a", "b"))
    """Keyed."""


class Silent(Section):
    """A section whose field does not say."""

    value: int = 1
    """Says neither."""


def tiny(overrides: dict[str, Any] | None = None) -> RunConfig:
    return load_config("gpt2-tiny", overrides, conf_dir=CONF_DIR)


def test_key_parameters_take_keyed_values_alone_as_json() -> None:
    parameters = key_parameters(Outer())
    assert parameters == {"inner": {"width": 3}, "files": ["a", "b"]}
    assert json.loads(json.dumps(parameters)) == parameters


class Switches(Section):
    """Fields that take true and false, or do not."""

    maybe: bool | None = unkeyed(None)
    """Takes them, or null."""
    count: int | None = unkeyed(None)
    """Takes a number, or null."""


def test_true_and_false_are_no_numbers() -> None:
    assert (Switches(maybe=True).maybe, Switches(maybe=None).maybe) == (True, None)
    with pytest.raises(ValueError, match="count is true: give a value of its type, not true or false"):
        Switches(count=True)


def test_a_field_must_say_whether_it_is_keyed() -> None:
    with pytest.raises(KeyError, match=r"Silent\.value says neither"):
        is_keyed(Silent, "value")
    with pytest.raises(KeyError):
        key_parameters(Silent())


@pytest.mark.parametrize(
    "override",
    [
        {"data.workers": 7},
        {"train.train_iters": 5000},
        {"train.log_interval": 3},
        {"train.eval_interval": 7},
        {"train.recompute": "full"},
        {"train.recompute": "selective", "train.recompute_num_layers": 2},
        {"parallel.tensor_model_parallel_size": 2},
        {"parallel.use_distributed_optimizer": True},
        {"engine": "deepspeed", "deepspeed.zero_stage": 3},
        {"checkpoint.keep_last": 9},
        {"launch.retries": 5},
        {"launch.nproc_per_node": 1},
        {"tracking.tensorboard": True},
        {"verify": "full"},
        {"name": "another"},
    ],
)
def test_how_a_stage_runs_leaves_its_key(override: dict[str, Any]) -> None:
    assert key_parameters(tiny(override)) == key_parameters(tiny())


@pytest.mark.parametrize(
    "override",
    [
        {"seed": 77},
        {"data.split": "7,2,1"},
        {"data.seq_length": 96},
        {"data.source.pattern": "*.txt"},
        {"data.tokenizer.vocab_size": 777},
        {"model.num_layers": 33},
        {"optim.lr": 0.77},
        {"optim.loss_scale.window": 77},
        {"optim.lr_warmup_init": 1e-4},
        {"optim.lr_warmup_style": "log"},
        {"model.num_query_groups": 2},
        {"train.label_smoothing": 0.1},
        {"train.rampup_batch_size": {"start": 8, "increment": 8, "samples": 80}, "launch.nproc_per_node": 1},
        {"train.global_batch_size": 1024},
        {"train.precision": "fp32"},
        {"evaluate.max_samples": 7},
        {"export.sample_prompt": "class "},
    ],
)
def test_what_a_stage_makes_changes_its_key(override: dict[str, Any]) -> None:
    assert key_parameters(tiny(override)) != key_parameters(tiny())
