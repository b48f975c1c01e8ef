"""Kernels that Inductor generates for the layers and the loss, compiled for A100 and H100."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.gpu_emulated.step import Case, Record
from tests.gpu_emulated.test_step import COMPILED, MASKED, run_cases

pytest.importorskip(
    "triton", reason="a CPU build of torch comes without triton: .ci/run installs it"
)

_EXPECTED = {
    "bert-345m": ("native_layer_norm", "dropout", "gelu", "gelu_backward", "exp"),
    "gpt2-345m": ("native_layer_norm", "dropout", "gelu", "gelu_backward", "exp"),
    "llama-1b": ("fused_rms_norm", "silu", "silu_backward", "cat_mul_neg", "exp"),
    "t5-220m": ("fused_rms_norm", "relu", "threshold_backward", "exp"),
}
"""Operations that are part of some kernel; exp is the cross entropy's."""
CASES = {
    f"{name}, sm_{capability}": Case(
        case.conf,
        case.rank,
        case.world_size,
        {key: value for key, value in case.overrides.items() if "cross_entropy" not in key},
        case.vocab_size,
        iterations_only=True,
        capability=capability,
    )
    for name, case in COMPILED.items()
    for capability in ((80, 90) if case.conf == "llama-1b" else (90,))
}

_MASKS = {
    f"{name}, sm_90": replace(
        MASKED[name],
        overrides={
            key: value
            for key, value in MASKED[name].overrides.items()
            if "cross_entropy" not in key
        },
        compiled=False,
        capability=90,
    )
    for name in ("soft caps and windows, masked", "alibi, masked")
}


LONG = {"bert-345m compiled, sm_90", "alibi, masked, sm_90"}
"""Cases with the kernels of others, which `make test-long` runs."""


def marked(names: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.slow)
        for name in names
    ]


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest) -> dict[str, Record]:
    """Return the record of each case whose test runs in this session."""
    names = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    }
    return run_cases({name: case for name, case in (CASES | _MASKS).items() if name in names})


@pytest.mark.parametrize("name", marked(CASES))
def test_kernels_of_layers_and_loss_compile_to_machine_code(
    records: dict[str, Record], name: str
) -> None:
    record = records[name]
    assert record.failures == []
    assert record.kernels["cross_entropy"] == "torch.compile, gradient in place"
    assert min(record.binaries.values()) > 0
    for operation in _EXPECTED[CASES[name].conf]:
        assert any(operation in kernel for kernel in record.binaries), (operation, record.binaries)


@pytest.mark.parametrize("name", marked(_MASKS))
def test_kernels_of_masks_compile_to_machine_code(records: dict[str, Record], name: str) -> None:
    record = records[name]
    assert record.failures == []
    kernels = [kernel for kernel in record.binaries if "tem_fused_flex_attention" in kernel]
    assert any("backward" in kernel for kernel in kernels)
    assert any("backward" not in kernel for kernel in kernels)
    assert min(record.binaries.values()) > 0
