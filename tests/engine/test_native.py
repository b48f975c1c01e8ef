"""The native engine: mixed precision, skipped updates, and its state."""

import gc
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacore.config.run import RunConfig
from megacore.engine.base import Engine
from megacore.engine.build import build_engine
from megacore.engine.native import NativeEngine
from megacore.kernels import choice
from megacore.kernels.choice import plain_kernels
from megacore.kernels.implementation import Implementation
from megacore.models.base import POSITION_BUCKETS, LossTotals
from megacore.models.build import build_model
from megacore.models.stage import Stage
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.train.loss_check import LossCheck
from megacore.train.state import TrainState
from megacore.train.step import Stepper
from tests._loss import loss_of
from tests.train import _runs

NORM = "encoder.final_layernorm.weight"
TOKENS = torch.randint(
    0, _runs.VOCAB_SIZE, (4, 2, _runs.SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(1)
)


def build(precision: str, run: RunConfig | None = None) -> NativeEngine:
    run = run or _runs.config()
    return NativeEngine(
        Stage(run, _runs.VOCAB_SIZE, ProcessMesh.serial(), special_tokens=_runs.TOKENS),
        run,
        precision,
    )


def weight(engine: NativeEngine, name: str) -> Tensor:
    """Return a main weight to read or change."""
    tensor = engine.tensors()[f"model.{name}"]
    assert isinstance(tensor, Tensor)
    return tensor


def copies(engine: NativeEngine) -> dict[str, Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in engine.tensors().items()
        if isinstance(tensor, Tensor)
    }


def iterate(engine: Engine, lr: float = 1e-2) -> list[float]:
    engine.forward_backward(iter(TOKENS), range(len(TOKENS)))
    update = engine.update(lr, 0.1)
    return [update.loss, update.grad_norm, update.applied]


def step_with(kernels: Any) -> tuple[list[float], dict[str, str]]:
    """Return loss, gradient norm and second loss with `train.kernels`, and the kernels used."""
    engine = build_engine(
        _runs.config(train={"kernels": kernels}),
        _runs.VOCAB_SIZE,
        ProcessMesh.serial(),
        special_tokens=_runs.TOKENS,
        device=torch.device("cpu"),
        precision="fp32",
    )
    first = iterate(engine)
    return [*first[:2], iterate(engine)[0]], engine.kernels


def test_steps_with_plain_mixed_and_automatic_kernels_agree() -> None:
    plain, names = step_with("plain")
    mixed, mixed_names = step_with({"attention": "plain", "norm": "auto", "adamw": "plain"})
    automatic, automatic_names = step_with("auto")
    for losses in (mixed, automatic):
        assert losses[:2] == pytest.approx(plain[:2], rel=1e-5)
        # Adam's first update has the size lr also where a gradient is little more than rounding.
        assert losses[2] == pytest.approx(plain[2], rel=1e-3)
    for operation in ("attention", "packed_attention", "optimizer"):
        assert mixed_names[operation] == names[operation]
    for operation in ("layer_norm", "cross_entropy", "sum_of_squares"):
        assert mixed_names[operation] == automatic_names[operation]


def test_a_step_calls_the_configured_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = dict.fromkeys(("layer_norm", "rms_norm", "optimizer"), 0)

    def counting(operation: str) -> Implementation[Any]:
        plain = getattr(plain_kernels(), operation)

        def count(*arguments: Any) -> Any:
            calls[operation] += 1
            return plain(*arguments)

        return Implementation("cpp", "counting", lambda: count, lambda setting: None)

    for operation in calls:
        implementations = (counting(operation), choice._OPERATIONS[operation][-1])
        monkeypatch.setitem(choice._OPERATIONS, operation, implementations)
    step_with({"norm": "cpp", "adamw": "plain"})
    assert calls["layer_norm"] > 0
    assert calls["optimizer"] == 0
    calls["layer_norm"] = 0
    step_with({"norm": "plain", "adamw": "cpp"})
    assert calls["layer_norm"] == 0
    assert calls["optimizer"] > 0


def test_loss_and_gradient_norm_equal_those_of_the_mean_loss() -> None:
    engine = build("fp32")
    loss, norm, applied = iterate(engine, lr=0.0)
    model = build_model(_runs.config(), _runs.VOCAB_SIZE, ProcessMesh.serial())
    expected = loss_of(model, TOKENS.flatten(0, 1)[:, :-1], TOKENS.flatten(0, 1)[:, 1:]).mean()
    expected.backward()
    total = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters()))
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert norm == pytest.approx(total, rel=1e-5)
    assert applied


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.005)])
def test_the_loss_in_low_precision_follows_fp32(precision: str, tolerance: float) -> None:
    run = _runs.config(
        optim=_runs.config().optim.model_dump() | {"loss_scale": {"initial": 1024.0}}
    )
    exact, engine = build("fp32", run), build(precision, run)
    for _ in range(5):
        expected, loss = iterate(exact)[0], iterate(engine)[0]
    assert loss == pytest.approx(expected, rel=tolerance)
    assert all(tensor.dtype == torch.float32 for tensor in engine.tensors().values())
    assert {parameter.dtype for parameter in engine._stage.named_parameters.values()} == {
        torch.bfloat16 if precision == "bf16" else torch.float16
    }


