"""Validation errors: one clause per wrong key or value, with what to do."""

import json
import re
from typing import Any

import pytest

from megacore.config import RunConfig
from megacore.config.finetune import FinetuneConfig
from megacore.config.load import parse_config
from megacore.config.validate import _PATTERNS
from megacore.errors import ConfigError
from tests.config.test_load import minimal


def refusal(changes: dict[str, Any]) -> str:
    """Return the line that refuses the minimal configuration with values at dotted keys."""
    values = minimal()
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    with pytest.raises(ConfigError) as caught:
        parse_config(values, origin="small")
    message = str(caught.value)
    assert message.startswith("small: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ({"train.trian_iters": 5}, "unknown key train.trian_iters (did you mean train_iters?)"),
        ({"modle.num_layers": 5}, "unknown key modle (did you mean model?)"),
        (
            {"optim.loss_scale.windows": 5},
            "unknown key optim.loss_scale.windows (did you mean window?)",
        ),
        ({"data.source.patern": "*.c"}, "unknown key data.source.patern (did you mean pattern?)"),
        (
            {"data.tokenizer.vocab": 512},
            "unknown key data.tokenizer.vocab (did you mean vocab_size?)",
        ),
        ({"data.source.kind": "s3"}, "data.source.kind is 's3': give source_tree, "),
        ({"model.rope_scaling": {"factor": 2}}, "model.rope_scaling.kind is missing: give it a"),
        (
            {"model.rope_scaling": {"kind": "yarm", "factor": 2}},
            "model.rope_scaling.kind is 'yarm': give linear, dynamic, yarn, llama3 or longrope",
        ),
        ({"train.train_iters": "many"}, "train.train_iters is 'many'"),
        ({"train.train_iters": 0}, "train.train_iters is 0"),
        ({"train.train_iters": 1.5}, "train.train_iters is 1.5"),
        ({"optim.lr": -1e-3}, "optim.lr is -0.001"),
        ({"optim.lr": None}, "optim.lr is None"),
        ({"model.hidden_dropout": 1.0}, "model.hidden_dropout is 1.0"),
        ({"train.precision": "fp8"}, "train.precision is 'fp8'"),
        ({"name": "Has Capitals"}, "name is 'Has Capitals'"),
        ({"launch.nproc_per_node": "all"}, "'all'"),
        (
            {"parallel.pipeline_partition": "even"},
            "is 'even': give balanced, uniform or a list of integers",
        ),
        (
            {"parallel.pipeline_partition": [1, "b"]},
            "parallel.pipeline_partition is [1, 'b']: give balanced, uniform or a",
        ),
        ({"parallel.grad_reduce_bucket_mb": 1e308}, "parallel.grad_reduce_bucket_mb is 1e+308"),
        ({"parallel.tensor_parallel": 2}, "(did you mean tensor_model_parallel_size?)"),
        ({"train.clip_grad": 1}, "unknown key train.clip_grad (did you mean optim.clip_grad?)"),
        ({"train.grad_clip": 1}, "unknown key train.grad_clip (did you mean optim.clip_grad?)"),
        ({"optim.grad_clip": 1}, "unknown key optim.grad_clip (did you mean optim.clip_grad?)"),
        (
            {"train.rampup_batch_size": {"start": 2}},
            "train.rampup_batch_size.increment is missing: give it a value",
        ),
        (
            {"data.source": {"kind": "jsonl", "files": []}},
            "data.source.files is []: give at least 1 el",
        ),
        ({"seed": -1}, "seed is -1"),
        (
            {"launch.kubernetes.node_selector": [1]},
            "launch.kubernetes.node_selector is [1]: give a mapping, as in {first: 1, second: 2}",
        ),
        (
            {"launch.kubernetes.node_selector": {1: "a"}},
            "key 1 of launch.kubernetes.node_selector is not text: put it in quotes",
        ),
        ({"model": {1: 2}}, "key 1 of model is not text: put it in quotes"),
        ({"": 1}, "unknown key '' (known: checkpoint, "),
        ({"launch.slurm.account": ""}, "account is '': give text that is not empty"),
        ({"name": "a b"}, "name is 'a b': give lower-case letters, digits, dots and dashes, the"),
        (
            {"data.source": {"kind": "http", "files": [{"url": "ftp://host/file"}]}},
            "is 'ftp://host/file': give an address that begins with https:// or http://",
        ),
        (
            {"data.dask_address": "a\nb\x01c"},
            "data.dask_address is a\\nb\\x01c but data.shard_runner",
        ),
    ],
)
def test_wrong_keys_and_values_are_named(override: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(override)


def test_all_wrong_values_are_named_in_one_message() -> None:
    message = refusal({"train.train_iters": "many", "optim.rate": 1})
    assert "train.train_iters is 'many'" in message
    assert "unknown key optim.rate" in message


def test_every_pattern_of_the_schema_has_advice() -> None:
    schemas = [RunConfig.model_json_schema(), FinetuneConfig.model_json_schema()]
    patterns = set(re.findall(r'"pattern": ("[^"]*")', json.dumps(schemas)))
    assert len(patterns) >= 5
    assert {json.loads(pattern) for pattern in patterns} <= set(_PATTERNS)


def test_a_key_of_another_kind_of_source_is_refused_with_that_kind() -> None:
    message = refusal({"data.source.dataset": "wikitext"})
    assert (
        "data.source.dataset (it belongs to data.source.kind hub, and data.source.kind is "
        "source_tree)"
    ) in message


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            {"launch.nnodes": [1]},
            "launch.nnodes is [1]: give a number of machines, such as 2, or a range, such as 2:4",
        ),
        (
            {"launch.slurm.gpus_per_node": "x"},
            "launch.slurm.gpus_per_node is 'x': give an integer that is not negative",
        ),
        ({"data.workers": "x"}, "data.workers is 'x': give an integer"),
        (
            {"data.tokenizer.vocab_extra_ids": 3 * 10**9},
            "data.tokenizer.vocab_extra_ids is 3000000000: give at most 1,048,576",
        ),
        ({"train.skip_samples": ["9" * 5000]}, "train.skip_samples has '9999"),
    ],
)
def test_a_wrong_value_is_named_once(override: dict[str, Any], sentence: str) -> None:
    message = refusal(override)
    assert sentence in message
    assert ";" not in message


def test_true_as_a_number_is_named_with_its_section() -> None:
    with pytest.raises(
        ConfigError, match=r"small: train\.train_iters is true: give a value of its"
    ):
        parse_config(minimal() | {"train": {"train_iters": True}}, origin="small")


def test_a_field_with_the_name_of_its_kind_is_named_once() -> None:
    values = minimal() | {"data": {"source": {"kind": "prefix", "prefix": ""}}}
    with pytest.raises(
        ConfigError, match=r"data\.source\.prefix is '': give text that is not empty"
    ):
        parse_config(values, origin="x")
