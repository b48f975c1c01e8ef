"""Predicted times of an iteration: their parts, their limits, and formulas by hand."""

from dataclasses import astuple, fields, replace
from functools import cache
from typing import Any

import pytest

from megacore.config import load_config
from megacore.parallel.gradient_memory import GRADIENT_PIECE
from megacore.pipeline_parallel.partition import chunks_of
from megacore.pipeline_parallel.schedules import build_schedule, simulate
from megacore.plan.iteration import Iteration
from megacore.plan.layouts import layout_of
from megacore.plan.machine import Link, Machine, load_machine
from megacore.plan.operations import MEGATRON_2021, Group, Software

VOCAB = 2000
BASE = {
    "model.num_layers": 8,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 16,
    "data.seq_length": 1024,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 64,
    "train.precision": "bf16",
    "launch.nproc_per_node": "auto",
}
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
CP = "parallel.context_parallel_size"
VPP, ZERO_1 = "parallel.virtual_pipeline_model_parallel_size", "parallel.data_parallel_sharding"


@cache
def h100() -> Machine:
    return load_machine("h100")


def iteration(
    ranks: int = 1,
    values: dict[str, Any] | None = None,
    *,
    machine: Machine | None = None,
    software: Software | None = None,
) -> Iteration:
    config = load_config("gpt2-tiny", BASE | (values or {}))
    machine = machine or h100()
    layout = layout_of(config, ranks, VOCAB)
    result = Iteration(config, VOCAB, machine, layout, "bf16")
    return result if software is None else replace(result, software=software)


LAYOUTS = [
    (1, {}),
    (8, {TP: 2, PP: 2}),
    (8, {TP: 2, PP: 4, VPP: 2, "parallel.sequence_parallel": True}),
    (32, {PP: 2, ZERO_1: "optimizer", "train.recompute": "full"}),
    (4, {"engine": "deepspeed", "deepspeed.zero_stage": 3}),
    (8, {TP: 2, CP: 2}),
]


@pytest.mark.parametrize("software", [None, MEGATRON_2021])
@pytest.mark.parametrize(("ranks", "values"), LAYOUTS)
def test_parts_add_up_and_none_is_negative(
    ranks: int, values: dict[str, Any], software: Software | None
) -> None:
    prediction = iteration(ranks, values, software=software).predict()
    parts = astuple(prediction)
    assert prediction.seconds == pytest.approx(sum(parts))
    assert min(parts) >= -1e-12
    assert prediction.compute > 0
    assert prediction.optimizer > 0


@pytest.mark.parametrize(
    "more",
    [
        {"train.global_batch_size": 128},
        {"data.seq_length": 2048},
        {"model.num_layers": 12},
        {"model.hidden_size": 2048},
        {"train.recompute": "full"},
    ],
)
@pytest.mark.parametrize(("ranks", "values"), LAYOUTS[:3])
def test_more_work_takes_longer(ranks: int, values: dict[str, Any], more: dict[str, Any]) -> None:
    less = iteration(ranks, values).predict().seconds
    assert iteration(ranks, values | more).predict().seconds > less


def test_parts_are_those_of_the_layout() -> None:
    serial = iteration().predict()
    assert (serial.tensor, serial.bubble, serial.messages) == (0, 0, 0)
    assert (serial.data, serial.other) == (0, 0)
    assert iteration(2, {TP: 2}).predict().tensor > 0
    assert iteration(2).predict().data > 0
    assert iteration(2).predict().tensor == 0
    assert iteration(16).predict().other > 0  # two hosts
    staged, divided = iteration(2, {PP: 2}).predict(), iteration(2, {CP: 2}).predict()
    assert staged.bubble > 0
    assert (staged.data, divided.tensor) == (0, 0)
    assert staged.embedding > 0
    assert divided.context > 0
    assert divided.data > 0