def test_an_fp16_overflow_only_consumes_samples_and_lowers_the_scale() -> None:
    run = _runs.config(
        optim=_runs.config().optim.model_dump()
        | {"loss_scale": {"initial": 2.0**30, "hysteresis": 1}}
    )
    engine = build("fp16", run)
    before = copies(engine)
    state, mesh = TrainState(), ProcessMesh.serial()
    stepper = Stepper(
        run, engine, mesh, LossCheck(run, mesh, print), lambda indices: TOKENS[0].numpy(), print
    )
    update = stepper.step(iter(TOKENS.numpy()), state)
    assert not update.applied
    assert not update.fatal
    assert engine.loss_scale == 2.0**29
    assert (state.iteration, state.consumed_samples, state.applied_iterations) == (1, 8, 0)
    assert (state.interval.skipped_iterations, state.interval.nan_iterations) == (1, 0)
    for name, tensor in copies(engine).items():
        assert torch.equal(tensor, before[name])
    while not iterate(engine)[2]:
        assert engine.loss_scale > 1
    assert not torch.equal(weight(engine, NORM), before[f"model.{NORM}"])


@pytest.mark.parametrize(("precision", "fatal"), [("fp32", True), ("bf16", True), ("fp16", False)])
def test_only_fp16_can_recover_from_a_gradient_that_is_not_finite(
    precision: str, fatal: bool
) -> None:
    engine = build(precision)
    weight(engine, NORM)[0] = float("nan")
    engine._optimizer.write_back()
    engine.forward_backward(iter(TOKENS), range(len(TOKENS)))
    update = engine.update(1e-2, 0.1)
    assert (update.applied, update.fatal) == (False, fatal)


def test_fp16_gives_up_after_some_iterations_at_the_minimum_scale() -> None:
    scaling = {"initial": 2.0, "minimum": 1.0, "hysteresis": 1, "patience": 3}
    engine = build(
        "fp16", _runs.config(optim=_runs.config().optim.model_dump() | {"loss_scale": scaling})
    )
    weight(engine, NORM)[0] = float("nan")
    engine._optimizer.write_back()
    outcomes = []
    for _ in range(4):
        engine.forward_backward(iter(TOKENS), range(len(TOKENS)))
        update = engine.update(1e-2, 0.1)
        outcomes.append((engine.loss_scale, update.applied, update.fatal))
    assert outcomes == [
        (1.0, False, False),
        (1.0, False, False),
        (1.0, False, False),
        (1.0, False, True),
    ]


def test_evaluation_has_no_dropout_and_no_gradient() -> None:
    engine = build(
        "fp32", _runs.config(model=_runs.config().model.model_dump() | {"hidden_dropout": 0.5})
    )
    first, second = (
        engine.loss_sum(
            iter(TOKENS), [2, 2, 2, 2], LossTotals(len(engine.loss_names), None, engine.device)
        )
        for _ in range(2)
    )
    assert (first.shape, first.dtype) == ((1 + POSITION_BUCKETS, 2), torch.float64)
    assert first[0, 1] == TOKENS[..., 1:].numel()
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert all(chunk.training for chunk in engine._stage.chunks)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_restored_engine_continues_bit_identically(precision: str) -> None:
    run = _runs.config(
        optim=_runs.config().optim.model_dump() | {"loss_scale": {"initial": 256.0, "window": 3}}
    )
    uninterrupted = build(precision, run)
    for _ in range(2):
        iterate(uninterrupted)
    tensors, state = copies(uninterrupted), uninterrupted.state()
    expected = [iterate(uninterrupted) for _ in range(3)]
    resumed = build(precision, run)
    for name, tensor in resumed.tensors().items():
        assert isinstance(tensor, Tensor)
        tensor.copy_(tensors[name])
    resumed.load_state(state, resumed.tensors())
    assert [iterate(resumed) for _ in range(3)] == expected
    assert resumed.loss_scale == uninterrupted.loss_scale


REPLICAS = 32


def print_start_memory() -> None:
    """Print the parameters of a model, and memory (bytes) of a replica's start: peak and end."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

    dist.init_process_group("fake", rank=0, world_size=REPLICAS, store=FakeStore())
    config = _runs.config(
        model={"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8},
        parallel={"data_parallel_sharding": "parameters"},
    )
    mesh = ProcessMesh.build(RankLayout(data=REPLICAS))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far
    before = status("VmRSS")
    engine: Any = build_engine(
        config,
        _runs.VOCAB_SIZE,
        mesh,
        special_tokens=_runs.TOKENS,
        device=torch.device("cpu"),
        precision="bf16",
    )
    memory = status("VmHWM") - before, status("VmRSS") - before
    sys.stdout.write(" ".join(map(str, (engine._stage.parameter_count, *memory))))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("sharding", ["none", "gradients", "parameters"])
def test_an_engine_that_nobody_uses_frees_its_memory(sharding: str) -> None:
    engine = build("bf16", _runs.config(parallel={"data_parallel_sharding": sharding}))
    iterate(engine)
    tensors = [weakref.ref(sync.buckets[0].reduced) for sync in engine._syncs]
    tensors += [weakref.ref(value) for value in engine._stage.named_parameters.values()]
    del engine
    gc.collect()
    assert [tensor() for tensor in tensors if tensor() is not None] == []


def test_no_replica_holds_the_whole_model_in_fp32_at_its_start() -> None:
    code = f"from {__name__} import print_start_memory; print_start_memory()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    parameters, peak, end = map(int, run.stdout.split())
    bucket = 25 * 2**20  # fp32, as in `parallel.grad_reduce_bucket_mb`
    assert peak < end + bucket
    assert 4 * parameters > 3 * bucket
