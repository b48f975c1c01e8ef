"""Calibration: the fit recovers the rates of a machine, and the written file can be read."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megacore.doctor.calibrate import _training, calibrate
from megacore.doctor.calibration_fit import CPU_PLAN, Case, Measured, Plan, fit, fit_products
from megacore.errors import LaunchError
from megacore.hardware import Hardware
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan.iteration import Iteration
from megacore.plan.machine import HARDWARE_DIR, LOCAL_FILE, Machine, load_machine
from megacore.plan.operations import Core, Rates
from tests._limits import HANG

QUICK = Plan(
    tokens=(32, 64),
    weights=((64, 32), (32, 96)),
    attention=((1, 2, 32, 16), (1, 2, 64, 16)),
    cases=(Case(1, 32, 2, 32, 1, 320), Case(2, 32, 2, 32, 1, 320), Case(1, 64, 2, 64, 1, 512)),
    messages=(4, 65536),
    copy_bytes=1 << 20,
    seconds=0.002,
)


def known() -> Machine:
    machine = load_machine("cpu")
    assert machine.core is not None
    return machine.model_copy(
        update={
            "tflops": {"fp32": 0.08},
            "product_efficiency": 1.0,
            "half_depth": 40.0,
            "traffic": 0.5,
            "operation_us": 7.0,
            "core": machine.core.model_copy(update={"score_ns": (0.4, 0.9)}),
        }
    )


def products(machine: Machine) -> list[list[float]]:
    rates, sizes = (
        Rates(machine, "fp32"),
        [(m, *w) for m in CPU_PLAN.tokens for w in CPU_PLAN.weights],
    )
    return [[m, n, k, rates.product(m, n, k)] for m, n, k in sizes]


def times_of(machine: Machine) -> Measured:
    """Return the times that a machine's own predictions give."""
    rates, attention, trainings = Rates(machine, "fp32"), [], []
    for b, n, s, d in CPU_PLAN.attention:
        core = Core(s, s, causal=True)
        run = Iteration(CPU_PLAN.cases[0].config(), 512, machine, RankLayout(), "fp32")
        passes = [each(rates, b * n, d, run.software) for each in (core.forward, core.backward)]
        attention.append([float(b), n, s, d, *passes])
    for case in CPU_PLAN.cases:
        run = Iteration(case.config(), case.vocabulary, machine, RankLayout(), "fp32")
        (chunk,) = chunks_of(run.config, run.vocab_size)
        prediction = run.predict()
        trainings.append(
            [run.forward(chunk).total, run.backward(chunk).total, prediction.optimizer]
        )
    assert machine.core is not None
    near, far = machine.node, machine.core.sockets
    sizes = CPU_PLAN.messages
    links = {
        "shared": [[b, 2e-6 * near.latency_us + b / near.gbs / 1e9] for b in sizes],
        "gradients": [[64 << 20, 16 * 2e-6 * near.latency_us + (64 << 20) / 2e9]],
        "sockets": [[b, 2e-6 * far.latency_us + b / far.gbs / 1e9] for b in sizes],
        "message": [[b, 1e-4 + b / machine.pipeline_gbs / 1e9] for b in sizes],
    }
    return Measured(
        "core",
        2,
        {"fp32": products(machine)},
        12.0,
        9.0,
        5.0,
        attention,
        trainings,
        1.1,
        links,
        1.0,
    )


def test_fit_of_products_recovers_rate_depth_traffic_and_fixed_time() -> None:
    machine = known()
    fitted = fit_products(load_machine("cpu"), {"fp32": products(machine)})
    rate = fitted.tflops["fp32"] * fitted.product_efficiency
    assert rate == pytest.approx(0.08, rel=1e-3)
    assert fitted.half_depth == pytest.approx(40.0, rel=1e-2)
    assert fitted.traffic == pytest.approx(0.5, rel=1e-2)
    assert fitted.operation_us == pytest.approx(7.0, rel=1e-2)


