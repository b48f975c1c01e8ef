"""Fit of a machine's rates to measured times, for `megacore doctor --calibrate`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.models.parameters import chunk_sizes
from megacore.parallel.gradient_memory import GRADIENT_PIECE
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan.iteration import Iteration
from megacore.plan.machine import MEASURED, HostTimes, Link, Machine
from megacore.plan.operations import Rates

_MIB = 1 << 20
_GIGA = 1e9
_ENDLESS = 1e18
"""Rate of work that takes no time."""


@dataclass(frozen=True)
class Case:
    """One short training of a GPT."""

    layers: int
    hidden: int
    heads: int
    length: int
    samples: int
    """Samples of its only micro batch."""
    vocabulary: int

    def config(self) -> RunConfig:
        """Return the configuration of the training."""
        values = {
            "name": "calibration",
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "train-bpe", "vocab_size": self.vocabulary},
                "seq_length": self.length,
            },
            "model": {
                "num_layers": self.layers,
                "hidden_size": self.hidden,
                "num_attention_heads": self.heads,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "optim": {"lr": 1e-4},
            "train": {
                "micro_batch_size": self.samples,
                "global_batch_size": self.samples,
                "train_iters": 1_000_000,
            },
        }
        return parse_config(values, origin="megacore doctor --calibrate")


@dataclass(frozen=True)
class Plan:
    """Sizes of all measurements."""

    tokens: tuple[int, ...]
    """Rows m of the products."""
    weights: tuple[tuple[int, int], ...]
    """Widths n and k of the products."""
    attention: tuple[tuple[int, int, int, int], ...]
    """Samples, heads, length and head size."""
    cases: tuple[Case, ...]
    messages: tuple[int, ...]
    """Bytes of collectives and messages."""
    copy_bytes: int
    seconds: float
    """Time of each measurement, at least three repetitions."""


CPU_PLAN = Plan(
    tokens=(128, 1024),
    weights=((192, 64), (64, 256), (768, 256), (256, 1024), (2304, 768), (8192, 256)),
    attention=((4, 4, 128, 16), (4, 4, 128, 32), (2, 8, 256, 32), (1, 12, 512, 64)),
    cases=(
        Case(2, 64, 4, 64, 1, 512),
        Case(8, 64, 4, 64, 1, 512),
        Case(4, 128, 4, 128, 4, 8192),
        Case(4, 256, 8, 256, 2, 8192),
        Case(2, 512, 8, 256, 2, 1024),
        Case(1, 768, 12, 128, 1, 16384),
        Case(1, 768, 12, 512, 1, 1024),
    ),
    messages=(4, 16384, 262144, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
    copy_bytes=64 * _MIB,
    seconds=0.1,
)
GPU_PLAN = Plan(
    tokens=(1024, 4096, 8192),
    weights=((1024, 1024), (3072, 1024), (4096, 4096), (16384, 4096), (4096, 16384)),
    attention=((8, 16, 1024, 64), (4, 32, 2048, 128), (2, 32, 4096, 128)),
    cases=(
        Case(4, 256, 4, 128, 1, 1024),
        Case(16, 256, 4, 128, 1, 1024),
        Case(4, 1024, 16, 1024, 4, 51200),
    ),
    messages=(4, 65536, _MIB, 16 * _MIB, 128 * _MIB, 512 * _MIB),
    copy_bytes=1024 * _MIB,
    seconds=0.1,
)


@dataclass(frozen=True)
class Measured:
    """Times in seconds: of computation the mean of all ranks, of others the slowest rank's."""

    device: str
    """Name of the device."""
    ranks: int
    """Ranks that measured at once."""
    products: dict[str, list[list[float]]]
    """By data type: m, n, k and seconds of each product [m, k] x [k, n]."""
    copy_gbs: float
    """Bytes that a copy reads and writes, in GB/s."""
    elementwise_gbs: float
    """Bytes that an addition reads and writes, in GB/s."""
    transfer_gbs: float
    """Copies between device and host, in GB/s."""
    attention: list[list[float]]
    """Samples, heads, length, head size, seconds forward and backward."""
    trainings: list[list[float]]
    """Seconds of forward pass, backward pass and the rest of an iteration, by case."""
    together: float
    """Time by the clock of an iteration that all ranks begin and end together, relative to the
    processor's time of `trainings`."""
    collectives: dict[str, list[list[float]]]
    """Bytes and seconds of: `shared` and `sockets` all-reduces of two ranks, `gradients` of
    gradients in shared memory, `all` of all ranks, `message` of a message between two."""
    disk_gbs: float


