"""CUDA of driver, torch and nvcc, apex, and DeepSpeed's operators of fictional hosts."""

from dataclasses import replace
from pathlib import Path

import pytest

from megacore.doctor.compare import compare, gpus
from megacore.doctor.toolchain import (
    cuda_home,
    cuda_problem,
    look_at_toolchain,
    operators,
    release_of,
    toolchains,
)
from tests.doctor._made import NEEDS, expect, facts, gpu_host, probe

TOOLKITS = ["/usr/local/cuda-12.8", "/usr/local/cuda-13.0"]


@pytest.mark.parametrize(
    ("driver", "torch", "nvcc", "advice"),
    [
        ("13.0", "13.0", "13.0", None),
        ("13.2", "13.0", None, None),
        ("12.4", "12.8", "12.8", None),  # minor version compatibility
        (None, None, "13.0", None),  # a host without GPUs
        ("12.8", "13.0", "13.0", "TORCH='torch==2.10.*', or install a driver 580 or newer"),
        ("11.8", "12.8", None, "needs CUDA 12: install a driver 525 or newer"),
        ("13.0", None, None, "built without CUDA, and its driver runs CUDA 13.0: take make venv"),
        ("13.0", "13.0", "13.1", "nvcc is 13.1, and apex and DeepSpeed's operators are compiled"),
        ("13.0", "13.0", "13.1", "only with the same: set CUDA_HOME=/usr/local/cuda-13.0"),
        ("13.0", "12.6", "12.9", "install the CUDA toolkit 12.6 and set CUDA_HOME to it"),
        ("13.0", "13.0", "12.8", "take the torch of this nvcc (make venv TORCH='torch==2.10.*')"),
    ],
)
def test_advice_on_driver_torch_and_nvcc(
    driver: str | None, torch: str | None, nvcc: str | None, advice: str | None
) -> None:
    problem = cuda_problem("a", driver, torch, nvcc, TOOLKITS)
    assert problem is None if advice is None else advice in (problem or "")


def test_torch_of_an_nvcc_that_the_driver_cannot_run_is_not_recommended() -> None:
    problem = cuda_problem("a", "12.8", "12.8", "13.0", TOOLKITS)
    assert problem is not None
    assert problem.endswith("with the same: set CUDA_HOME=/usr/local/cuda-12.8")


def test_driver_older_than_torch_is_one_error_and_other_nvcc_a_warning() -> None:
    torch = {"cuda_build": "13.0", "cuda_works": False}
    old = facts(gpu_host("a", torch=torch, toolchain={"driver": "12.8"}))
    expect(toolchains(old), "error", ("a",), "take make venv TORCH='torch==2.10.*'")
    finding = gpus(old)
    assert finding is not None
    assert finding.verdict == "ok"
    other = facts(gpu_host("a", torch=torch, toolchain={"driver": "13.0", "nvcc": "12.8"}))
    expect(toolchains(other), "warning", ("a",), "nvcc is 12.8")
    expect(gpus(other), "error", ("a",), "torch does not run on them")


def test_missing_programs_and_wrong_apex_are_warnings() -> None:
    run = replace(NEEDS, deepspeed=True)
    bare = probe("a", toolchain={"compiler": None, "ninja": None, "other_apex": "0.9.10.dev0"})
    expect(
        toolchains(facts(bare, needs=run)),
        "warning",
        ("a",),
        "a has no C++ compiler",
        "a has no ninja",
        "apex 0.9.10.dev0 on a has none of NVIDIA's kernels",
    )
    stale = probe("a", toolchain={"apex": ["amp_C"], "other_apex": "0.1"})
    expect(toolchains(facts(stale)), "warning", ("a",), "amp_C on a cannot be imported")
    expect(toolchains(facts(probe("a"))), "ok", ())


def test_rocm_is_an_error_by_name() -> None:
    rocm = probe("a", toolchain={"accelerator": "torch is built for AMD's ROCm 6.4"}, torch="x")
    expect(toolchains(facts(rocm)), "error", ("a",), "ROCm 6.4")


def test_operators_are_listed_and_those_of_the_run_required() -> None:
    finding = operators(facts(probe("a")))
    expect(finding, "ok", ())
    assert finding is not None
    assert finding.found["a"] == (
        "built: cpu_adam (workspace); compatible: cpu_adam; not compatible: async_io (requires "
        "libaio's headers)"
    )
    run = replace(NEEDS, operators=("cpu_adam", "async_io"))
    expect(
        operators(facts(probe("a"), needs=run)),
        "error",
        ("a",),
        "operator async_io, which cannot be compiled on a (requires libaio's headers): apt-get",
    )


def test_compilers_are_found_as_torch_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    answer = look_at_toolchain()
    assert (answer["nvcc"], answer["compiler"], answer["libaio"]) == ("12.9", None, False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda_home() is None
    assert release_of("nonsense") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"random_reads": 40.0}, "makes 40 random reads/s, and training data needs 250"),
        ({"write": 20e6}, "is written at 20 MB/s, and checkpoints need 50"),
        ({"read": 20e6}, "is read at 20 MB/s"),
        ({"fsync": 0.25}, "takes 250 ms for an fsync"),
    ],
)
def test_slow_workspace_is_a_warning_with_its_use(change: dict[str, float], words: str) -> None:
    finding = next(
        item for item in compare(facts(probe("a", storage=change))) if item.check == "storage"
    )
    expect(finding, "warning", ("a",), f"/w on a (nfs4, server:/w) {words}", "own zone")


def test_checkpoint_of_the_run_decides_whether_writing_is_slow() -> None:
    run = replace(NEEDS, checkpoint=int(300e9))
    storage = {"write": 1e9}
    (one,) = [
        item
        for item in compare(facts(probe("a", storage=storage), needs=run))
        if item.check == "storage"
    ]
    expect(one, "warning", ("a",), "a checkpoint takes 300 s, more than 120")
    hosts = [probe(name, storage=storage) for name in "abc"]
    (three,) = [item for item in compare(facts(*hosts, needs=run)) if item.check == "storage"]
    expect(three, "ok", ())  # each host writes a third