def test_fit_predicts_the_times_that_it_was_given() -> None:
    machine = known()
    measured = times_of(machine)
    fitted = fit(measured, CPU_PLAN, load_machine("cpu"), ["made up"])
    assert fitted.fitted_on == "measured"
    assert fitted.offload.nvme_gbs == 0.5  # two ranks share the disk
    assert fitted.node.latency_us == pytest.approx(machine.node.latency_us, rel=1e-2)
    assert fitted.core is not None
    assert machine.core is not None
    assert fitted.core.sockets.gbs == pytest.approx(machine.core.sockets.gbs, rel=1e-2)
    assert fitted.core.gradients_gbs == pytest.approx(2.0, rel=1e-2)
    assert fitted.core.together == 1.1
    case = CPU_PLAN.cases[3]
    predictions = [
        Iteration(case.config(), case.vocabulary, each, RankLayout(), "fp32").predict()
        for each in (machine, fitted)
    ]
    assert predictions[1].compute == pytest.approx(predictions[0].compute, rel=0.01)
    assert predictions[1].optimizer == pytest.approx(predictions[0].optimizer, rel=0.01)


def test_a_link_whose_times_do_not_grow_with_size_has_its_largest_messages_rate() -> None:
    measured, noise = times_of(known()), [[4, 90e-6], [16384, 70e-6], [65536, 80e-6]]
    links = dict.fromkeys(("shared", "sockets", "message", "gradients"), noise)
    fitted = fit(replace(measured, collectives=links), CPU_PLAN, load_machine("cpu"), ["made up"])
    assert fitted.node.gbs == pytest.approx(65536 / 80e-6 / 1e9, rel=1e-3)
    assert fitted.node.latency_us == pytest.approx(35, rel=1e-3)  # two messages in 70 us


def test_the_written_file_is_a_hardware_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Hardware(cores=1, memory=8 << 30)
    monkeypatch.setattr(Hardware, "detect", lambda: one)
    path = tmp_path / HARDWARE_DIR / LOCAL_FILE
    path.parent.mkdir(parents=True)
    path.write_text("devices_per_node: 64\n")  # not even complete
    monkeypatch.chdir(tmp_path)
    written = calibrate(path, tmp_path, QUICK, limit=HANG)
    machine = load_machine(str(path))
    assert (machine.devices_per_node, machine.memory_gib) == (1, 8)
    assert machine == written
    assert machine.sources[0].startswith("measured on ")
    assert 0.0005 < machine.tflops["fp32"] < 10
    assert machine.core is not None
    assert "one device" in machine.sources[1]


def test_a_measured_training_reads_ids_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadError(Exception):
        """The engine has its first batch."""

    class Engine:
        def forward_backward(self, batches: Iterator[Tensor], seeds: list[int]) -> None:
            raise ReadError(next(batches).device.type)

    monkeypatch.setattr("megacore.engine.build.build_engine", lambda *_, **__: Engine())
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    with pytest.raises(ReadError, match=r"^meta$"):
        _training(QUICK, QUICK.cases[0], torch.device("meta"), "fp32")


@pytest.mark.slow
def test_two_ranks_measure_their_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "detect", lambda: Hardware(cores=2, memory=8 << 30))
    machine = calibrate(tmp_path / "local.yaml", tmp_path, QUICK, limit=HANG)
    generic = load_machine("cpu")
    assert "2 of 2 devices at once" in machine.sources[0]
    assert "one device" not in machine.sources[1]
    assert machine.core is not None
    assert generic.core is not None
    for link, unmeasured in (
        (machine.node, generic.node),
        (machine.core.sockets, generic.core.sockets),
    ):
        assert link != unmeasured
        assert 0 < link.gbs < 1000
    assert machine.core.gradients_gbs is not None
    assert 0 < machine.core.gradients_gbs <= machine.node.gbs
    assert machine.core.together >= 1


def test_ranks_that_hang_are_ended_and_reported(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="did not end within 0 s"):
        calibrate(tmp_path / "local.yaml", tmp_path, QUICK, limit=0.0)
    assert not (tmp_path / "local.yaml").exists()