def test_keys_of_divided_sequences_are_gathered_and_copied() -> None:
    run = iteration(2, {CP: 2})
    size = 2.0 * run.rates.element * run.tokens * run.config.model.attention_size  # keys and values
    gathered = Group(run.machine, 2).gather(2 * size)
    # forward this rank's into the message, and all of them in order; backward all of them
    for work, copies in ((run.layer.forward, 3), (run.layer.backward, 2)):
        copied = run.rates.stream(2 * size * copies)
        assert work.context == pytest.approx(gathered + copied)


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (4, 1), (2, 4), (4, 2)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(stages: int, virtual: int) -> None:
    quick = h100().model_copy(
        update={
            "pipeline_gbs": 1e9,
            "operation_us": 0.0,
            "node": h100().node.model_copy(update={"latency_us": 0.0}),
            "host": h100().host.model_copy(update={"head_us": 0.0, "embedding_us": 0.0}),
        }
    )
    # a vocabulary of 128 entries costs little; the other stages wait for it, too
    values = {PP: stages, VPP: virtual, "parallel.pipeline_partition": "uniform"}
    pipeline = replace(iteration(stages, values, machine=quick), vocab_size=128)
    prediction = pipeline.predict()
    expected = (stages - 1) / (pipeline.micro_batches * virtual)
    assert expected <= prediction.bubble / prediction.compute < 1.2 * expected


@pytest.mark.parametrize(("ranks", "values"), [(4, {PP: 4}), (4, {PP: 4, VPP: 2})])
@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_the_makespan_equals_a_full_simulation(
    ranks: int, values: dict[str, Any], micro_batches: int
) -> None:
    values = values | {"train.global_batch_size": micro_batches}
    pipeline = iteration(ranks, values)
    chunks = chunks_of(pipeline.config, VOCAB)
    schedule = build_schedule("1f1b", 4, micro_batches, values.get(VPP, 1))
    full = simulate(
        schedule,
        [pipeline.forward(chunk).total for chunk in chunks],
        [pipeline.backward(chunk).total for chunk in chunks],
        latency=pipeline.message(),
    ).makespan
    prediction = pipeline.predict()
    afterwards = ("data", "embedding", "optimizer", "other")
    names = [part.name for part in fields(prediction) if part.name not in afterwards]
    passes = sum(getattr(prediction, name) for name in names)
    # of more than 8 micro batches the rest is extrapolated
    assert passes == pytest.approx(full, rel=1e-9 if micro_batches <= 8 else 0.01)


def linked() -> Machine:
    """Return hosts of 8 devices with known links."""
    node, network = Link(gbs=300, latency_us=10), Link(gbs=25, latency_us=30)
    return h100().model_copy(update={"node": node, "network": network})


def test_an_all_reduce_inside_a_host_is_a_ring() -> None:
    # 2 (n - 1) / n of 1 GB at 300 GB/s, and 7 steps of 10 us in each of two directions
    seconds = 2 * (7 / 8 * 1e9 / 300e9 + 7 * 10e-6)
    assert Group(linked(), 8).all_reduce(1e9) == pytest.approx(seconds)
    assert Group(linked(), 8).gather(1e9) == pytest.approx(seconds / 2)
    assert Group(linked(), 1).all_reduce(1e9) == 0


def test_a_group_across_hosts_shares_their_network() -> None:
    # 16 ranks on two hosts: 8 x 25 GB/s; the steps are 1 between the hosts and 7 inside
    seconds = 2 * (15 / 16 * 1e9 / 200e9 + 30e-6 + 7 * 10e-6)
    assert Group(linked(), 16).all_reduce(1e9) == pytest.approx(seconds)
    # 16 ranks of which neighbours are 8 apart: one on each of 16 hosts, so 4 levels of a tree
    seconds = 2 * (15 / 16 * 1e9 / 25e9 + 4 * 30e-6)
    assert Group(linked(), 16, 8).all_reduce(1e9) == pytest.approx(seconds)


def test_another_layout_has_the_times_of_a_new_iteration() -> None:
    first = iteration(8, {TP: 2})
    assert first.predict().seconds > 0
    second = iteration(8, {TP: 2, PP: 2, ZERO_1: "optimizer"})
    changed = first.with_layout(second.config, second.layout)
    assert changed.layer is first.layer
    assert changed.predict() == second.predict()


