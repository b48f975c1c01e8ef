"""Shipped configurations of the engine deepspeed: their layouts work and their ranks fit."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

from megacore.config import RunConfig, load_config
from megacore.config.deepspeed import ZeroSettings, zero_of
from megacore.config.spec import ModelSpec
from megacore.hardware import Gpu, Hardware
from megacore.models.build import build_model
from megacore.models.parameters import parameter_count
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan.layouts import layout_of
from megacore.plan.memory import GIB, estimate_stages
from megacore.plan.preflight import preflight
from tests.config.test_load import CONF_DIR

VOCAB_SIZE = 50_257


class Deployment(NamedTuple):
    """Expected properties of a configuration."""

    parameters: float
    """Number of the model's parameters, within 2 %."""
    zero: ZeroSettings
    layout: RankLayout
    micro_batches: int
    card: int
    """Memory of each GPU in GiB."""
    room: float
    """Upper limit of the memory that a rank takes, in GiB."""


CONFS = {
    "gpt2-345m-zero1": Deployment(355e6, ZeroSettings(1), RankLayout(data=4), 1, 16, 5.5),
    "gpt2-345m-zero2": Deployment(355e6, ZeroSettings(2), RankLayout(data=4), 1, 16, 4.5),
    "gpt2-7b": Deployment(6.66e9, ZeroSettings(1), RankLayout(data=4), 1, 80, 64),
    "gpt2-xl-zero3-offload": Deployment(
        1.558e9, ZeroSettings(3, "cpu", "cpu"), RankLayout(), 1, 24, 9
    ),
    "gpt2-13b-3d": Deployment(
        13e9, ZeroSettings(1), RankLayout(data=2, pipeline=2, tensor=2), 128, 80, 46
    ),
}


@cache
def conf(name: str) -> RunConfig:
    return load_config(name, conf_dir=CONF_DIR)


@pytest.fixture(params=CONFS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_conf_with_deepspeed_has_a_deployment() -> None:
    names = {path.stem for path in CONF_DIR.glob("*.yaml") if conf(path.stem).engine == "deepspeed"}
    assert names == set(CONFS)


def test_the_model_has_the_expected_number_of_parameters(name: str) -> None:
    assert parameter_count(ModelSpec.of(conf(name), VOCAB_SIZE)) == pytest.approx(
        CONFS[name].parameters, rel=0.02
    )


def test_layout_and_batch_are_the_expected_ones(name: str) -> None:
    config, expected = conf(name), CONFS[name]
    ranks = config.launch.nproc_per_node
    assert isinstance(ranks, int)
    layout = layout_of(config, ranks, VOCAB_SIZE)
    assert (layout, zero_of(config)) == (expected.layout, expected.zero)
    batch = config.train.micro_batch_size * layout.data * expected.micro_batches
    assert batch == config.train.global_batch_size


def test_every_stage_builds_on_the_meta_device(name: str) -> None:
    config, layout = conf(name), CONFS[name].layout
    # the mesh of the last rank of a tensor-parallel group
    mesh = replace(
        ProcessMesh.serial(),
        layout=layout,
        tensor_parallel=ParallelGroup(None, layout.tensor - 1, layout.tensor, "tensor"),
    )
    chunks = chunks_of(config, VOCAB_SIZE)
    precision = config.train.precision
    estimates = estimate_stages(config, VOCAB_SIZE, precision, "cuda", layout.data)
    assert len(chunks) == len(estimates) == layout.pipeline
    for chunk, estimate in zip(chunks, estimates, strict=True):
        model = build_model(config, VOCAB_SIZE, mesh, device="meta", chunk=chunk)
        parameters = list(model.parameters())
        assert {parameter.device.type for parameter in parameters} == {"meta"}
        assert sum(parameter.numel() for parameter in parameters) == estimate.parameters


def test_a_rank_fits_its_gpu(name: str) -> None:
    config, expected = conf(name), CONFS[name]
    hardware = Hardware(
        64,
        256 * GIB,
        (Gpu("a card", expected.card * GIB),) * expected.layout.world_size,
        native_bf16=True,
    )
    report = preflight(config, VOCAB_SIZE, hardware)
    assert 0.85 * expected.room * GIB < report.memory.total <= expected.room * GIB
    assert report.memory.total < 0.9 * expected.card * GIB
    assert report.precision == config.train.precision


def test_gpt2_xl_needs_the_host_memory_that_its_file_states() -> None:
    (estimate,) = estimate_stages(conf("gpt2-xl-zero3-offload"), VOCAB_SIZE, "fp16", "cuda", 1)
    assert estimate.host / GIB == pytest.approx(32, abs=0.5)
    assert "of which it needs 32 GiB" in (CONF_DIR / "gpt2-xl-zero3-offload.yaml").read_text(
        encoding="utf-8"
    )


def test_zero1_and_zero2_differ_only_in_the_deepspeed_section() -> None:
    one, two = conf("gpt2-345m-zero1"), conf("gpt2-345m-zero2")
    for section in ("data", "model", "optim", "train", "checkpoint", "parallel", "launch", "seed"):
        assert getattr(one, section) == getattr(two, section)
