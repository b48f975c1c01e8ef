"""DeepSpeed's operators: those a run needs, the shared build, and ranks that only load them."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacore.config.run import RunConfig
from megacore.engine.deepspeed import operators as deepspeed_ops
from megacore.engine.deepspeed.operators import (
    load_operators,
    needed_operators,
    operator_is_built,
    require_deepspeed,
)
from megacore.errors import ConfigError, LaunchError
from megacore.ranks.operators import REPORT, prepare_operators
from tests._limits import HANG
from tests.train import _runs

pytest.importorskip("deepspeed")


def offloading(cpu_adam: str = "auto", **values: Any) -> RunConfig:
    section = {"zero_stage": 2, "offload_optimizer": "cpu", "cpu_adam": cpu_adam, **values}
    return RunConfig.model_validate(
        _runs.config().model_dump() | {"engine": "deepspeed", "deepspeed": section}
    )


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path / "workspace"))
    monkeypatch.delenv(deepspeed_ops.REPORT_VARIABLE, raising=False)
    return tmp_path / "run.json"


def prepare(config: RunConfig, job_file: Path) -> dict[str, str]:
    job = _runs.job(config, job_file.parent, job_file.parent)
    job.write(job_file)
    return prepare_operators(job, job_file, job_file.with_name("log"), lambda: None)


def fake_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    compiler = directory / "fake-c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def test_a_run_needs_only_the_operators_it_uses(tmp_path: Path) -> None:
    nvme = {
        "zero_stage": 3,
        "offload_optimizer": "nvme",
        "offload_param": "nvme",
        "nvme_path": str(tmp_path),
    }
    assert needed_operators(_runs.config()) == ()
    assert needed_operators(offloading(offload_optimizer="none")) == ()
    assert needed_operators(offloading()) == ("cpu_adam",)
    assert needed_operators(offloading("torch")) == ()
    assert needed_operators(offloading(**nvme)) == ("cpu_adam", "async_io")
    assert needed_operators(offloading("torch", **nvme)) == ("async_io",)


def test_a_rank_does_not_compile_operators(
    job_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_operators(offloading()) == frozenset()
    (message,) = caplog.messages
    assert message.startswith(
        "torch's Adam updates what is offloaded to the CPU, for DeepSpeed's operator cpu_adam is "
        "not"
    )
    assert "python -m megacore.ranks.operators --config run.json" in message
    with pytest.raises(
        LaunchError, match=r"cpu_adam is not built in .*, and ranks do not compile: build it with"
    ):
        load_operators(offloading("deepspeed"))
    assert list((job_file.parent / "workspace").rglob("*.so")) == []


@pytest.mark.slow
def test_a_failed_build_is_reported_with_the_compilers_message(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(
        job_file.parent, monkeypatch, 'echo "cpu_adam.cpp:1: out of registers" >&2; exit 1'
    )
    with pytest.raises(
        LaunchError, match=r"^DeepSpeed's operator cpu_adam cannot be compiled: .*out of registers"
    ):
        prepare(offloading("deepspeed"), job_file)
    variables = prepare(offloading(), job_file)
    assert variables == {deepspeed_ops.REPORT_VARIABLE: str(job_file.with_name(REPORT))}
    monkeypatch.setenv(*next(iter(variables.items())))
    caplog.clear()
    assert load_operators(offloading()) == frozenset()
    assert "out of registers" in caplog.text, (
        "the rank's warning must contain the compiler's message"
    )


@pytest.mark.slow
def test_a_hanging_compiler_is_ended_at_the_time_limit(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = job_file.with_name("compiler.pid")
    fake_compiler(
        job_file.parent,
        monkeypatch,
        f'case "$*" in *cpu_adam*) echo $$ > {started}; sleep 600;; esac',
    )
    for seconds in (20.0, 120.0):  # on a busy machine the compiler may start after the first limit
        limit = (
            rf"cpu_adam was not compiled within deepspeed\.build_timeout = {seconds:g} seconds: "
        )
        with pytest.raises(LaunchError, match=f"{limit}raise it"):
            prepare(offloading("deepspeed", build_timeout=seconds), job_file)
        if started.exists():
            break
    assert started.exists(), "the compiler must have started"
    assert not Path("/proc", started.read_text().strip()).exists()


def test_missing_programs_are_refused_by_name(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        LaunchError,
        match=r"no-such-compiler is not installed: apt-get install g\+\+, or set deepspeed\.",
    ):
        deepspeed_ops.build_operator("cpu_adam")
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "ninja" else program)
    with pytest.raises(LaunchError, match=r"ninja is not installed: pip install ninja"):
        deepspeed_ops.build_operator("cpu_adam")


def test_missing_headers_are_refused_by_name(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    with pytest.raises(
        LaunchError,
        match=r"async_io cannot be compiled: libaio's headers are missing: apt-get install",
    ):
        deepspeed_ops.build_operator("async_io")
    assert not operator_is_built("async_io")


def test_a_missing_toolkit_is_named_on_a_gpu(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils import cpp_extension

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(
        LaunchError,
        match=r"async_io cannot be compiled: the CUDA toolkit is missing: install that of CUDA "
        r"13\.0 and set CUDA_HOME to it, or offload to cpu$",
    ):
        deepspeed_ops.build_operator("async_io")


LOADED = """
import os
from megacore.config.run import RunConfig
from megacore.engine.deepspeed.operators import load_operators
from tests.engine.test_deepspeed_ops import offloading
os.environ["PATH"] = ""  # no compiler, no ninja
assert load_operators(offloading("deepspeed")) == {"cpu_adam"}
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
weights = [torch.nn.Parameter(torch.arange(100.0)) for _ in range(2)]
ours = DeepSpeedCPUAdam([weights[0]], lr=0.1, weight_decay=0.01)
reference = torch.optim.AdamW([weights[1]], lr=0.1, weight_decay=0.01)
for weight, optimizer in zip(weights, (ours, reference)):
    weight.grad = torch.linspace(-1, 1, 100)
    optimizer.step()
