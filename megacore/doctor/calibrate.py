"""Measurement of this host's devices, for `megacore plan`: `megacore doctor --calibrate FILE`.

A rank on each device measures while all others do the same: matrix products, memory, attention and
short trainings; then all communicate. `Machine`'s values are fitted to the times. docs/planning.md
describes the fit.
"""

import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from megacore.artifact.files import access_errors, replace_file
from megacore.cluster.start import rank_environment
from megacore.config.spec import SpecialTokens
from megacore.doctor.calibration_fit import CPU_PLAN, GPU_PLAN, Case, Measured, Plan, fit
from megacore.doctor.machine import measure_storage
from megacore.errors import LaunchError
from megacore.hardware import Hardware
from megacore.launch.exit_reason import die_with_parent
from megacore.plan.machine import Machine, generic_machine_of

LIMIT_SECONDS = 120.0
"""Time limit of all measurements: they take less than a minute on an idle host."""
_MOST_RANKS = 16
"""Largest number of ranks that measure at once."""
_ROUNDS = 2
"""Rounds of measurements of all products."""
_TRAINING_SHARE = 12
"""Time of a training in relation to that of another measurement."""
_MIB = 1 << 20
_GIGA = 1e9


class _Clock:
    """Time of a device's work: of the processor on a CPU, so that other programs do not count."""

    def __init__(self, device: Any) -> None:
        self.cuda = device.type == "cuda"

    def __call__(self) -> float:
        if not self.cuda:
            return time.process_time()
        import torch

        torch.cuda.synchronize()
        return time.perf_counter()

    def least(self, work: Callable[[], object], seconds: float) -> float:
        """Return the shortest time of `work`, after a call that is not measured."""
        work()
        times: list[float] = []
        ends = time.perf_counter() + seconds
        while len(times) < 2 or time.perf_counter() < ends:
            repeat = 1 if not times else max(1, int(0.002 / max(times[0], 1e-7)))
            start = self()
            for _ in range(repeat):
                work()
            times.append((self() - start) / repeat)
        return min(times)


