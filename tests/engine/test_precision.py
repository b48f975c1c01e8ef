"""Resolution of the precision `auto`, and accelerators that are not supported."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacore import hardware
from megacore.errors import LaunchError
from megacore.hardware import (
    Hardware,
    cpu_multiplies_bf16,
    resolve_precision,
    torch_build,
)
from megacore.ranks.process import choose_device


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_explicit_precision_is_unchanged(precision: str, device: str) -> None:
    assert resolve_precision(precision, device) == precision


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(0, "fp32"), (70, "fp32"), (75, "fp32"), (80, "bf16"), (90, "bf16")],
)
def test_auto_is_bf16_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: int, expected: str
) -> None:
    monkeypatch.setattr(hardware, "cuda_capability", lambda: capability)
    assert resolve_precision("auto", "cuda") == expected


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("fpu avx2 avx512f avx512_vnni", False),
        ("fpu avx512f avx512_bf16", True),
        ("fpu amx_tile amx_bf16", True),
        ("", False),
    ],
)
def test_native_bf16_of_a_cpu_is_read_from_its_flags(
    tmp_path: Path, flags: str, native: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n", encoding="ascii")
    assert cpu_multiplies_bf16(cpuinfo) is native


def test_an_unknown_cpu_has_no_native_bf16(tmp_path: Path) -> None:
    assert cpu_multiplies_bf16(tmp_path / "absent") is False


def test_resolving_the_precision_imports_no_torch() -> None:
    code = (
        "import sys; from megacore.hardware import resolve_precision; "
        "resolve_precision('auto', 'cpu'); resolve_precision('auto', 'cuda'); sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_build_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert (torch_build()["cuda"], torch_build()["hip"]) == (torch.version.cuda, torch.version.hip)
    assert torch_build()["__version__"] == torch.__version__


@pytest.mark.parametrize("choose", [choose_device, Hardware.detect])
def test_rocm_and_mps_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, choose: Callable[[], object]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "torch_build", lambda: {"hip": "6.4.43482"})
        with pytest.raises(LaunchError, match=r"AMD's ROCm 6\.4\.43482, which megacore does not"):
            choose()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match="Apple's MPS, which megacore does not support"):
        choose()
