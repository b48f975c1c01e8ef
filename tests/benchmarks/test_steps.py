"""Contestants of the benchmark of training steps, which train the same model.

Their losses agree step by step, so their times can be compared.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks._entrants import CASES, ENTRANTS, Entrant, Work
from benchmarks._nanogpt import NanoGpt
from benchmarks._step_rank import is_memory_exhausted
from benchmarks._steps import (
    batches,
    fsdp2_step,
    initial_weights,
    megacore_step,
    nanogpt_step,
    transformers_step,
)
from benchmarks._turns import environment
from benchmarks.step import GOALS, LINE_UP, ROUNDS

CPU = torch.device("cpu")
STEPS = 4


def losses(kind: str, precision: str = "fp32", model: str = "smoke") -> list[float]:
    work = Work(CASES[f"{model}-{precision}"], Entrant(kind), threads=1)  # type: ignore[arg-type]
    if kind == "megacore":
        step, kernels = megacore_step(work, CPU)
        assert kernels
    else:
        peers = {"nanogpt": nanogpt_step, "transformers": transformers_step, "fsdp2": fsdp2_step}
        step = peers[kind](work, CPU)
    return [float(step()) for _ in range(STEPS)]


@pytest.fixture
def no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize("model", ["smoke", "smoke-llama"])
def test_losses_of_sharded_models_agree_too(model: str) -> None:
    ours = losses("megacore", "bf16", model)
    assert ours[1:] != [ours[0]] * (STEPS - 1)
    assert losses("fsdp2", "bf16", model) == pytest.approx(ours, abs=5e-3)


@pytest.mark.parametrize(("precision", "bar"), [("fp32", 2e-5), ("bf16", 5e-3)])
def test_losses_agree_step_by_step(precision: str, bar: float) -> None:
    ours = losses("megacore", precision)
    assert ours[0] == pytest.approx(math.log(512), abs=0.2)
    assert ours[1:] != [ours[0]] * (STEPS - 1)
    for kind in ("nanogpt", "transformers"):
        assert losses(kind, precision) == pytest.approx(ours, abs=bar), kind


@pytest.mark.parametrize("hidden", [64, 1024])
def test_the_first_loss_depends_on_the_width(hidden: int) -> None:
    """A benchmark with a model as wide as 345M would otherwise refuse its own contestants."""
    case = replace(CASES["smoke-fp32"], layers=1, hidden=hidden, micro_batch_size=8)
    loss = float(nanogpt_step(Work(case, Entrant("nanogpt"), threads=1), CPU)())
    assert loss == pytest.approx(case.first_loss, abs=0.1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_a_full_gpu_is_recognised(error: RuntimeError, expected: bool) -> None:
    assert is_memory_exhausted(error) is expected


def test_the_steps_change_the_weights() -> None:
    """Losses without updates differ, so the agreement covers more than one forward pass."""
    case = CASES["smoke-fp32"]
    model = NanoGpt(case)
    weights = initial_weights(case)
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {
        name: value.t() if name.endswith(transposed) else value for name, value in weights.items()
    }
    model.load_state_dict(state | {"lm_head.weight": weights["transformer.wte.weight"]})
    frozen = [
        float(model(batch[:, :-1], batch[:, 1:])[1].detach())
        for batch in batches(case, CPU)[:STEPS]
    ]
    ours = losses("megacore")
    assert frozen[0] == pytest.approx(ours[0], abs=1e-5)
    assert abs(frozen[-1] - ours[-1]) > 1e-3


def test_batches_are_reproducible_and_have_a_pattern() -> None:
    case = replace(CASES["tiny-fp32"], micro_batch_size=2)
    first, again = batches(case, CPU)[0], batches(case, CPU)[0]
    assert torch.equal(first, again)
    assert first.shape == (2, case.seq_length + 1)
    strides = (first[:, 1:] - first[:, :-1]) % case.vocab_size
    mode = strides.mode(dim=1).values
    assert ((strides == mode[:, None]).float().mean(dim=1) > 0.6).all()


def test_only_a_tuned_environment_has_the_launchers_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert "MALLOC_TRIM_THRESHOLD_" not in environment(2, tuned_malloc=False)
    tuned = environment(2)
    assert int(tuned["MALLOC_TRIM_THRESHOLD_"]) > 1
    assert environment(2, tuned_malloc=False)["OMP_NUM_THREADS"] == tuned["OMP_NUM_THREADS"] == "2"


def test_every_case_has_a_line_up_with_the_entrants_of_its_goals() -> None:
    assert GOALS.keys() == LINE_UP.keys()
    for case, names in LINE_UP.items():
        assert set(names) <= ENTRANTS.keys()
        assert set(GOALS[case]) <= set(names)
        assert case.partition("-")[0] in ROUNDS
    assert GOALS["tiny-bf16"] == {"nanoGPT compiled, fused AdamW, tuned malloc": 1.7}


def test_a_work_survives_a_round_trip_through_json() -> None:
    work = Work(
        CASES["tiny-bf16"], ENTRANTS["nanoGPT compiled"], threads=3, train={"recompute": "full"}
    )
    assert Work.of_json(work.as_json()) == work
    assert replace(work, reference=True).precision == "fp32"
    assert work.config().train.recompute == "full"
