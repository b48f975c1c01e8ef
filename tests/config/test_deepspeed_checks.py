"""Requests that the engine deepspeed cannot satisfy, made by the section or by a JSON."""

from typing import Any

import pytest

from tests.config._deepspeed import asking, refusal

FULL = {"recompute": "full"}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FP16 = {"precision": "fp16"}
T5: dict[str, Any] = {
    "family": "t5",
    "data": {
        "source": {"kind": "source_tree"},
        "append_eod": False,
        "split_sentences": True,
        "tokenizer": {
            "kind": "train-bpe",
            "special_tokens": ["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
            "vocab_extra_ids": 100,
        },
        "seq_length": 64,
    },
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "position_embedding_type": "relative",
    },
}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"deepspeed": {"zero_stage": 0}, "parallel": {"data_parallel_sharding": "optimizer"}},
            (
                "deepspeed.zero_stage is 0 but parallel.data_parallel_sharding is "
                "optimizer, which is stage 1"
            ),
        ),
        (
            {"optim": {"name": "muon"}},
            "optim.name is muon, which needs the engine native, but engine is deepspeed",
        ),
        (
            {"deepspeed": {"offload_param": "cpu", "zero_stage": 2}},
            "deepspeed.offload_param is cpu but deepspeed.zero_stage is 2: it needs stage 3",
        ),
        (
            {"deepspeed": {"offload_optimizer": "cpu"}},
            (
                "deepspeed.offload_optimizer is cpu but deepspeed.zero_stage is 0: it needs stage "
                "1, 2 or 3"
            ),
        ),
        (
            {"deepspeed": {"offload_optimizer": "nvme", "zero_stage": 2, "nvme_path": "/nvme"}},
            "deepspeed.offload_optimizer is nvme but deepspeed.zero_stage is 2: it needs stage 3",
        ),
        (
            {"deepspeed": {"offload_param": "nvme", "zero_stage": 3}},
            (
                "deepspeed.offload_param is nvme but deepspeed.nvme_path is missing: name a "
                "directory on a local disk"
            ),
        ),
        (
            {"deepspeed": {"nvme_path": "/nvme", "zero_stage": 3}},
            "deepspeed.nvme_path is /nvme but nothing is offloaded to nvme",
        ),
        (
            {"deepspeed": {"pin_memory": False}},
            "deepspeed.pin_memory is false but nothing is offloaded: remove it",
        ),
        (
            {"deepspeed": {"sub_group_size": 1000, "zero_stage": 2}},
            (
                "deepspeed.sub_group_size is 1000 but deepspeed.zero_stage is 2, and only stage 3 "
                "divides weights"
            ),
        ),
        (
            {"deepspeed": {"stage3_max_live_parameters": 1000, "zero_stage": 1}},
            "deepspeed.stage3_max_live_parameters is 1000 but deepspeed.zero_stage is 1",
        ),
        (
            {"deepspeed": {"allgather_bucket_size": 1000, "zero_stage": 3}},
            (
                "deepspeed.allgather_bucket_size is 1000 but deepspeed.zero_stage is 3, where "
                "weights are gathered as they"
            ),
        ),
        (
            {"deepspeed": {"allgather_bucket_size": 1001, "zero_stage": 2}},
            (
                "deepspeed.allgather_bucket_size is 1001, which is odd: DeepSpeed takes elements "
                "in pairs, use 1002"
            ),
        ),
        (
            {"deepspeed": {"overlap_comm": True}},
            (
                "deepspeed.overlap_comm is true but deepspeed.zero_stage is 0, which has no such "
                "buckets"
            ),
        ),
        (
            {"deepspeed": {"cpu_adam": "torch", "zero_stage": 2}},
            "deepspeed.cpu_adam is torch but the optimizer is not offloaded",
        ),
        (
            {"deepspeed": {"cpu_checkpointing": True}},
            (
                "deepspeed.cpu_checkpointing is true but train.recompute is none: set the latter "
                "to full"
            ),
        ),
        (
            {"deepspeed": {"zero_stage": 1}, "train": {"kernels": {"sum_of_squares": "apex"}}},
            "sum_of_squares is apex, which has no effect with ZeRO stage 1 of DeepSpeed",
        ),
        (
            T5 | {"deepspeed": {"cpu_checkpointing": True}, "train": FULL},
            "deepspeed.cpu_checkpointing is true but family is t5, whose layers share tensors",
        ),
        (
            {"deepspeed": {"partition_activations": True}, "train": FULL},
            "deepspeed.partition_activations is true but parallel.tensor_model_parallel_size is 1",
        ),
        (
            {"deepspeed": {"partition_activations": True}, "train": FULL, "parallel": TP2_SP},
            "deepspeed.partition_activations is true but parallel.sequence_parallel is true",
        ),
        (
            {"train": FP16, "optim": {"loss_scale": {"initial": 60000}}},
            (
                "optim.loss_scale.initial is 60000 but engine is deepspeed, whose first loss scale "
                "is a power of two: use 65536"
            ),
        ),
        (
            {"train": FP16},
            (
                "train.precision is fp16 but deepspeed.zero_stage is 0, where DeepSpeed 0.19 "
                "divides gradients by a loss"
            ),
        ),
        (
            {"train": FP16, "optim": {"loss_scale": {"minimum": 0.5}}},
            (
                "optim.loss_scale.minimum is 0.5 but engine is deepspeed, whose smallest loss "
                "scale is an integer: use 1"
            ),
        ),
    ],
)
def test_an_impossible_section_is_refused(sections: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**sections)
    asking(**sections, engine="native")