def least_squares(
    columns: Sequence[Sequence[float]], times: Sequence[float], whole: Sequence[float] | None = None
) -> list[float]:
    """Return non-negative factors of the columns, with the least relative errors of their sum.

    A column that would get a negative factor is left out.

    Args:
        columns: a value for each time.
        times: times to reproduce.
        whole: times to which errors are relative; None means `times`.
    """
    import numpy as np

    matrix, weights = np.array(columns, dtype=float).T, 1 / np.array(whole or times, dtype=float)
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale * weights[:, None]
    used, factors = list(range(matrix.shape[1])), np.zeros(matrix.shape[1])
    while used:
        solution = np.linalg.lstsq(scaled[:, used], np.array(times) * weights, rcond=None)[0]
        if solution.min() >= 0:
            factors[used] = solution
            break
        used.pop(int(solution.argmin()))
    return [float(each) for each in factors / scale]


def fit(measured: Measured, plan: Plan, generic: Machine, sources: Sequence[str]) -> Machine:
    """Return the machine whose predictions are closest to the measurements.

    Args:
        measured: times of this host's devices.
        plan: sizes that were measured.
        generic: values that one host cannot measure: the network, stragglers, host memory.
        sources: what was measured, where and when.
    """
    machine = generic.model_copy(
        update={
            "name": f"{measured.device}, measured",
            "sources": tuple(sources),
            "fitted_on": MEASURED,
            "memory_gbs": measured.copy_gbs,
            "memory_efficiency": min(1.0, measured.elementwise_gbs / measured.copy_gbs),
            "offload": generic.offload.model_copy(
                update={
                    "transfer_gbs": measured.transfer_gbs,
                    "nvme_gbs": measured.disk_gbs / measured.ranks or generic.offload.nvme_gbs,
                }
            ),
        }
    )
    machine = fit_products(machine, measured.products)
    machine = _fit_attention(machine, measured.attention)
    machine = _fit_links(machine, measured)
    if machine.core is None:
        return _rounded(_fit_host(machine, measured, plan))
    return _rounded(_fit_core(machine, measured, plan))


def fit_products(machine: Machine, products: dict[str, list[list[float]]]) -> Machine:
    """Return the machine with rates of products, the first data type's shape for all of them."""
    rates: dict[str, float] = {}
    shape: dict[str, float] = {}
    for precision, rows in products.items():
        copy = {"tflops": {precision: 1e-12}, "product_efficiency": 1.0, "half_depth": 0.0}
        copy |= {"traffic": 0.0, "operation_us": 0.0}
        plain = machine.model_copy(update=copy)
        endless = plain.model_copy(update={"tflops": {precision: _ENDLESS}, "traffic": 1.0})
        shallow = plain.model_copy(update={"half_depth": 1.0})
        sizes = [(int(m), int(n), int(k)) for m, n, k, _ in rows]
        work, half, moved = (
            [Rates(each, precision).product(*size) for size in sizes]
            for each in (plain, shallow, endless)
        )
        times = [seconds for *_, seconds in rows]
        short = [b - a for a, b in zip(work, half, strict=True)]
        inverse, depth, traffic, fixed = least_squares(
            [work, short, moved, [1.0] * len(rows)], times
        )
        best = max(2 * m * n * k / seconds for m, n, k, seconds in rows)
        rates[precision] = 1 / inverse if inverse else best
        shape = shape or {
            "peak": max(best, rates[precision]),
            "half_depth": depth * rates[precision],
            "traffic": traffic,
            "operation_us": fixed * 1e6,
        }
    peak = shape.pop("peak")
    efficiency = next(iter(rates.values())) / peak
    tflops = {precision: rate / efficiency / 1e12 for precision, rate in rates.items()}
    changes = {"tflops": tflops, "product_efficiency": efficiency}
    return machine.model_copy(update=shape | changes)


