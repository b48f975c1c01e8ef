"""Pipeline stages at which T5's decoder can begin, and the message if there is none."""

from typing import Any

import pytest

from megacore.config.load import parse_config
from megacore.config.t5_stages import T5Stages
from megacore.errors import ConfigError


def test_splits_leave_enough_layers_for_both_stacks() -> None:
    assert T5Stages(12, 12, 4).splits() == [1, 2, 3]
    assert T5Stages(1, 12, 4).splits() == [1]
    assert T5Stages(12, 2, 4).splits() == [2, 3]
    assert T5Stages(12, 12, 4, split=3).splits() == [3]
    assert T5Stages(4, 6, 4, style="uniform").splits() == [1, 2]
    assert T5Stages(4, 6, 4, style=(2, 2, 5, 1)).splits() == [2]
    assert T5Stages(12, 12, 1).splits() == []


REFUSED: dict[str, tuple[T5Stages, str]] = {
    "beyond the stages": (
        T5Stages(12, 12, 4, split=4),
        "is 4 and .*size 4 has the stages 0 to 3: use 1 to 3, or null",
    ),
    "only one stage": (
        T5Stages(12, 12, 1, split=1),
        "is 1 but .*size 1 has no second stage: set it to null",
    ),
    "too few layers": (
        T5Stages(1, 2, 4),
        "num_layers 1 and .*num_decoder_layers 2 cannot be divided over .*size 4: each",
    ),
    "too few layers before the split": (
        T5Stages(1, 6, 4, split=2),
        "1 and .* 6 cannot be divided over .*4, split at 2:",
    ),
    "uneven": (
        T5Stages(5, 5, 4, style="uniform"),
        "5 and .* 5 cannot be divided evenly over .*size 4, .*balanced",
    ),
    "a list of another length": (
        T5Stages(4, 4, 2, style=(4, 2, 2)),
        r"\[4, 2, 2\] has 3 entries for .*2: give it 2",
    ),
    "an empty stage": (
        T5Stages(4, 4, 3, style=(4, 4, 0)),
        r"\[4, 4, 0\] has a stage of 0 layers: give each",
    ),
    "another sum": (
        T5Stages(4, 4, 2, style=(4, 3)),
        "adds up to 7 layers and .*4 and .*4 to 8: make it add up to 8",
    ),
    "a mixed stage": (
        T5Stages(4, 4, 3, style=(3, 3, 2)),
        "both stacks: its stages end after 3, 6, 8 .* is 4: let the",
    ),
    "a list that ends elsewhere": (
        T5Stages(4, 4, 3, split=1, style=(2, 2, 4)),
        (
            r"has 2 layers before .*split_rank 1 and model\.num_layers is 4: let the stages before "
            r"it add up to 4"
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_stages_are_refused_with_the_numbers(name: str) -> None:
    stages, message = REFUSED[name]
    problem = stages.problem()
    assert problem is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(": ".join(problem))


def check_config(family: str, **parallel: Any) -> None:
    """Validate a tiny configuration with these sizes."""
    sentences = {} if family == "gpt" else {"split_sentences": True, "append_eod": False}
    relative = {"position_embedding_type": "relative"} if family == "t5" else {}
    tensor, pipeline = (
        parallel.get("tensor_model_parallel_size", 1),
        parallel.get("pipeline_model_parallel_size", 1),
    )
    parse_config(
        {
            "name": "tiny",
            "family": family,
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "hf", "name": "any"},
                "seq_length": 64,
                **sentences,
                **({"span_corruption": {"decoder_seq_length": 33}} if family == "t5" else {}),
            },
            "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, **relative},
            "optim": {"lr": 1e-3},
            "train": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 1},
            "checkpoint": {"save_interval": 1},
            "parallel": parallel,
            "launch": {"nproc_per_node": tensor * pipeline},
        },
        origin="test",
    )


def test_a_split_between_the_stages_is_accepted() -> None:
    check_config("t5", pipeline_model_parallel_size=4, pipeline_model_parallel_split_rank=2)


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        (
            "t5",
            {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_split_rank": 4},
            r"split_rank is 4 and .*size 4 has the stages 0 to 3: use 1 to 3, or null",
        ),
        (
            "gpt",
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_split_rank": 1},
            "split_rank is 1 but family is gpt, which has no decoder after an encoder",
        ),
        (
            "t5",
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size is 2 but family is t5, whose stages",
        ),
        (
            "t5",
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            r"decoder_seq_length 33 is not a multiple of .*tensor_model_parallel_size 2",
        ),
        (
            "t5",
            {"pipeline_model_parallel_size": 16},
            r"4 and .*num_decoder_layers 4 cannot be divided over .*size 16: each",
        ),
    ],
)
def test_configurations_with_impossible_stages_are_refused(
    family: str, parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(family, **parallel)
