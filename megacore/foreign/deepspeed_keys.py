"""DeepSpeed's own JSON as tables: every key that DeepSpeed 0.19 reads, and what becomes of it here.

A key that is in none of the tables is unknown. Names are dotted: `zero_optimization.stage`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from megacore.config.deepspeed import DeepSpeedConfig

Kind = Literal["flag", "size", "integer", "number", "text", "list", "pair"]
AUTO = "auto"


class Key(NamedTuple):
    """A key that is honoured."""

    kind: Kind
    """What its value is."""
    choices: tuple[Any, ...] = ()
    """The values that it may have; empty for any."""


class Refused(NamedTuple):
    """A key that is refused."""

    reason: str
    """Why, and what to do instead."""
    off: tuple[Any, ...] = ()
    """Values that ask for nothing and are left out, beside auto and null; without any: false, and a block that is
    switched off."""


def _block(name: str, keys: Mapping[Kind, str]) -> dict[str, Key]:
    return {f"{name}.{key}": Key(kind) for kind, keys_ in keys.items() for key in keys_.split()}


OURS: dict[str, Key] = {
    "train_batch_size": Key("size"),
    "train_micro_batch_size_per_gpu": Key("size"),
    "gradient_accumulation_steps": Key("size"),
    "gradient_clipping": Key("number"),
    "communication_data_type": Key("text", ("fp32", "bf16", "fp16")),
    "fp16.enabled": Key("flag"),
    "bf16.enabled": Key("flag"),
    **_block(
        "fp16",
        {
            "number": "loss_scale min_loss_scale",
            "integer": "initial_scale_power",
            "size": "loss_scale_window hysteresis",
            "flag": "consecutive_hysteresis",
        },
    ),
    "optimizer.type": Key("text"),
    **_block(
        "optimizer.params",
        {"number": "lr eps weight_decay max_grad_norm", "pair": "betas", "flag": "torch_adam adam_w_mode"},
    ),
    "scheduler.type": Key("text"),
    **_block(
        "scheduler.params",
        {
            "number": "warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio",
            "integer": "warmup_num_steps total_num_steps",
        },
    ),
    "scheduler.params.warmup_type": Key("text", ("linear", "log")),
}
"""Values that the configuration says as well: both must agree, and DeepSpeed is given the configuration's."""

PASSED: dict[str, Key] = {
    "steps_per_print": Key("size"),
    "wall_clock_breakdown": Key("flag"),
    "memory_breakdown": Key("flag"),
    "dump_state": Key("flag"),
    "disable_python_gc": Key("flag"),
    "zero_allow_untested_optimizer": Key("flag"),
    "zero_force_ds_cpu_optimizer": Key("flag"),
    "log_level": Key("text", ("debug", "info", "warning", "error", "critical")),
    "data_types.grad_accum_dtype": Key("text", ("fp32", "bf16", "fp16")),
    "bf16.immediate_grad_update": Key("flag"),
    "zero_optimization.stage": Key("integer", (0, 1, 2, 3)),
    **_block(
        "zero_optimization",
        {
            "flag": "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
            "overlap_comm ignore_unused_parameters parameter_alignment memory_efficient_linear "
            "log_trace_cache_warnings enable_sanity_checks stage3_gather_16bit_weights_on_model_save "
            "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
            "size": "reduce_bucket_size",
            "integer": "allgather_bucket_size sub_group_size stage3_prefetch_bucket_size "
            "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
            "stage3_max_reuse_distance",
        },
    ),
    "zero_optimization.offload_optimizer.device": Key("text", ("none", "cpu", "nvme")),
    **_block(
        "zero_optimization.offload_optimizer",
        {"text": "nvme_path", "integer": "buffer_count", "flag": "pin_memory pipeline_read pipeline_write fast_init"},
    ),
    "zero_optimization.offload_param.device": Key("text", ("none", "cpu", "nvme")),
    **_block(
        "zero_optimization.offload_param",
        {"text": "nvme_path", "integer": "buffer_count buffer_size max_in_cpu", "flag": "pin_memory"},
    ),
    **_block(
        "activation_checkpointing",
        {
            "flag": "partition_activations cpu_checkpointing contiguous_memory_optimization "
            "synchronize_checkpoint_boundary profile",
            "size": "number_checkpoints",
        },
    ),
    **_block(
        "aio",
        {"size": "block_size queue_depth intra_op_parallelism", "flag": "single_submit overlap_events use_gds"},
    ),
    **_block("timers.throughput", {"flag": "enabled synchronized"}),
    **_block("comms_logger", {"flag": "enabled verbose prof_all debug", "list": "prof_ops"}),
    **_block(
        "flops_profiler",
        {
            "flag": "enabled detailed",
            "size": "profile_step top_modules",
            "number": "module_depth recompute_fwd_factor",
            "text": "output_file",
        },
    ),
    **_block("tensorboard", {"flag": "enabled", "text": "output_path job_name"}),
    **_block("csv_monitor", {"flag": "enabled", "text": "output_path job_name"}),
    **_block("wandb", {"flag": "enabled", "text": "group team project"}),
    **_block(
        "comet",
        {
            "flag": "enabled online",
            "size": "samples_log_interval",
            "text": "project workspace experiment_name experiment_key mode",
        },
    ),
}
"""Values that DeepSpeed is given as they are."""

