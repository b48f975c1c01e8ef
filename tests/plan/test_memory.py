from dataclasses import replace

import pytest

from megacore.config import RunConfig, load_config
from megacore.config.deepspeed import zero_of
from megacore.config.parallel import ZERO_STAGES
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.engine.native import NativeEngine
from megacore.models.build import build_model
from megacore.models.parameters import (
    chunk_matrices,
    chunk_sizes,
    layer_sizes,
    parameter_count,
)
from megacore.models.stage import Stage, layer_matrices
from megacore.optim.adam import ShardedWeights
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan.activations import Activations
from megacore.plan.memory import (
    MemoryEstimate,
    engine_name,
    estimate_memory,
    estimate_stages,
    muon_elements,
    whole_muon_elements,
)
from tests.plan._deepspeed import deepspeed
from tests.plan._models import (
    BERT,
    DTYPES,
    LLAMA,
    T5,
    VOCAB_SIZE,
    family,
    layout,
    saved_bytes,
    tiny,
)


def test_a_stage_of_a_divided_model_needs_messages_gathered_copies_and_gradients() -> None:
    """Of a first stage with 4 layers, which stores 2 micro batches and has no head."""

    def temporary(tp: int, **values: object) -> int:
        config = layout(tp, 2, **{"model.hidden_dropout": 0.0, **values})
        stage = estimate_stages(config, VOCAB_SIZE, "bf16", "cuda")[0]
        return stage.passes - stage.activations

    hidden = 2 * 2 * 128 * 128  # bytes of [b, s, h]; the FFN is four times as wide
    # one message sent, two received in advance, the gradient of the output and one of the FFN
    assert temporary(1) == (1 + 2 + 1) * hidden + 4 * hidden
    assert temporary(2) == (1 + 2 + 1) * hidden + 2 * hidden
    # a gated unit has gradients of both halves, and with ReLU the activation is shared
    assert temporary(1, **{"model.activation": "swiglu"}) == 4 * hidden + 2 * 4 * hidden
    assert temporary(1, **{"model.activation": "relu"}) == 4 * hidden + 2 * 4 * hidden
    # divided messages, and two copies of the gathered gradient or one and the gradient of the FFN
    sequence = {"parallel.sequence_parallel": True}
    assert temporary(2, **sequence) == 4 * hidden // 2 + 3 * hidden
    # four copies of the gathered input, less the gradient of the FFN, one of which is divided
    assert temporary(4, **sequence) == 4 * hidden // 4 + 4 * hidden - hidden + hidden // 4


def test_masks_on_a_gpu_take_lists_of_blocks_or_one_matrix() -> None:
    length, samples = 2048, 4

    def stored(**values: object) -> int:
        config = tiny(**{"data.seq_length": length, **values})
        return estimate_stages(config, VOCAB_SIZE, "bf16", "cuda")[0].activations

    plain = stored()
    documents = {"data.reset_attention_mask": True}
    spans = 8  # two numbers of four bytes
    lists = 4 * (length // 128) ** 2 * 4 // length
    assert stored(**documents) - plain == samples * length * (spans + lists)
    dense = samples * length**2 * 2
    assert stored(**documents, **{"train.kernels.attention": "plain"}) - plain == dense
    assert stored(**documents, **{"train.compile": "off"}) - plain == dense
    dropout = {"model.attention_dropout": 0.1}
    assert stored(**documents, **dropout) - stored(**dropout) == dense
    softcap = {"model.attn_logit_softcapping": 50.0}
    assert stored(**softcap) == plain
    assert stored(**softcap, **{"train.compile": "off"}) > plain + dense


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize(
    ("recompute", "layers"),
    [("none", None), ("full", None), ("full", 1), ("selective", None), ("selective", 2)],
)
@pytest.mark.parametrize("groups", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_activations_are_close_to_what_autograd_saves(
    precision: str, dropout: float, recompute: str, layers: int | None, groups: int | None
) -> None:
    config = tiny(
        dropout,
        recompute,
        **{"train.recompute_num_layers": layers, "model.num_query_groups": groups},
    )
    activations = Activations(config, DTYPES[precision].itemsize, "cpu")
    estimate = estimate_memory(config, VOCAB_SIZE, precision, "cpu").activations
    # one recomputed layer exists only during the backward pass
    estimate -= activations.layer - activations.recomputed_layer
    assert estimate == pytest.approx(saved_bytes(config, precision), rel=0.1)


@pytest.mark.parametrize(
    "overrides",
    [
        LLAMA,
        BERT,
        BERT | {"model.norm_position": "post"},
        BERT | {"model.bert_binary_head": False},
        T5,
        T5 | {"model.untie_embeddings_and_output_weights": True, "model.activation": "relu"},
    ],
)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3)])
def test_parameters_of_every_family_are_counted(
    overrides: dict[str, object], tp: int, pp: int
) -> None:
    config = family(**overrides, **{"parallel.pipeline_model_parallel_size": pp})
    mesh = replace(ProcessMesh.serial(), tensor_parallel=ParallelGroup(None, 0, tp))
    for chunk in chunks_of(config, VOCAB_SIZE):
        model = build_model(config, VOCAB_SIZE, mesh, device="meta", chunk=chunk)
        sizes = [parameter.numel() for parameter in model.parameters()]
        counted = chunk_sizes(ModelSpec.of(config, VOCAB_SIZE), chunk, tp)
        assert sorted(counted) == sorted(sizes)
    if tp == pp == 1:
        assert parameter_count(ModelSpec.of(config, VOCAB_SIZE)) == sum(sizes)