def _fit_attention(machine: Machine, rows: list[list[float]]) -> Machine:
    """Return the machine with the rates of attention; a core's scores take time of their own."""
    shares, scores_ns = [], []
    peak = next(iter(machine.tflops.values())) * 1e12
    for direction, repeats in ((4, 1.0), (5, 2.5)):
        scores = [0.5 * b * n * s * s for b, n, s, *_ in rows]
        work = [
            repeats * 4.0 * count * row[3] / peak for count, row in zip(scores, rows, strict=True)
        ]
        columns = [work, scores] if machine.core is not None else [work]
        inverse, *rest = least_squares(columns, [row[direction] for row in rows])
        shares.append(1 / inverse if inverse else _ENDLESS)
        scores_ns.append(rest[0] * 1e9 if rest else 0.0)
    changes: dict[str, Any] = {"attention_efficiency": tuple(shares)}
    if machine.core is not None:
        changes["core"] = machine.core.model_copy(update={"score_ns": tuple(scores_ns)})
    return machine.model_copy(update=changes)


def _fit_links(machine: Machine, measured: Measured) -> Machine:
    """Return the machine with the links inside this host; unchanged if it has one device."""
    if not measured.collectives:
        return machine
    changes: dict[str, Any] = {}
    rings = [(2, *row) for row in measured.collectives["sockets"]]
    rings += [(measured.ranks, *row) for row in measured.collectives.get("all", [])]
    ring = _link(
        [2.0 * (n - 1) for n, *_ in rings],
        [2 * (n - 1) / n * size for n, size, _ in rings],
        [seconds for *_, seconds in rings],
    )
    if machine.core is None:
        changes["node"] = ring
    else:
        near = measured.collectives["shared"]
        sizes = [size for size, _ in near]
        node = _link([2.0] * len(near), sizes, [seconds for _, seconds in near])
        (size, seconds), *_ = measured.collectives["gradients"]
        notices = 2e-6 * node.latency_us * math.ceil(size / GRADIENT_PIECE)
        # Noise of small messages must not leave too little time for the bytes.
        rate = size / max(seconds - notices, seconds / 2) / _GIGA
        changes["node"] = node
        changes["core"] = machine.core.model_copy(
            update={"sockets": ring, "gradients_gbs": min(rate, node.gbs)}
        )
    messages = measured.collectives["message"]
    message = _link(
        [1.0] * len(messages), [size for size, _ in messages], [seconds for _, seconds in messages]
    )
    return machine.model_copy(update=changes | {"pipeline_gbs": message.gbs})


def _link(messages: Sequence[float], sizes: Sequence[float], times: Sequence[float]) -> Link:
    latency, inverse = least_squares([messages, sizes], times)
    if not inverse:  # noise hid the growth with size: the largest message bounds the rate
        size, seconds = max(zip(sizes, times, strict=True))
        inverse = seconds / size
        latency = min(time / count for count, time in zip(messages, times, strict=True))
    return Link(gbs=1 / inverse / _GIGA, latency_us=latency * 1e6)