KEYS: dict[str, Key] = {**OURS, **PASSED}
"""Every key that is honoured."""

RENAMED = {
    "bfloat16": "bf16",
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "aio.thread_count": "aio.intra_op_parallelism",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.use_all_reduce_for_fetch_params": "zero_optimization.stage3_use_all_reduce_for_fetch_params",
    "zero_optimization.allgather_sequential": "zero_optimization.stage3_allgather_sequential",
}
"""Older and second spellings that DeepSpeed reads too."""

OFFLOAD_FLAGS = {
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer.device",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param.device",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param.device",
}
"""Older flags for offload to the CPU."""

FIELDS: dict[str, tuple[str, ...]] = {
    "zero_stage": ("zero_optimization.stage",),
    "offload_optimizer": ("zero_optimization.offload_optimizer.device",),
    "offload_param": ("zero_optimization.offload_param.device",),
    "nvme_path": ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path"),
    "pin_memory": ("zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory"),
    "overlap_comm": ("zero_optimization.overlap_comm",),
    "reduce_bucket_size": ("zero_optimization.reduce_bucket_size",),
    "allgather_bucket_size": ("zero_optimization.allgather_bucket_size",),
    "sub_group_size": ("zero_optimization.sub_group_size",),
    "stage3_prefetch_bucket_size": ("zero_optimization.stage3_prefetch_bucket_size",),
    "stage3_param_persistence_threshold": ("zero_optimization.stage3_param_persistence_threshold",),
    "stage3_max_live_parameters": ("zero_optimization.stage3_max_live_parameters",),
    "stage3_max_reuse_distance": ("zero_optimization.stage3_max_reuse_distance",),
    "partition_activations": ("activation_checkpointing.partition_activations",),
    "cpu_checkpointing": ("activation_checkpointing.cpu_checkpointing",),
}
"""Fields of the section deepspeed, and the keys that say the same."""