def measure_rank(part: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's measurements, by the names in `Measured`. Collective.

    Args:
        part: `rank`, `ranks`, `device` (cuda or cpu), `precisions`, `store` (path of the file where
            the ranks meet), `workspace` and `plan`.
    """
    import torch
    import torch.distributed as dist

    plan, rank, cuda = _plan_of(part["plan"]), int(part["rank"]), part["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{part['store']}",
        rank=rank,
        world_size=int(part["ranks"]),
        timeout=timedelta(seconds=LIMIT_SECONDS),
    )
    try:
        precisions = part["precisions"]
        disk = measure_storage(Path(part["workspace"])) if rank == 0 else {}
        values = {
            "device": torch.cuda.get_device_name(device) if cuda else _processor(),
            "products": {each: _products(plan, device, each) for each in precisions},
            **_memory(plan, device),
            "attention": _attention(plan, device, precisions[0]),
            **_trainings(plan, device, precisions[0]),
            "collectives": _collectives(plan, device) if part["ranks"] > 1 else {},
            "disk_gbs": disk.get("write", 0.0) / _GIGA,
        }
        dist.barrier()
        return values
    finally:
        dist.destroy_process_group()


def _processor() -> str:
    """Return the name of this host's processor, or its architecture if Linux does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _plan_of(values: dict[str, Any]) -> Plan:
    """Return the plan that `asdict` and JSON made lists of."""
    cases = tuple(Case(**case) for case in values["cases"])
    return Plan(**{**values, "cases": cases})


def _products(plan: Plan, device: Any, precision: str) -> list[list[float]]:
    """Return the times of a linear layer's three products, for each number of tokens."""
    import torch
    import torch.distributed as dist

    from megacore.kernels.choice import choose_kernels
    from megacore.kernels.implementation import DTYPES, Setting
    from megacore.kernels.matmul import affine, multiply

    dtype, clock = DTYPES[precision], _Clock(device)
    accumulate = choose_kernels(Setting(device, dtype)).weight_gradient
    rows: list[list[float]] = []
    # The speed of a machine changes: the rounds see it at different times.
    for turn in range(_ROUNDS):
        number = 0
        for m, (n, k) in itertools.product(plan.tokens, plan.weights):
            x = torch.randn(m, k, device=device).to(dtype)
            weight = torch.randn(n, k, device=device).to(dtype)
            dy = torch.randn(m, n, device=device).to(dtype)
            total = torch.zeros(n, k, device=device)
            products: tuple[tuple[int, int, int, Callable[[], object]], ...] = (
                (m, n, k, partial(affine, x, weight)),
                (m, k, n, partial(multiply, dy, weight)),
                (n, k, m, partial(accumulate, total, dy, x)),
            )
            dist.barrier()
            for *sizes, work in products:
                seconds = clock.least(work, plan.seconds / _ROUNDS)
                if turn == 0:
                    rows.append([*sizes, seconds])
                rows[number][3] = min(rows[number][3], seconds)
                number += 1
    return rows


def _memory(plan: Plan, device: Any) -> dict[str, float]:
    """Return rates of copies and additions in memory, and of copies to the host, in GB/s."""
    import torch
    import torch.distributed as dist

    clock, count = _Clock(device), plan.copy_bytes // 4
    first, second, third = (torch.ones(count, device=device) for _ in range(3))
    dist.barrier()
    copy = clock.least(lambda: second.copy_(first), plan.seconds)
    add = clock.least(lambda: torch.add(first, second, out=third), plan.seconds)
    host = torch.ones(count, pin_memory=clock.cuda)
    transfer = clock.least(lambda: host.copy_(first), plan.seconds)
    return {
        "copy_gbs": 2 * plan.copy_bytes / copy / _GIGA,
        "elementwise_gbs": 3 * plan.copy_bytes / add / _GIGA,
        "transfer_gbs": plan.copy_bytes / transfer / _GIGA,
    }


def _attention(plan: Plan, device: Any, precision: str) -> list[list[float]]:
    """Return the times of causal attention, forward and backward."""
    import torch
    import torch.distributed as dist

    from megacore.kernels.choice import choose_kernels
    from megacore.kernels.implementation import DTYPES, Setting

    dtype, clock = DTYPES[precision], _Clock(device)
    packed = choose_kernels(Setting(device, dtype)).packed_attention
    rows = []
    for samples, heads, length, size in plan.attention:
        mixed = torch.randn(samples, length, heads, 3, size, device=device).to(dtype)
        mixed.requires_grad_()
        grad = torch.randn(samples, heads, length, size, device=device).to(dtype)

        def forward(mixed: torch.Tensor = mixed) -> torch.Tensor:
            return packed(mixed, causal=True, scale=None)

        def both(mixed: torch.Tensor = mixed, grad: torch.Tensor = grad) -> None:
            packed(mixed, causal=True, scale=None).backward(grad)  # type: ignore[no-untyped-call]

        dist.barrier()
        single = clock.least(forward, plan.seconds)
        together = clock.least(both, plan.seconds)
        rows.append([samples, heads, length, size, single, max(together - single, 0.1 * single)])
    return rows


def _trainings(plan: Plan, device: Any, precision: str) -> dict[str, Any]:
    """Return the times of all trainings, and the time of iterations that the ranks end together."""
    rows = [_training(plan, case, device, precision) for case in plan.cases]
    ratios = [whole / (forward + backward + rest) for forward, backward, rest, whole in rows]
    return {"trainings": [row[:3] for row in rows], "together": median(ratios)}


def _training(plan: Plan, case: Case, device: Any, precision: str) -> list[float]:
    """Return the times of forward pass, backward pass, the rest of an iteration, and by the clock.

    The last is the time between the barriers before and after an iteration.
    """
    import torch
    import torch.distributed as dist

    from megacore.engine.build import build_engine
    from megacore.observe.timers import Timers
    from megacore.parallel.mesh import ProcessMesh

    clock = _Clock(device)

    class ProcessorTimers(Timers):
        """Timers of the processor's time."""

        @contextmanager
        def _timed(self, phase: str) -> Iterator[None]:
            start = clock()
            yield
            self._add(phase, (clock() - start) * 1000.0)

    timers = Timers(device) if clock.cuda else ProcessorTimers(device)
    engine = build_engine(
        case.config(),
        case.vocabulary,
        ProcessMesh(timers=timers),
        special_tokens=SpecialTokens(eod=case.vocabulary - 1),
        device=device,
        precision=precision,
    )
    batch = torch.randint(case.vocabulary, (case.samples, case.length + 1), device=device)
    times: list[list[float]] = []
    ends = time.perf_counter()
    going = torch.ones(1)
    while going.item():
        if len(times) == 1:
            ends = time.perf_counter() + _TRAINING_SHARE * plan.seconds
        dist.barrier()
        began, start = time.perf_counter(), clock()
        engine.forward_backward(iter([batch]), [len(times)])
        engine.update(1e-4, 0.01)
        total = clock() - start
        dist.barrier()
        whole = time.perf_counter() - began
        phases = timers.take(1)
        forward, backward = (phases[f"{name}-compute"] / 1e3 for name in ("forward", "backward"))
        times.append([forward, backward, max(total - forward - backward, 0.0), whole])
        going = torch.tensor([float(len(times) < 4 or time.perf_counter() < ends)], device=device)
        dist.broadcast(going, 0)
    return [min(column) for column in zip(*times[1:], strict=True)]


def _collectives(plan: Plan, device: Any) -> dict[str, list[list[float]]]:
    """Return bytes and seconds of all-reduces and messages; empty on ranks beyond the second."""
    import torch
    import torch.distributed as dist

    from megacore.parallel.collectives import all_reduce_
    from megacore.parallel.gradient_memory import GRADIENT_PIECE
    from megacore.parallel.mesh import ParallelGroup
    from megacore.parallel.shared_memory import SharedMemory

    rank, world, clock = dist.get_rank(), dist.get_world_size(), _Clock(device)
    pair = dist.new_group([0, 1])
    everybody = ParallelGroup(dist.group.WORLD, rank, world)
    two = ParallelGroup(pair, rank, 2) if rank < 2 else None
    near = None
    if two is not None and not clock.cuda:
        near = ParallelGroup(pair, rank, 2, shared=SharedMemory(pair, rank, 2))

    def ping(values: torch.Tensor) -> None:
        for source in (0, 1):
            (dist.send if rank == source else dist.recv)(values, 1 - rank, group=pair)

    def seconds(work: Callable[[torch.Tensor], object], size: int, group: Any) -> float:
        values, times = torch.zeros(max(1, size // 4), device=device), []
        calls, blocks = (4, 100) if size < _MIB else (1, 24)
        for _ in range(blocks):
            dist.barrier(group=group)
            if clock.cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                work(values)
            if clock.cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / calls)
        return min(times[2:])

    def reduced(among: ParallelGroup, group: Any) -> list[list[float]]:
        return [
            [size, seconds(lambda x: all_reduce_(x, among), size, group)] for size in plan.messages
        ]

    results: dict[str, list[list[float]]] = {}
    if two is not None:
        results["sockets"] = reduced(two, pair)
        results["message"] = [[size, seconds(ping, size, pair) / 2] for size in plan.messages]
    if near is not None:
        results["shared"] = reduced(near, pair)
        sums = replace(near, shared=SharedMemory(pair, rank, 2, GRADIENT_PIECE))
        size = plan.copy_bytes  # more than caches hold
        results["gradients"] = [[size, seconds(lambda x: all_reduce_(x, sums), size, pair)]]
    if world > 2:
        results["all"] = reduced(everybody, dist.group.WORLD)
    return results


def measure(hardware: Hardware, plan: Plan, workspace: Path, limit: float) -> Measured:
    """Measure all devices of this host at once. Raises LaunchError if a rank fails or hangs."""
    device = "cuda" if hardware.gpus else "cpu"
    ranks = min(len(hardware.gpus) or hardware.cores, _MOST_RANKS)
    with tempfile.TemporaryDirectory(prefix="megacore-calibrate-") as folder:
        part = {
            "ranks": ranks,
            "device": device,
            "precisions": precisions_of(hardware),
            "store": f"{folder}/store",
            "workspace": str(workspace),
            "plan": asdict(plan),
        }
        answers = _run_ranks(Path(folder), part, ranks, limit)
    first = answers[0]
    return Measured(
        device=first["device"],
        ranks=ranks,
        products=_combined([answer["products"] for answer in answers], _mean),
        attention=_combined([answer["attention"] for answer in answers], _mean),
        trainings=_combined([answer["trainings"] for answer in answers], _mean),
        together=_mean([answer["together"] for answer in answers]),
        copy_gbs=min(answer["copy_gbs"] for answer in answers),
        elementwise_gbs=min(answer["elementwise_gbs"] for answer in answers),
        transfer_gbs=min(answer["transfer_gbs"] for answer in answers),
        collectives={
            name: _combined(
                [each["collectives"][name] for each in answers if name in each["collectives"]], max
            )
            for name in first["collectives"]
        },
        disk_gbs=first["disk_gbs"],
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _combined(values: Sequence[Any], combine: Callable[[Sequence[float]], float]) -> Any:
    """Return nested lists or dictionaries of the same shape, with numbers combined."""
    if isinstance(values[0], dict):
        return {key: _combined([each[key] for each in values], combine) for key in values[0]}
    if isinstance(values[0], list):
        return [_combined(each, combine) for each in zip(*values, strict=True)]
    return combine(values)


def precisions_of(hardware: Hardware) -> list[str]:
    """Return the data types that the devices multiply natively, that of training first."""
    first = hardware.resolve_precision("auto")
    if not hardware.gpus:
        return ["fp32", "bf16"] if hardware.native_bf16 else ["fp32"]
    return list(dict.fromkeys([first, "fp16", "fp32"]))


def _run_ranks(
    folder: Path, part: dict[str, Any], ranks: int, limit: float
) -> list[dict[str, Any]]:
    """Start the ranks, wait for their answers, and end those that remain."""
    command = [sys.executable, "-m", "megacore.doctor.calibrate"]
    environment = os.environ | rank_environment(1)
    processes: list[subprocess.Popen[bytes]] = []
    ends = time.monotonic() + limit
    try:
        for rank in range(ranks):
            values = part | {"rank": rank, "output": f"{folder}/rank-{rank}"}
            with open(f"{folder}/log-{rank}", "wb") as log:
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log
                )
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(values).encode())
            process.stdin.close()
        running = True
        while running:
            running = any(process.poll() is None for process in processes)
            failed = next((i for i, each in enumerate(processes) if each.poll()), None)
            if failed is not None or (running and time.monotonic() > ends):
                raise LaunchError(_failure(folder, failed, processes, limit))
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [json.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(ranks)]


def _failure(
    folder: Path, failed: int | None, processes: "list[subprocess.Popen[bytes]]", limit: float
) -> str:
    if failed is None:
        return (
            f"the calibration did not end within {limit:.0f} s: end other programs on this host, "
            "and start it again"
        )
    lines = (folder / f"log-{failed}").read_text(errors="replace").strip().splitlines()
    return (
        f"rank {failed} of the calibration ended with {processes[failed].returncode} "
        f"({lines[-1][:300] if lines else 'no message'}): `megacore doctor` checks torch, the GPUs "
        "and the memory"
    )


def main() -> None:
    """Measure as one rank: the task is JSON on standard input, the answer a file."""
    die_with_parent()
    part = json.load(sys.stdin)
    Path(part["output"]).write_text(json.dumps(measure_rank(part)), encoding="utf-8")


def calibrate(
    path: Path, workspace: Path, plan: Plan | None = None, limit: float = LIMIT_SECONDS
) -> Machine:
    """Measure this host's devices, and write its hardware file.

    Args:
        path: file to write; its content is replaced atomically.
        workspace: directory whose disk is measured.
        plan: sizes; None means those of the devices.
        limit: seconds after which the ranks are ended.

    Raises:
        LaunchError: a rank failed, or the time is up.
        FileAccessError: the file cannot be written.
    """
    hardware = Hardware.detect()
    plan = plan or (GPU_PLAN if hardware.gpus else CPU_PLAN)
    started = time.time()
    generic = generic_machine_of(hardware, precisions_of(hardware)[0])
    measured = measure(hardware, plan, workspace, limit)
    total = len(hardware.gpus) or hardware.cores
    sources = [
        f"measured on {platform.node()} on {time.strftime('%Y-%m-%d', time.gmtime(started))}: "
        f"{measured.ranks} of {total} devices at once, load {os.getloadavg()[0]:.1f}",
        "not measured: network, straggler, offload.memory_gbs, core.hidden_passes"
        + ("" if measured.collectives else ", node, pipeline_gbs (one device)"),
    ]
    machine = fit(measured, plan, generic, sources)
    text = yaml.safe_dump(
        machine.model_dump(mode="json", exclude_none=True), sort_keys=False, width=100
    )
    with access_errors(path):
        replace_file(path, f"# Written by `megacore doctor --calibrate`.\n{text}".encode())
    return machine


if __name__ == "__main__":
    main()
