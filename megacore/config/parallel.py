"""How the model and the batch are divided over ranks.

What is computed stays the same but for rounding, and for what dropout drops of activations that tensor-parallel ranks
divide.
"""

from typing import Literal

from megacore.config.base import Section, unkeyed


class ParallelConfig(Section):
    """Sizes of the axes; what tensor and pipeline parallelism leave of the ranks is data parallel."""

    tensor_model_parallel_size: int = unkeyed(1, gt=0)
    """Ranks that share each layer (tp; Shoeybi et al. 2019)."""
    sequence_parallel: bool = unkeyed(False)
    """Whether norms and dropout work on the tensor-parallel rank's part of the sequence (Korthikanti et al. 2022)."""
    pipeline_model_parallel_size: int = unkeyed(1, gt=0)
    """Stages of consecutive layers (pp; Huang et al. 2019)."""
    virtual_pipeline_model_parallel_size: int = unkeyed(1, gt=0)
    """Chunks of layers per stage (v); above 1 the schedule is interleaved 1F1B (Narayanan et al. 2021)."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = unkeyed("1f1b")
    """Order of forward and backward passes: 1f1b (Narayanan et al. 2019) keeps at most pp micro batches in flight."""
    pipeline_partition: Literal["balanced", "uniform"] | tuple[int, ...] = unkeyed("balanced")
    """Layers of each chunk: balanced counts embedding and head as well, uniform gives all the same number, a list says
    it for each of the pp x v chunks in the order of the model."""
    pipeline_model_parallel_split_rank: int | None = unkeyed(None, gt=0)
    """Pipeline stage at which T5's decoder begins; null divides the stages by cost."""
    use_distributed_optimizer: bool = unkeyed(False)
    """Whether main weights and moments are divided over data-parallel ranks (ZeRO-1; Rajbhandari et al. 2020)."""
    grad_reduce_bucket_mb: float = unkeyed(25.0, gt=0)
    """Size of a gradient reduction bucket, in MiB of fp32."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = unkeyed("fp32")
    """Type in which gradients travel between data-parallel ranks; they accumulate in fp32 all the same."""
