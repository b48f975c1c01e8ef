"""Versions of CUDA that `scripts/install_apex.sh` compares before it compiles."""

import os
import subprocess
from pathlib import Path

import pytest

from tests._limits import HANG

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/usr/bin/env bash
case "$*" in
    *version.cuda*) echo "13.0" ;;
    *version.hip*) echo "$HIP" ;;
    *CUDA_HOME*) echo "$CUDA_HOME" ;;
esac
"""


def refusal(directory: Path, nvcc: str, **variables: str) -> str:
    """Return the message about an nvcc of this version and a torch for CUDA 13.0."""
    for name, script in (
        ("bin/python", PYTHON),
        ("bin/nvcc", f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V{nvcc}.1'\n"),
        ("include/cuda_runtime.h", ""),
    ):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(script, encoding="utf-8")
        (directory / name).chmod(0o755)
    result = subprocess.run(
        [ROOT / "scripts" / "install_apex.sh"],
        env={
            "PATH": os.environ["PATH"],
            "PYTHON": str(directory / "bin/python"),
            "CUDA_HOME": str(directory),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize("nvcc", ["13.1", "12.8"])
def test_another_minor_version_is_refused_before_apex_refuses_it(tmp_path: Path, nvcc: str) -> None:
    message = refusal(tmp_path, nvcc)
    assert f"torch is built for CUDA 13.0 and {tmp_path}/bin/nvcc is CUDA {nvcc}" in message


def test_missing_headers_and_rocm_are_refused(tmp_path: Path) -> None:
    assert "has no include/cublas_v2.h or cusparse.h" in refusal(tmp_path, "13.0")
    assert "built for AMD's ROCm 6.4" in refusal(tmp_path, "13.0", HIP="6.4")
