"""The layout of a job, the same before it starts and in its processes."""

import pytest

from megacore.config import RunConfig, load_config
from megacore.errors import ParallelLayoutError
from megacore.parallel.rank_layout import RankLayout
from megacore.plan.layouts import layout_of


def conf(**parallel: object) -> RunConfig:
    overrides = {f"parallel.{name}": value for name, value in parallel.items()}
    return load_config(
        "gpt2-tiny", {"launch.nproc_per_node": "auto", "train.micro_batch_size": 2} | overrides
    )


def test_remaining_ranks_are_data_parallel() -> None:
    config = conf(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert layout_of(config, 4) == RankLayout(data=1, pipeline=2, tensor=2)
    assert layout_of(config, 16, vocab_size=8192) == RankLayout(data=4, pipeline=2, tensor=2)
    assert layout_of(conf(), 8) == RankLayout(data=8)


def test_layouts_are_checked_for_the_number_of_ranks() -> None:
    with pytest.raises(
        ParallelLayoutError, match=r"6 ranks are not a multiple of .* = 4 ranks per replica"
    ):
        layout_of(conf(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 6)
    with pytest.raises(
        ParallelLayoutError,
        match=r"16 is not a multiple of .* 2 x 3 data-parallel ranks = 6: use 18, or use",
    ):
        layout_of(conf(), 3)
    interleaved = conf(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert layout_of(interleaved, 8).data == 4
    with pytest.raises(ParallelLayoutError, match=r"= 1 micro batches, which is not a multiple of"):
        layout_of(interleaved, 16)


def test_the_vocabulary_is_padded_before_the_check() -> None:
    config = conf(tensor_model_parallel_size=4)
    assert layout_of(config, 4, vocab_size=7).tensor == 4
    odd = config.model_copy(
        update={"model": config.model.model_copy(update={"make_vocab_size_divisible_by": 2})}
    )
    with pytest.raises(
        ParallelLayoutError, match=r"padded vocabulary of 10 entries .* \(now 2\) to 4"
    ):
        layout_of(odd, 4, vocab_size=9)