FIELD_OF = {key: field for field, keys in FIELDS.items() for key in keys}
FIELD_DEFAULTS = {field: DeepSpeedConfig.model_fields[field].default for field in FIELDS}

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""What a monitor needs to be installed."""

_OUR_BATCHES = "megacore reads the data: see the section data"
_OUR_CHECKPOINTS = "checkpoints are megacore's own, which any engine and layout can load: see the section checkpoint"
_OUR_LAYOUT = "the division over ranks is that of the section parallel"
_FP32_MAIN = "main weights, their moments and what checkpoints hold are fp32: remove it"
_ZERO_PP = "quantised communication changes what is learned and is untested here: remove it"
_REMOVED = "DeepSpeed 0.19 has it no longer: remove it"
_COMPILE = "the models are not compiled: remove it"


def _each(reason: str, keys: Iterable[str], off: tuple[Any, ...] = ()) -> dict[str, Refused]:
    return {key: Refused(reason, off) for key in keys}


REFUSED: dict[str, Refused] = {
    **_each(_OUR_BATCHES, ("dataloader_drop_last", "data_efficiency", "curriculum_learning")),
    **_each(_OUR_CHECKPOINTS, ("checkpoint", "datastates_ckpt", "nebula", "zero_optimization.elastic_checkpoint")),
    **_each(_OUR_CHECKPOINTS, ("zero_optimization.load_from_fp32_weights",), (True,)),
    **_each(_OUR_CHECKPOINTS, ("zero_optimization.pipeline_loading_checkpoint",)),
    **_each(_OUR_LAYOUT, ("tensor_parallel", "pipeline")),
    **_each(_OUR_LAYOUT, ("sequence_parallel_size", "data_parallel_size"), (1,)),
    **_each(_OUR_LAYOUT, ("seq_parallel_communication_data_type",), ("fp32",)),
    **_each(
        "no model here has experts: remove it",
        ("expert_parallel", "moe", "use_data_before_expert_parallelism", "zero_optimization.leaf_module"),
    ),
    **_each(
        _REMOVED,
        (
            "compression_training",
            "amp",
            "quantize_training",
            "sparse_gradients",
            "eigenvalue",
            "sparse_attention",
            "elasticity",
            "graph_harvesting",
            "progressive_layer_drop",
            "zero_optimization.mics_hierarchical_params_gather",
            "zero_optimization.zeropp_loco_param",
            "zero_optimization.legacy_stage1",
        ),
    ),
    "zero_optimization.mics_shard_size": Refused(_REMOVED, (-1,)),
    **_each(
        _ZERO_PP,
        (
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_nontrainable_weights",
            "zero_optimization.zero_quantized_gradients",
            "weight_quantization",
        ),
    ),
    "zero_optimization.zero_hpz_partition_size": Refused(
        "second copies of the weights within a node are untested here: set it to 1", (1,)
    ),
    "zero_optimization.zenflow": Refused(
        "its optimizer leaves gradients out of updates and is untested here: use offload_optimizer alone"
    ),
    "zero_optimization.offload_optimizer.super_offload": Refused("it is for one kind of machine and untested here"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Refused(
        "it belongs to super_offload: use launch.threads_per_rank", (0.8,)
    ),
    "zero_optimization.offload_optimizer.ratio": Refused(
        "the optimizer of the part that stays on the GPU does not follow the learning rate and weight decay of optim: "
        "set it to 1.0",
        (1,),
    ),
    "zero_optimization.cpu_offload_use_pin_memory": Refused(
        "DeepSpeed 0.19 reads it and does nothing with it: use pin_memory of offload_optimizer and offload_param",
        (True,),
    ),
    "zero_optimization.compute_grad_norm": Refused(
        "the norm clips the gradient and is logged: set it to true", (True,)
    ),
    "zero_optimization.round_robin_gradients": Refused(
        "DeepSpeed 0.19 then takes one parameter's state for another's, and a checkpoint would hold wrong values: "
        "set it to false"
    ),
    **_each(
        "DeepSpeed 0.19 then gathers whole modules and fails in backward: set it to 0",
        ("zero_optimization.stage3_module_granularity_threshold", "zero_optimization.module_granularity_threshold"),
        (0,),
    ),
    "bf16.check_grad_overflow": Refused(
        "a gradient that is not finite must leave the weights alone: set it to true", (True,)
    ),
    "zero_optimization.override_module_apply": Refused("models are built as DeepSpeed expects it: remove it", (True,)),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Refused("megacore trains with AdamW alone: remove it"),
    **_each(
        _FP32_MAIN,
        (
            "fp16.fp16_master_weights_and_grads",
            "bf16.bf16_master_weights_and_grads",
            "bf16.bf16_optimizer_states",
        ),
    ),
    "optimizer.params.fp32_optimizer_states": Refused(_FP32_MAIN, (True,)),
    "fp16.auto_cast": Refused("models take token ids, which have no precision: remove it"),
    "torch_autocast": Refused("it is another kind of mixed precision: use train.precision"),
    **_each("train.precision decides it: remove it", ("data_types.param_dtype", "data_types.buffer_dtype")),
    "data_types.keep_in_fp32_modules": Refused("train.precision decides it: remove it", ([],)),
    "gradient_allreduce_op": Refused("the gradient is the mean over all samples: use mean", ("mean",)),
    "gradient_predivide_factor": Refused("gradients are summed before they are divided: use 1.0", (1,)),
    "prescale_gradients": Refused("gradients are summed before they are divided: use false"),
    "managed_gradient_accumulation": Refused("DeepSpeed counts the micro batches: set it to true", (True,)),
    "disable_allgather": Refused("DeepSpeed 0.19 reads it and does nothing with it: remove it"),
    "vocabulary_size": Refused("the tokenizer decides it: use model.make_vocab_size_divisible_by"),
    "optimizer.params.amsgrad": Refused("megacore trains with AdamW alone: set it to false"),
    "optimizer.params.bias_correction": Refused("megacore trains with AdamW alone: set it to true", (True,)),
    **_each(
        "it says how Adam is computed, which deepspeed.cpu_adam does here: remove it",
        (
            "optimizer.params.fused",
            "optimizer.params.foreach",
            "optimizer.params.set_grad_none",
        ),
    ),
    "optimizer.legacy_fusion": Refused("the optimizer is made by megacore: remove it"),
    "comet.api_key": Refused("what the file says is kept with the run: set COMET_API_KEY in the environment"),
    "compile": Refused(_COMPILE),
    "hybrid_engine": Refused("it is for reinforcement learning, which there is none of here: remove it"),
    "autotuning": Refused("it starts jobs of its own: use megacore plan"),
}
"""Keys that DeepSpeed reads, or read once, and that are refused by name."""