@pytest.mark.parametrize(
    ("content", "sections", "sentence"),
    [
        (
            {"zero_optimization": {"stage": 0}},
            {"parallel": {"data_parallel_sharding": "optimizer"}},
            (
                "zero_optimization.stage of deepspeed.config is 0 but "
                "parallel.data_parallel_sharding is optimizer"
            ),
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload_param": True}},
            {},
            (
                "zero_optimization.offload_param.device of deepspeed.config is cpu but "
                "zero_optimization.stage of deepspeed.config is 2: it needs stage 3"
            ),
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            {},
            "but zero_optimization.offload_optimizer.nvme_path of deepspeed.config is missing",
        ),
        (
            {"zero_optimization": {"stage": 2, "stage3_allgather_sequential": True}},
            {},
            (
                "zero_optimization.stage3_allgather_sequential of deepspeed.config is true but "
                "zero_optimization.stage"
            ),
        ),
        (
            {"aio": {"queue_depth": 8}, "zero_optimization": {"stage": 3}},
            {},
            (
                "aio.queue_depth of deepspeed.config is 8 but nothing is offloaded to nvme: remove "
                "the block aio"
            ),
        ),
        (
            {"activation_checkpointing": {"number_checkpoints": 4}},
            {"train": {"recompute": "selective"}},
            (
                "activation_checkpointing.number_checkpoints of deepspeed.config is 4 but "
                "train.recompute is selective"
            ),
        ),
        (
            {
                "activation_checkpointing": {
                    "contiguous_memory_optimization": True,
                    "number_checkpoints": 4,
                }
            },
            {"train": FULL},
            "contiguous_memory_optimization of deepspeed.config is true without "
            "activation_checkpointing.partition_activations",
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp32"}},
            {"train": {"precision": "bf16"}},
            (
                "data_types.grad_accum_dtype of deepspeed.config is fp32 but with ZeRO stage 0 and "
                "precision bf16 gradients add up in bf16"
            ),
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp16"}, "zero_optimization": {"stage": 2}},
            {"train": {"precision": "bf16"}},
            "is fp16 but with ZeRO stage 2 and precision bf16 gradients add up in fp32 or bf16",
        ),
    ],
)
def test_an_impossible_json_is_refused(
    content: dict[str, Any], sections: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(content, **sections)


def test_possible_combinations_are_accepted() -> None:
    asking(
        deepspeed={
            "zero_stage": 1,
            "offload_optimizer": "cpu",
            "pin_memory": False,
            "cpu_adam": "torch",
        }
    )
    asking(
        deepspeed={"partition_activations": True, "cpu_checkpointing": True},
        train=FULL,
        parallel={"tensor_model_parallel_size": 2},
    )
    asking(train=FP16, deepspeed={"zero_stage": 1})
    asking({"zero_optimization": {"stage": 0, "overlap_comm": False, "reduce_bucket_size": 5e8}})
    asking({"activation_checkpointing": {"cpu_checkpointing": False}})
