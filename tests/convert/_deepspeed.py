"""Checkpoints of a tiny model that DeepSpeed writes on two ranks, and the state they contain."""

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.checkpoint.save import save_checkpoint
from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.engine.build import build_engine
from megacore.engine.deepspeed.join import import_deepspeed
from megacore.models.build import build_model
from megacore.models.inputs import input_rules
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import shared_stages
from tests._dist import still_alive
from tests._tiny import tiny_config

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
VOCAB_SIZE = 61
"""Padded to 64.

Tensors that two ranks share have odd sizes, so that they need padding.
"""
CASES = {
    "zero0": (0, None),
    "zero0-bf16": (0, "bf16"),
    "zero1": (1, None),
    "zero1-bf16": (1, "bf16"),
    "zero2": (2, None),
    "zero2-bf16": (2, "bf16"),
    "zero3": (3, None),
    "zero3-bf16": (3, "bf16"),
}
"""ZeRO stage and half precision of each checkpoint."""
UNIVERSAL = ("zero1-bf16", "zero3")
"""Cases that DeepSpeed's converter also turns into universal checkpoints."""
STEPS = 2
TAG = f"global_step{STEPS}"


def spec_and_config() -> tuple[ModelSpec, RunConfig]:
    """Return three layers of width 20 and 27, whose uneven sizes make ZeRO pad."""
    config = tiny_config(num_layers=3, hidden_size=20, ffn_hidden_size=27)
    return ModelSpec.of(config, VOCAB_SIZE), config


class Wrapper(nn.Module):
    """The model in DeepSpeed's form: called with a batch, it returns the loss."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.model = build_model(config, VOCAB_SIZE, ProcessMesh.serial())
        self._rules = input_rules(config, SpecialTokens())

    def forward(self, batch: Tensor) -> Tensor:
        losses: Any = self.model.run(self._rules.read(batch), dropout_seed=None)
        return torch.stack([losses[name].mean() for name in self.model.loss_names]).sum()


@dataclass(frozen=True)
class EngineState:
    """State of an engine in whole tensors, reported by DeepSpeed."""

    weights: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]


def write_all(root: str) -> dict[str, EngineState]:
    """Write one checkpoint per case below `root` on all ranks, and return their states."""
    states = {name: _write(Path(root) / name, *case) for name, case in CASES.items()}
    for name in UNIVERSAL:
        if dist.get_rank() == 0:
            _make_universal(Path(root) / name / TAG, Path(root) / name / f"{TAG}_universal")
        still_alive()
    dist.barrier()
    return states


def _write(directory: Path, stage: int, half: str | None) -> EngineState:
    deepspeed = import_deepspeed()
    still_alive()
    _, config = spec_and_config()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 1000,
        },
        "zero_allow_untested_optimizer": True,
        **({half: {"enabled": True}} if half else {}),
    }
    model = Wrapper(config)
    optimizer = torch.optim.AdamW(_groups(model, named=(stage, half) == (0, None)), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        loss = engine(torch.randint(0, VOCAB_SIZE, (2, 17), generator=generator))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(
        str(directory), tag=TAG, client_state={"universal_checkpoint_info": {}, "iteration": STEPS}
    )
    state = _state(engine, stage)
    dist.barrier()
    return state


def _groups(model: nn.Module, *, named: bool) -> list[dict[str, Any]]:
    """Return parameters with and without decay; `named` puts names into the optimizer's state."""
    matrices: list[Any] = []
    vectors: list[Any] = []
    for name, value in model.named_parameters():
        (matrices if value.dim() > 1 else vectors).append((name, value) if named else value)
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def _make_universal(source: Path, target: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    folders = {"input_folder": str(source), "output_folder": str(target)}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    main(
        argparse.Namespace(
            **folders, **workers, keep_temp_folder=False, strict=True, inject_missing_state=False
        )
    )


def _state(engine: Any, stage: int) -> EngineState:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    named = dict(engine.module.model.named_parameters())
    if stage == 0:
        return _state_without_zero(engine, named)
    if stage < 3:
        # DeepSpeed links the moments of all groups after the step of the first group, when the
        # others have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    state = EngineState({}, {}, {})
    for name, parameter in named.items():
        state.weights[name] = safe_get_full_fp32_param(parameter).detach().clone()
        state.exp_avg[name] = safe_get_full_optimizer_state(parameter, "exp_avg").detach().clone()
        state.exp_avg_sq[name] = (
            safe_get_full_optimizer_state(parameter, "exp_avg_sq").detach().clone()
        )
    return state


def _state_without_zero(engine: Any, named: dict[str, nn.Parameter]) -> EngineState:
    """Return the state that the optimizer itself steps.

    Without ZeRO there are no fragments, so that DeepSpeed's accessors return nothing.
    """
    optimizer = engine.optimizer
    masters: dict[nn.Parameter, Tensor] = {value: value for value in named.values()}
    if hasattr(optimizer, "fp32_groups"):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        masters = {
            half: full for ours, theirs in pairs for half, full in zip(ours, theirs, strict=True)
        }
    state = getattr(optimizer, "optimizer", optimizer).state
    result = EngineState({}, {}, {})
    for name, parameter in named.items():
        master = masters[parameter]
        result.weights[name] = master.detach().clone()
        result.exp_avg[name] = state[master]["exp_avg"].detach().clone()
        result.exp_avg_sq[name] = state[master]["exp_avg_sq"].detach().clone()
    return result


LAYOUTS = {
    "tensor": (RankLayout(tensor=2), 1, "fp32"),
    "pipeline": (RankLayout(pipeline=2), 1, "fp32"),
    "pipeline-bf16": (RankLayout(pipeline=2), 1, "bf16"),
    "pipeline-zero0": (RankLayout(pipeline=2), 0, "fp32"),
}
"""Layout, ZeRO stage and precision of megacore's engines that DeepSpeed saves in its own form."""


def write_divided(root: str) -> dict[str, str]:
    """Write one checkpoint per layout below `root`, and the same state in megacore's form."""
    return {name: _write_divided(Path(root) / name, *case) for name, case in LAYOUTS.items()}


def _write_divided(directory: Path, layout: RankLayout, zero_stage: int, precision: str) -> str:
    still_alive()
    values = tiny_config(train={"global_batch_size": 4}).model_dump(mode="json")
    values |= {"engine": "deepspeed", "deepspeed": {"zero_stage": zero_stage}}
    values["parallel"] = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
    }
    config = parse_config(values, origin="tests")
    stages = shared_stages(config, VOCAB_SIZE) if layout.pipeline > 1 else ()
    engine: Any = build_engine(
        config,
        VOCAB_SIZE,
        ProcessMesh.build(layout, shared_stages=stages),
        special_tokens=SpecialTokens(),
        device=torch.device("cpu"),
        precision=precision,
    )
    generator = torch.Generator().manual_seed(1)
    engine.forward_backward(
        iter([torch.randint(0, VOCAB_SIZE, (2, 17), generator=generator) for _ in range(2)]), [1, 2]
    )
    engine.update(1e-2, 0.1)
    engine._engine.save_checkpoint(str(directory), tag="global_step1")
    state = {"model": ModelSpec.of(config, VOCAB_SIZE).model_dump(mode="json")}
    return str(save_checkpoint(directory / "global_step1" / "ours", 1, engine.tensors(), state))