def test_a_host_that_waits_for_each_operation_adds_its_time() -> None:
    waiting = replace(MEGATRON_2021, launch_wait=2.0)
    free, added = (iteration(software=each) for each in (MEGATRON_2021, waiting))
    host = 1e-6 * h100().host.layer_forward_us
    assert free.layer.forward.total >= host
    without = replace(waiting, launch_wait=1e-9)
    device = iteration(software=without).layer.forward.total
    assert added.layer.forward.total == pytest.approx(device + 2 * host)


def test_a_softmax_that_is_not_fused_costs_the_host_time() -> None:
    # of 16 heads on 8 ranks two are left, of which two samples make four
    software = replace(MEGATRON_2021, launch_wait=1.0, unfused_softmax_us=500.0)
    plain = replace(software, unfused_softmax_us=0.0)
    for micro_batch, extra in ((1, 5e-4), (2, 0.0)):
        values = {TP: 8, "train.micro_batch_size": micro_batch}
        slow, fast = (iteration(8, values, software=each).layer for each in (software, plain))
        assert slow.forward.total - fast.forward.total == pytest.approx(extra, abs=1e-12)


@pytest.mark.parametrize(("size", "factor"), [(128, 1), (120, 1), (108, 4), (105, 4)])
def test_rows_of_odd_sizes_leave_tensor_cores_unused(size: int, factor: int) -> None:
    rates = iteration().rates
    machine = replace(rates, machine=h100().model_copy(update={"operation_us": 0, "traffic": 0}))
    wide = -(-size // 8) * 8
    work = size / wide * (1 + h100().half_depth / size) / (1 + h100().half_depth / wide)
    expected = factor * work * machine.product(1024, 1024, wide, 16)
    assert machine.product(1024, 1024, size, 16) == pytest.approx(expected)


def test_scattered_messages_are_a_part_for_each_rank() -> None:
    values = {TP: 8, PP: 2, "train.micro_batch_size": 16, "train.global_batch_size": 16}
    software = replace(MEGATRON_2021, message_us=0.0)
    whole = iteration(16, values, software=replace(software, scatters_messages=False))
    parts = iteration(16, values, software=software)
    assert parts.message() < whole.message() / 2
    divided = values | {"parallel.sequence_parallel": True}
    assert iteration(16, divided, software=software).message() < parts.message()
    later = iteration(16, values, software=replace(software, message_us=500.0))
    assert later.message() == pytest.approx(parts.message() + 5e-4)


def test_a_measured_device_has_no_share_of_products() -> None:
    measured = h100().model_copy(update={"fitted_on": "measured"})
    assert iteration(machine=measured).rates.product_share == 1.0
    assert iteration().rates.product_share < 1.0


def test_ranks_that_share_a_core_wait_a_tick_for_each_collective() -> None:
    machine = load_machine("cpu")
    values = {TP: 2, "train.precision": "fp32", "train.global_batch_size": 4}
    alone, shared = (
        replace(iteration(2, values, machine=machine), precision="fp32", cores=cores).predict()
        for cores in (1.0, 0.5)
    )
    # of each micro batch 2 all-reduces in either direction of 8 layers, and 4 of the head
    ticks = 4 * (2 * 2 * 8 + 4) * 0.004
    expected = 2 * (shared.compute + shared.optimizer) + max(ticks, shared.tensor)
    assert alone.other == 0
    assert shared.seconds - shared.data == pytest.approx(expected)


def test_cores_that_work_together_are_slower() -> None:
    machine = load_machine("cpu")
    assert machine.core is not None
    core = machine.core.model_copy(update={"together": 1.25})
    slower = machine.model_copy(update={"core": core})
    for ranks, factor in ((1, 1.0), (2, 1.25)):
        times = [
            replace(iteration(ranks, machine=each), precision="fp32").predict().compute
            for each in (machine, slower)
        ]
        assert times[1] / times[0] == pytest.approx(factor, rel=0.01)


def rate(machine: Machine) -> float:
    """Return the bytes of gradients that two ranks sum in a second."""
    assert machine.core is not None
    assert machine.core.gradients_gbs == 2.0 < machine.node.gbs
    return 2e9


@pytest.mark.parametrize(
    ("ranks", "values", "shared"),
    [
        (2, {}, True),
        (4, {}, True),
        (8, {}, False),
        (4, {ZERO_1: "optimizer"}, False),
        (4, {CP: 2}, True),
        (8, {CP: 2}, False),
        (8, {CP: 2, TP: 2}, True),
        (4, {"engine": "deepspeed", "deepspeed.zero_stage": 0}, False),
    ],
)
def test_core_ranks_sum_gradients_in_memory_as_the_engine_does(
    ranks: int, values: dict[str, Any], shared: bool
) -> None:
    """Shared memory takes 2 latencies for each piece, and n / 2 of the bytes at their rate."""
    machine = load_machine("cpu").model_copy(update={"devices_per_node": 16})
    assert machine.core is not None
    copies = ranks // values.get(TP, 1)
    parameters = GRADIENT_PIECE
    size = 4.0 * parameters
    if shared:
        node = machine.node
        expected = 2 * 4 * node.latency_us * 1e-6 + copies / 2 * size / rate(machine)
    else:
        expected = Group(machine, copies).all_reduce(size)
    run = replace(iteration(ranks, values, machine=machine), precision="fp32")
    assert run.data(parameters, 8, 1.0) == pytest.approx(expected)


def test_stages_on_cores_sum_a_tied_embedding_in_memory() -> None:
    machine = load_machine("cpu").model_copy(update={"devices_per_node": 16})
    run = replace(iteration(2, {PP: 2}, machine=machine), precision="fp32")
    size = 4.0 * run.spec.padded_vocab_size * 1024
    pieces = -(-size // GRADIENT_PIECE)
    expected = 2 * pieces * machine.node.latency_us * 1e-6 + size / rate(machine)
    assert run.predict().embedding == pytest.approx(expected)


def test_muon_adds_products_passes_and_messages() -> None:
    """Owners divide the products of Newton-Schulz; matrices travel to them and back.

    The other operations on a matrix move 112 bytes per element instead of AdamW's 35.
    """

    def added(ranks: int = 1, **values: Any) -> float:
        times = [
            iteration(ranks, values | {"optim.name": name}).predict().optimizer
            for name in ("adam", "muon")
        ]
        return times[1] - times[0]

    run = iteration()
    product, square = run.rates.product, 3 * run.rates.product(1024, 1024, 1024)
    wide = 2 * product(1024, 1024, 4096) + 2 * product(1024, 4096, 1024)
    wide += 14 * product(1024, 1024, 1024)
    elements = 8 * 12 * 1024**2
    expected = 8 * (4 * 5 * square + 2 * wide)
    expected += run.rates.stream((112 - run.software.optimizer_bytes) * elements)
    assert added() == pytest.approx(expected)
    assert added(2, **{PP: 2}) == pytest.approx(expected / 2)
    assert added(2) == pytest.approx(expected)
    # Of two ranks, each sends half of its matrices, in four rounds that overlap but for one.
    part = elements * run.rates.element / 2
    message = 2 * Group(run.machine, 2).gather(part / 4)
    assert added(2, **{ZERO_1: "optimizer"}) == pytest.approx(expected / 2 + message)
    assert added(2, **{TP: 2}) == pytest.approx(expected / 2 + message)
    # A core that communicates does not compute.
    cores = iteration(2, {ZERO_1: "optimizer", "optim.name": "muon"}, machine=load_machine("cpu"))
    (chunk,) = chunks_of(cores.config, cores.vocab_size)
    products, messages = cores._newton_schulz([chunk]), cores._owners([chunk])
    passes = cores.rates.stream(56 * elements / 2)
    assert cores.muon([chunk]) == products + passes + messages
    assert messages > 0.0