def _passes(machine: Machine, plan: Plan) -> list[float]:
    """Return the predicted times of the cases' forward passes, then of their backward passes."""
    precision = next(iter(machine.tflops))
    runs = [
        Iteration(case.config(), case.vocabulary, machine, RankLayout(), precision)
        for case in plan.cases
    ]
    chunks = [chunks_of(run.config, run.vocab_size)[0] for run in runs]
    forward = [run.forward(chunk).total for run, chunk in zip(runs, chunks, strict=True)]
    return forward + [run.backward(chunk).total for run, chunk in zip(runs, chunks, strict=True)]


def _fit_core(machine: Machine, measured: Measured, plan: Plan) -> Machine:
    """Return the machine with the times of a core's elementwise work, loss and updates."""
    core = machine.core
    assert core is not None
    nothing = core.model_copy(
        update={"elementwise_gbs": (_ENDLESS, _ENDLESS), "logit_ns": (0.0, 0.0)}
    )
    host = HostTimes(
        layer_forward_us=0, layer_backward_us=0, collective_us=0, head_us=0, embedding_us=0
    )
    idle = machine.model_copy(update={"core": nothing, "host": host})
    units = [
        idle.model_copy(update={"core": nothing.model_copy(update=change)})
        for change in (
            {"elementwise_gbs": (1.0, _ENDLESS)},
            {"elementwise_gbs": (_ENDLESS, 1.0)},
            {"logit_ns": (1.0, 0.0)},
            {"logit_ns": (0.0, 1.0)},
        )
    ]
    units += [
        idle.model_copy(update={"host": host.model_copy(update={name: 1.0})})
        for name in ("layer_forward_us", "layer_backward_us", "head_us")
    ]
    known = _passes(idle, plan)
    columns = [[a - b for a, b in zip(_passes(unit, plan), known, strict=True)] for unit in units]
    times = [row[direction] for direction in (0, 1) for row in measured.trainings]
    rest = [a - b for a, b in zip(times, known, strict=True)]
    *inverse, first, second, forward, backward, head = least_squares(columns, rest, times)
    parameters = [float(_parameters(case)) for case in plan.cases]
    layers = [float(case.layers) for case in plan.cases]
    update = least_squares(
        [parameters, layers, [1.0] * len(layers)], [row[2] for row in measured.trainings]
    )
    return machine.model_copy(
        update={
            "host": host.model_copy(
                update={
                    "layer_forward_us": forward,
                    "layer_backward_us": backward,
                    "head_us": head,
                }
            ),
            "core": core.model_copy(
                update={
                    "elementwise_gbs": tuple(1 / each if each else _ENDLESS for each in inverse),
                    "logit_ns": (first, second),
                    "parameter_ns": update[0] * 1e9,
                    "layer_update_us": update[1] * 1e6,
                    "iteration_us": update[2] * 1e6,
                    "together": max(1.0, measured.together),
                }
            ),
        }
    )


def _fit_host(machine: Machine, measured: Measured, plan: Plan) -> Machine:
    """Return the machine with the host's times, from two small models for which the GPU waits."""
    few, many = plan.cases[:2]
    first, second = measured.trainings[:2]
    layer = [(b - a) / (many.layers - few.layers) for a, b in zip(first, second, strict=True)]
    ends = [max(0.0, first[each] - few.layers * layer[each]) for each in (0, 1)]
    host = HostTimes(
        layer_forward_us=max(0.0, layer[0]) * 1e6,
        layer_backward_us=max(0.0, layer[1]) * 1e6,
        collective_us=machine.host.collective_us,
        head_us=sum(ends) / 2 * 1e6,
        embedding_us=0.0,
    )
    return machine.model_copy(update={"host": host})


def _parameters(case: Case) -> int:
    config = case.config()
    (chunk,) = chunks_of(config, case.vocabulary)
    return sum(chunk_sizes(ModelSpec.of(config, case.vocabulary), chunk, 1))


def _rounded(machine: Machine) -> Machine:
    """Return the machine with four digits of each number, validated."""

    def four(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: four(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [four(each) for each in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return Machine.model_validate(four(machine.model_dump(exclude_none=True)))
