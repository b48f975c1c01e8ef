"""Operation counts against the paper's formula, peaks against the table."""

import pytest

from megacore.observe.flops import TransformerShape, measured_matmul_tflops, peak_by_name, step_flops

SHAPE = TransformerShape(num_layers=24, hidden_size=1024, ffn_size=4096, seq_length=1024, vocab_size=50304)


def test_with_recomputation_it_is_the_formula_of_narayanan_et_al() -> None:
    batch, s, layers, h, v = 8, 1024, 24, 1024, 50304
    paper = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert step_flops(SHAPE, 8, "full") == pytest.approx(paper, rel=1e-12)


def test_without_recomputation_a_quarter_of_the_layers_work_is_saved() -> None:
    batch, s, layers, h, v = 8, 1024, 24, 1024, 50304
    model = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert step_flops(SHAPE, 8, "none") == pytest.approx(model, rel=1e-12)


def test_a_narrow_mlp_counts_less() -> None:
    narrow = TransformerShape(24, 1024, 1024, 1024, 50304)
    saved = 3 * 24 * 4 * 1024 * 1024 * 3072
    assert step_flops(SHAPE, 1, "none") - step_flops(narrow, 1, "none") == saved


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA GeForce GTX 1080", "fp16", None),
    ],
)
def test_peaks_by_device_name(name: str, precision: str, peak: float | None) -> None:
    assert peak_by_name(name, precision) == peak


def test_a_cpu_is_measured() -> None:
    assert 1e-4 < measured_matmul_tflops("fp32", seconds=0.02) < 100.0