MUON = {"optim.name": "muon"}


@pytest.mark.parametrize(
    "overrides", [{}, LLAMA, T5, {"model.num_query_groups": 2, "model.kv_channels": 16}]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_muons_matrices_of_every_family_are_counted(overrides: dict[str, object], tp: int) -> None:
    config = family(**overrides, **MUON, **{"parallel.tensor_model_parallel_size": tp})
    mesh = replace(ProcessMesh.serial(), tensor_parallel=ParallelGroup(None, 0, tp))
    model = build_model(config, VOCAB_SIZE, mesh, device="meta")
    matrices = layer_matrices(model)
    parameters = dict(model.named_parameters())
    counted = muon_elements(config, chunks_of(config, VOCAB_SIZE))
    assert counted == sum(parameters[name].numel() for name in matrices)
    assert whole_muon_elements(config, VOCAB_SIZE) == tp * counted
    (chunk,) = chunks_of(config, VOCAB_SIZE)
    shapes = chunk_matrices(config.model, chunk)
    assert len(shapes) == sum(parts.parts for parts in matrices.values())


def test_muon_needs_one_moment_of_its_matrices_and_buffers_for_owners() -> None:
    adam, muon = (
        [
            estimate_memory(layout(1, 1, 1, **values, **zero), VOCAB_SIZE, "bf16", "cpu", 2)
            for zero in ({}, {"parallel.data_parallel_sharding": "optimizer"})
        ]
        for values in ({}, MUON)
    )
    matrices = 8 * 12 * 128**2
    assert adam[0].optimizer - muon[0].optimizer == 4 * matrices
    assert adam[1].optimizer - muon[1].optimizer == 4 * matrices // 2
    assert [estimate.step for estimate in (*adam, *muon)] == [0, 0, 0, 2 * 2 * matrices // 2]


def state_of(config: RunConfig, precision: str, rank: int, replicas: int) -> tuple[int, int]:
    """Return the bytes of the state that a replica's engine has, and those of them in padding.

    Each storage counts once.
    """
    group = ParallelGroup(None, rank, replicas)
    mesh = replace(ProcessMesh.serial(), data_parallel=group, data_context_parallel=group)
    stage = Stage(
        config, VOCAB_SIZE, mesh, special_tokens=SpecialTokens(eod=0), initial_weights=False
    )
    engine = NativeEngine(stage, config, precision)
    (sync,), parts = engine._syncs, engine._optimizer._parts
    tensors = [parameter.data for parameter in stage.named_parameters.values()]
    tensors += [bucket.reduced for bucket in sync.buckets]
    tensors += [bucket.buffer for bucket in sync.buckets if bucket.buffer is not None]
    for part in parts:
        tensors += [part.flat.shard] if isinstance(part, ShardedWeights) else []
        for main in part.weights:
            tensors += [main.weight, main.exp_avg]
            tensors += [] if main.exp_avg_sq is None else [main.exp_avg_sq]
    storages = [tensor.untyped_storage() for tensor in tensors]
    total = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    element, padding = DTYPES[precision].itemsize, 0
    for bucket in sync.buckets:
        filled = sum(bucket.layout.sizes.values())
        whole = bucket.layout.length - filled
        shard = len(bucket.shard) - sum(each.length for each in bucket.layout.within(bucket.shard))
        padding += 4 * (shard if sync.sharding.divides("gradients") else whole)
        if sync.sharded:
            padding += element * (shard if sync.sharding.divides("parameters") else whole)
            padding += 4 * shard * (1 + (precision != "fp32"))  # moment and main weights
    return total, padding


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", {}), ("bf16", MUON)])
@pytest.mark.parametrize("sharding", ZERO_STAGES)
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_state_is_that_of_the_engine_without_padding(
    replicas: int, sharding: str, precision: str, optimizer: dict[str, object]
) -> None:
    config = family(
        **optimizer,
        **{"parallel.data_parallel_sharding": sharding, "parallel.grad_reduce_bucket_mb": 0.25},
        **{"train.global_batch_size": 24, "model.num_layers": 1},
    )
    estimate = estimate_memory(config, VOCAB_SIZE, precision, "cpu", replicas)
    predicted = estimate.weights + estimate.gradients + estimate.optimizer
    ranks = [state_of(config, precision, rank, replicas) for rank in range(replicas)]
    total, padding = (sum(part) for part in zip(*ranks, strict=True))
    # Parameters have multiples of 128 elements, which two replicas divide evenly.
    assert padding == 0 if replicas == 2 or sharding == "none" else 0 < padding < 0.002 * total
    rounding = 0 if replicas == 2 else 16 * replicas
    assert total - padding == pytest.approx(replicas * predicted, rel=0, abs=rounding)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize(("tp", "pp", "v"), [(1, 4, 1), (2, 2, 2), (4, 1, 1)])
def test_stages_add_up_to_the_model_and_a_copy_of_the_embeddings(
    tp: int, pp: int, v: int, groups: int | None
) -> None:
    config = layout(tp, pp, v, **{"model.num_query_groups": groups})
    stages = estimate_stages(config, VOCAB_SIZE, "fp32", "cpu")
    hidden, ffn, vocab = 128, 512, 2048
    replicated = 8 * (4 * hidden + 2 * hidden) + 128 * hidden + 2 * hidden
    divided = parameter_count(ModelSpec.of(config, VOCAB_SIZE)) - replicated
    embedding_copy = vocab * hidden // tp if pp > 1 else 0
    assert sum(stage.parameters for stage in stages) == replicated + divided // tp + embedding_copy
    one_layer = sum(layer_sizes(config.model, tp))
    assert one_layer * tp - sum(layer_sizes(config.model)) == (tp - 1) * 6 * hidden
    assert ffn == config.model.ffn_size
    if pp == 4:
        assert stages[1].parameters == stages[2].parameters == 2 * one_layer


def in_flight(config: RunConfig, stage: int, data_parallel_size: int = 1) -> float:
    """Return the number of micro batches whose activations a stage keeps.

    The stage must have neither embedding nor head.
    """
    per_micro_batch = Activations(config, 4, "cuda").chunk(chunks_of(config, VOCAB_SIZE)[stage])
    return (
        estimate_stages(config, VOCAB_SIZE, "fp32", "cuda", data_parallel_size)[stage].activations
        / per_micro_batch
    )


def test_1f1b_keeps_a_micro_batch_per_remaining_stage() -> None:
    assert [in_flight(layout(pp=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(layout(pp=4), stage, data_parallel_size=16) for stage in range(4)] == [
        2,
        2,
        2,
        1,
    ]


def test_gpipe_keeps_all_micro_batches() -> None:
    config = layout(pp=4, **{"parallel.pipeline_schedule": "gpipe"})
    assert [in_flight(config, stage) for stage in range(4)] == [32] * 4
    first, last = (estimate_stages(config, VOCAB_SIZE, "bf16", "cuda")[stage] for stage in (0, 3))
    last_of_1f1b = estimate_stages(layout(pp=4), VOCAB_SIZE, "bf16", "cuda")[3]
    assert first.logits == 0
    assert last.logits - last_of_1f1b.logits == 31 * 2 * 2 * 128 * 2048


def test_interleaving_keeps_more_than_1f1b() -> None:
    """A stage keeps 2 (pp - stage - 1) + (v - 1) pp + 1 passes through half as many layers."""
    assert [in_flight(layout(pp=4, v=2), stage) for stage in range(1, 3)] == [9, 7]
    estimates = estimate_stages(layout(pp=4, v=2), VOCAB_SIZE, "fp32", "cuda")
    plain = estimate_stages(layout(pp=4), VOCAB_SIZE, "fp32", "cuda")
    assert estimates[0].activations == pytest.approx(plain[0].activations * 11 / 8, rel=0.02)
    assert estimates[3].logits == plain[3].logits


def test_the_estimate_is_that_of_the_largest_stage() -> None:
    config = layout(pp=2, **{"parallel.pipeline_partition": [2, 6]})
    stages = estimate_stages(config, VOCAB_SIZE, "fp32", "cpu")
    assert stages[1].total > stages[0].total
    assert estimate_memory(config, VOCAB_SIZE, "fp32", "cpu") == stages[1]
    flat = layout(pp=2, **{"data.seq_length": 1024, "train.micro_batch_size": 4})
    stages = estimate_stages(flat, VOCAB_SIZE, "fp32", "cpu")
    assert estimate_memory(flat, VOCAB_SIZE, "fp32", "cpu") == stages[0]


@pytest.mark.parametrize(
    ("precision", "weights"), [("fp32", (4.0, 4.0)), ("bf16", (6.0, 2.0 + 4.0 / 8))]
)
def test_the_distributed_optimizer_divides_main_weights_and_moments(
    precision: str, weights: tuple[float, float]
) -> None:
    def estimate(sharded: bool) -> MemoryEstimate:
        config = layout(**{"parallel.data_parallel_sharding": "optimizer" if sharded else "none"})
        return estimate_memory(config, VOCAB_SIZE, precision, "cpu", data_parallel_size=8)

    replicated, sharded = estimate(False), estimate(True)
    assert replicated.optimizer == 8 * replicated.parameters
    assert sharded.optimizer == replicated.optimizer / 8
    assert (
        replicated.weights / replicated.parameters,
        sharded.weights / sharded.parameters,
    ) == weights
    assert sharded.gradients == replicated.gradients


def test_recomputing_fewer_layers_keeps_more() -> None:
    def activations(layers: int | None) -> int:
        overrides = {"train.recompute": "full", "train.recompute_num_layers": layers}
        return estimate_memory(layout(pp=2, **overrides), VOCAB_SIZE, "fp32", "cpu").activations

    assert activations(None) == activations(4) < activations(3) < activations(1)


def test_gpt2_345m_has_the_parameters_of_its_padded_vocabulary() -> None:
    config = load_config("gpt2-345m")
    assert config.model.padded_vocab_size(50_257) == 50_304
    assert config.model.padded_vocab_size(50_304) == 50_304
    wider = config.model.model_copy(update={"make_vocab_size_divisible_by": 1024})
    assert wider.padded_vocab_size(50_257) == 51_200
    assert parameter_count(ModelSpec.of(config, 50_257)) == 354_871_296


def test_state_takes_16_bytes_per_parameter_in_fp32_and_18_in_half_precision() -> None:
    config = load_config("gpt2-345m")
    count = parameter_count(ModelSpec.of(config, 50_257))
    for precision, expected in (("fp32", 16), ("bf16", 18), ("fp16", 18)):
        estimate = estimate_memory(config, 50_257, precision, "cuda")
        assert estimate.weights + estimate.gradients + estimate.optimizer == expected * count
        assert estimate.total > expected * count


def test_full_recomputation_more_than_halves_the_activations() -> None:
    without_recomputation = estimate_memory(
        tiny(recompute="none"), VOCAB_SIZE, "fp32", "cpu"
    ).activations
    recomputed = estimate_memory(tiny(recompute="full"), VOCAB_SIZE, "fp32", "cpu").activations
    assert recomputed < without_recomputation / 2


@pytest.mark.parametrize(("precision", "element"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_zero_stage_divides_its_parts_of_the_state(
    stage: int, precision: str, element: int
) -> None:
    config = deepspeed(stage, **{"train.global_batch_size": 32})
    estimate = estimate_memory(config, VOCAB_SIZE, precision, "cuda", data_parallel_size=8)
    count, share = estimate.parameters, -(-estimate.parameters // 8)
    main = 4 * (share if stage else count) if precision != "fp32" or stage else 0
    assert estimate.weights == element * (share if stage == 3 else count) + main
    accumulated = 4 if stage else element
    assert estimate.gradients == accumulated * (share if stage >= 2 else count)
    assert estimate.optimizer == 8 * (share if stage else count)
    assert (estimate.host, estimate.nvme) == (0, 0)


def test_the_total_counts_the_larger_of_activations_and_step() -> None:
    large, small = (
        estimate_memory(deepspeed(1, **{"train.micro_batch_size": b}), VOCAB_SIZE, "fp32", "cpu")
        for b in (4, 1)
    )
    for estimate in (large, small):
        rest = estimate.total - estimate.weights - estimate.gradients - estimate.optimizer
        rest -= estimate.buffers + estimate.process
        assert rest == max(estimate.activations + estimate.logits, estimate.step)
    assert large.step == small.step == 4 * large.parameters
    assert large.activations + large.logits > large.step


def test_offloading_moves_bytes_to_host_memory() -> None:
    config = deepspeed(3, offload_optimizer="cpu", offload_param="cpu")
    on_gpu, offloaded = (
        estimate_memory(each, VOCAB_SIZE, "fp16", "cuda", 2) for each in (deepspeed(3), config)
    )
    share = offloaded.parameters // 2
    assert (offloaded.weights, offloaded.gradients, offloaded.optimizer, offloaded.step) == (
        0,
        0,
        0,
        0,
    )
    assert offloaded.host == (2 + 4 + 12 + 4) * share
    assert on_gpu.total - offloaded.total == on_gpu.weights + on_gpu.gradients + on_gpu.optimizer
    # A CPU has no other memory to offload to.
    on_cpu = estimate_memory(config, VOCAB_SIZE, "fp16", "cpu", 2)
    assert (on_cpu.host, on_cpu.weights + on_cpu.gradients + on_cpu.optimizer) == (0, 18 * share)
    assert on_cpu.buffers == offloaded.buffers + 4 * share


def test_state_offloaded_to_nvme_is_counted_there() -> None:
    config = deepspeed(3, offload_optimizer="nvme", offload_param="nvme", nvme_path="/nvme")
    estimate = estimate_memory(config, VOCAB_SIZE, "bf16", "cuda", 2)
    assert estimate.nvme == 14 * (estimate.parameters // 2)
    assert estimate.weights + estimate.gradients + estimate.optimizer == 0


def test_replicas_divide_the_optimizer_state_of_their_stage() -> None:
    sizes = {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2}
    stages = estimate_stages(deepspeed(1, **sizes), VOCAB_SIZE, "bf16", "cuda", 2)
    native = layout(2, 2, **{"model.num_layers": 3, "parallel.pipeline_partition": "balanced"})
    assert [stage.parameters for stage in stages] == [
        stage.parameters for stage in estimate_stages(native, VOCAB_SIZE, "bf16", "cuda", 2)
    ]
    assert all(stage.optimizer == 8 * -(-stage.parameters // 2) for stage in stages)


def test_inputs_of_recomputation_can_be_partitioned_or_offloaded() -> None:
    def estimate(**deepspeed_values: object) -> MemoryEstimate:
        values = {
            "train.recompute": "full",
            "parallel.tensor_model_parallel_size": 2,
            **deepspeed_values,
        }
        return estimate_memory(deepspeed(1, **values), VOCAB_SIZE, "bf16", "cuda")

    inputs = 3 * 2 * 4 * 128 * 128
    plain, divided, offloaded = (
        estimate(),
        estimate(partition_activations=True),
        estimate(cpu_checkpointing=True),
    )
    both = estimate(partition_activations=True, cpu_checkpointing=True)
    # The current layer needs its whole input, so half of one layer's input is not saved.
    assert plain.activations - divided.activations == inputs // 2 - inputs // 6
    assert (plain.host, divided.host, offloaded.host, both.host) == (0, 0, inputs, inputs // 2)
    assert plain.activations - offloaded.activations == inputs - inputs // 3


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (tiny(), "native"),
        (deepspeed(0), "deepspeed ZeRO-0"),
        (deepspeed(2, offload_optimizer="cpu"), "deepspeed ZeRO-2, optimizer on cpu"),
        (
            deepspeed(3, offload_optimizer="nvme", offload_param="cpu", nvme_path="/nvme"),
            "deepspeed ZeRO-3, optimizer on nvme, weights on cpu",
        ),
    ],
)
def test_engine_names_include_the_zero_stage_and_offload(config: RunConfig, name: str) -> None:
    assert engine_name(config.engine, zero_of(config)) == name