torch.testing.assert_close(*weights)
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_one_build_serves_every_rank(
    tmp_path: Path, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(
        tmp_path, monkeypatch, 'exec c++ "$@" -O0 -g0'
    )  # a real compiler without optimization, to save time
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    _runs.job(offloading("deepspeed"), tmp_path, tmp_path).write(job_file)
    build = [sys.executable, "-m", "megacore.ranks.operators", "--config", str(job_file)]
    # Two runs need it at once. A killed run has left torch's lock file, which must block nobody.
    key = deepspeed_ops._key("cpu_adam").key
    stale = tmp_path / "workspace" / "extensions" / f"{key}.tmp-1" / "cpu_adam" / "lock"
    stale.parent.mkdir(parents=True)
    stale.touch()
    builders = [
        subprocess.Popen(
            build, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        outputs = [builder.communicate(timeout=HANG)[0] for builder in builders]
    finally:
        for builder in builders:
            builder.kill()
    assert [builder.returncode for builder in builders] == [0, 0], outputs
    # One of them says that it waits, or starts when the other has ended and compiles nothing.
    places = {output.splitlines()[-1] for output in outputs}
    assert len(places) == 1, "both builders must print the same directory"
    assert sum(output.startswith("compiling") for output in outputs) >= 1
    assert operator_is_built("cpu_adam")
    libraries = [
        path.name
        for path in (tmp_path / "workspace" / "extensions").rglob("*")
        if path.suffix == ".so"
    ]
    assert libraries == ["cpu_adam.so"]
    assert not stale.exists()
    assert prepare(offloading("deepspeed"), job_file), "a second preparation must not build again"
    assert not job_file.with_name("log").exists()
    subprocess.run([sys.executable, "-c", LOADED], env=environment, timeout=HANG, check=True)


def test_a_missing_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_deepspeed(offloading())
    monkeypatch.setattr(deepspeed_ops.importlib.util, "find_spec", lambda name: None)
    require_deepspeed(_runs.config())
    with pytest.raises(
        ConfigError,
        match=r"engine is deepspeed, which is not installed: pip install megacore\[deepspeed\]",
    ):
        require_deepspeed(offloading())
    with pytest.raises(
        ConfigError, match=r"launch\.kind is deepspeed.*or set launch\.kind to torchrun"
    ):
        require_deepspeed(_runs.config(launch={"kind": "deepspeed"}))
