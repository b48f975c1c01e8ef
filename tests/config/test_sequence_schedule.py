"""Sequence length as a function of consumed samples, and schedules that are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.keys import key_parameters
from megacore.config.sequence_schedule import SequenceSchedule
from megacore.errors import ConfigError
from tests.config.test_sentences import make
from tests.train import _runs

PHASES = [{"samples": 0, "seq_length": 4}, {"samples": 24, "seq_length": 16}]


def schedule(*phases: tuple[int, int]) -> dict[str, Any]:
    values = [{"samples": first, "seq_length": length} for first, length in phases]
    return {"seq_length_schedule": values}


def test_the_length_is_that_of_the_last_part_that_has_begun() -> None:
    sequence = SequenceSchedule(16, ((0, 4), (24, 8), (40, 16)))
    assert [sequence.at(consumed) for consumed in (0, 23, 24, 39, 40, 1000)] == [4, 4, 8, 8, 16, 16]
    constant = SequenceSchedule.of(_runs.config().data)
    assert (constant.at(0), constant.at(10**9)) == (16, 16)


def test_a_global_batch_has_the_length_of_its_first_sample() -> None:
    sequence = SequenceSchedule(16, ((0, 4), (20, 16)))
    counted = sequence.samples_by_length(BatchSchedule(8, 8), 8, 40)
    assert list(counted.items()) == [(4, 16), (16, 16)]


def test_the_schedule_enters_the_key_of_the_run_only_if_it_is_given() -> None:
    without, given = _runs.config(), _runs.config(data={"seq_length_schedule": PHASES})
    assert "seq_length_schedule" not in str(key_parameters(without, "run"))
    assert "seq_length_schedule" in str(key_parameters(given, "run"))
    assert key_parameters(without, "index") == key_parameters(given, "index")


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"data": schedule((0, 6))}, r"\[0\]\.seq_length 6 does not divide data\.seq_length 16"),
        ({"data": schedule((0, 32))}, r"\[0\]\.seq_length 32 does not divide data\.seq_length 16"),
        ({"data": schedule((8, 4))}, r"\[0\]\.samples is 8, .* set it to 0"),
        ({"data": schedule((0, 4), (0, 8))}, r"\[1\]\.samples 0 does not exceed 0"),
        ({"data": schedule((0, 4)), "train": {"cuda_graphs": True}}, "train.cuda_graphs is true"),
        (
            {
                "data": schedule((0, 2), (8, 16)),
                "parallel": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
                "model": {"num_attention_heads": 4},
                "launch": {"nproc_per_node": 4},
            },
            r"data\.seq_length_schedule\[0\]\.seq_length 2 is not a multiple of "
            r"parallel\.tensor_model_parallel_size 4",
        ),
    ],
)
def test_schedules_that_cannot_run_are_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        _runs.config(**sections)


@pytest.mark.parametrize("packing", ["best_fit", "pack_until_overflow", "unpacked"])
def test_packing_of_whole_documents_is_refused(packing: str) -> None:
    sentence = f"schedule is given but data.packing is {packing}, .* set the latter to packed"
    with pytest.raises(ValidationError, match=sentence):
        _runs.config(data={"packing": packing} | schedule((0, 4)))
    assert _runs.config(data=schedule((0, 4))).data.packing == "packed"


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_other_families_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=f"schedule is given but family is {family}"):
        make(family, **schedule((0, 32)))
