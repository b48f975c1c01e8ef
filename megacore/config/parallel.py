"""Section `parallel`: division of model and batch over ranks.

The layout does not change the result except for rounding, and for dropout of activations that
tensor-parallel ranks divide.
"""

from typing import Any, Literal, get_args

from pydantic import model_validator

from megacore.config.base import Section, unkeyed

DataParallelSharding = Literal["none", "optimizer", "gradients", "parameters"]
ZERO_STAGES: tuple[DataParallelSharding, ...] = get_args(DataParallelSharding)
"""Sharding that is equivalent to each stage of ZeRO."""


class ParallelConfig(Section):
    """Options of the layout.

    The ranks that remain after tensor, context and pipeline parallelism are data parallel.
    """

    tensor_model_parallel_size: int = unkeyed(1, gt=0)
    """Number of ranks that divide each layer (tp; Shoeybi et al. 2019)."""
    sequence_parallel: bool = unkeyed(False)
    """If true, norms and dropout compute only the tensor-parallel rank's part of the sequence
    (Korthikanti et al. 2022)."""
    context_parallel_size: int = unkeyed(1, gt=0)
    """Number of ranks that divide each sequence of a causal model (cp; Dubey et al. 2024): each has
    two chunks of its tokens, and gathers the keys and values of all."""
    pipeline_model_parallel_size: int = unkeyed(1, gt=0)
    """Number of pipeline stages, each with consecutive layers (pp; Huang et al. 2019)."""
    virtual_pipeline_model_parallel_size: int = unkeyed(1, gt=0)
    """Number of chunks of layers per pipeline stage (v); above 1 the schedule is interleaved 1F1B
    (Narayanan et al. 2021)."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = unkeyed("1f1b")
    """Order of forward and backward passes: 1f1b (Narayanan et al. 2019), which keeps at most pp
    micro batches in flight, or gpipe."""
    delay_weight_gradients: bool = unkeyed(False)
    """If true, a pipeline stage sends the gradient of its input before it computes those of its
    weights, which fill the time in which it would wait (ZB-H1; Qi et al. 2023). The results have
    the same bits. Stage i keeps more for up to i passes."""
    pipeline_partition: Literal["balanced", "uniform"] | tuple[int, ...] = unkeyed("balanced")
    """Number of layers per chunk: balanced accounts for the cost of embedding and head, uniform
    gives each chunk the same number, and a list gives the number for each of the pp x v chunks in
    the order of the model."""
    pipeline_model_parallel_split_rank: int | None = unkeyed(None, gt=0)
    """First pipeline stage of T5's decoder; null divides the stages by cost."""
    data_parallel_sharding: DataParallelSharding = unkeyed("none")
    """State that data-parallel ranks divide (ZeRO; Rajbhandari et al. 2020): optimizer divides main
    weights and moments (stage 1), gradients also the main gradients (stage 2), parameters also the
    weights that the model computes with (stage 3)."""
    grad_reduce_bucket_mb: float = unkeyed(25.0, gt=0, le=1e9)
    """Size of a gradient-reduction bucket in MiB of fp32."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = unkeyed("fp32")
    """Data type of the gradients in the reduction between data-parallel ranks; they are always
    accumulated in fp32."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_earlier_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and "use_distributed_optimizer" in values:
            raise ValueError(
                "parallel.use_distributed_optimizer is called parallel.data_parallel_sharding: "
                "write optimizer there for true, and none for false"
            )
        return values

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO that is equivalent to the sharding."""
        return ZERO_STAGES.index(self.data_parallel_sharding)

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that share one replica of the model and its samples (tp x cp x pp)."""
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return model * self.context_parallel_size
