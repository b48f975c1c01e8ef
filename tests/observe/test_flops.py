"""Tests of the operation counts against the paper's formula and of the table of peaks."""

from typing import Literal

import pytest
import torch

from megacore.observe.flops import (
    Peaks,
    TransformerShape,
    peak_by_name,
    step_flops,
)
from tests._tiny import tiny_config

SHAPE = TransformerShape(
    num_layers=24, hidden_size=1024, ffn_size=4096, seq_length=1024, vocab_size=50304
)


def test_step_flops_with_full_recomputation_equal_narayanan_et_al() -> None:
    batch, s, layers, h, v = 8, 1024, 24, 1024, 50304
    paper = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert step_flops(SHAPE, 8, "full") == pytest.approx(paper, rel=1e-12)


def test_no_recomputation_saves_a_quarter_of_the_layers_operations() -> None:
    batch, s, layers, h, v = 8, 1024, 24, 1024, 50304
    model = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert step_flops(SHAPE, 8, "none") == pytest.approx(model, rel=1e-12)


def test_a_narrower_mlp_has_fewer_operations() -> None:
    narrow = TransformerShape(24, 1024, 1024, 1024, 50304)
    saved = 3 * 24 * 4 * 1024 * 1024 * 3072
    assert step_flops(SHAPE, 1, "none") - step_flops(narrow, 1, "none") == saved


def test_grouped_queries_save_operations_of_shared_keys_and_values() -> None:
    grouped = TransformerShape(24, 1024, 4096, 1024, 50304, key_value_size=256)
    saved = 3 * 24 * 2 * (2 * 1024 * 1024 * (1024 - 256))
    assert step_flops(SHAPE, 1, "none") - step_flops(grouped, 1, "none") == saved
    assert TransformerShape(24, 1024, 4096, 1024, 50304, 1024).layer_forward == SHAPE.layer_forward


def test_selective_recomputation_adds_one_attention_forward_pass() -> None:
    scores_and_context = 2 * 2 * 1024 * 1024 * 1024
    assert (
        step_flops(SHAPE, 5, "selective") - step_flops(SHAPE, 5, "none")
        == 5 * 24 * scores_and_context
    )


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_operations_grow_with_the_number_of_recomputed_layers(
    recompute: Literal["selective", "full"],
) -> None:
    no_layer, all_layers = step_flops(SHAPE, 2, "none"), step_flops(SHAPE, 2, recompute)
    assert step_flops(SHAPE, 2, recompute, 6) - no_layer == (all_layers - no_layer) // 4
    assert step_flops(SHAPE, 2, recompute, 0) == no_layer


def test_shape_is_read_from_a_configuration() -> None:
    config = tiny_config(num_query_groups=2)
    assert TransformerShape.of(config, 64) == TransformerShape(
        2, 32, 128, 16, 64, key_value_size=16
    )


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("Tesla V100S-PCIE-32GB", "fp32", 16.4),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla T4", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA GB300", "bf16", 2500.0),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA H20-3e", "fp32", 44.0),
        ("NVIDIA H800 PCIe", "bf16", 756.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16", None),
        ("NVIDIA A100-SXM-64GB", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "bf16", None),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L40", "bf16", 181.0),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA GeForce RTX 4090 D", "fp16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp16", None),
        ("NVIDIA GeForce RTX 4080 SUPER", "bf16", None),
        ("NVIDIA GeForce RTX 3090", "bf16", 71.2),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80.0),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "fp32", 91.1),
        ("Quadro RTX 6000", "fp16", None),
        ("NVIDIA GeForce GTX 1080", "fp16", None),
    ],
)
def test_peak_is_found_by_device_name(name: str, precision: str, peak: float | None) -> None:
    assert peak_by_name(name, precision) == peak


@pytest.mark.parametrize(
    ("name", "precision", "multiprocessors", "peak"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "bf16", 60, 989.4 * 60 / 132),
        ("NVIDIA H100 PCIe MIG 1g.10gb", "bf16", 16, 756.5 * 16 / 114),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "fp32", 14, 19.5 * 14 / 108),
        ("NVIDIA GB200 MIG 1g.23gb", "bf16", 18, None),
        ("NVIDIA A100-SXM4-40GB", "bf16", 108, 312.0),
        ("NVIDIA A100-SXM4-40GB", "tf32", 108, 156.0),
        ("Tesla T4", "tf32", 40, None),
    ],
)
def test_a_slice_has_the_share_of_its_multiprocessors(
    name: str, precision: str, multiprocessors: int, peak: float | None
) -> None:
    assert peak_by_name(name, precision, multiprocessors) == (peak and pytest.approx(peak))


def test_mfu_of_a_cpu_is_relative_only_to_its_measured_rate() -> None:
    peaks = Peaks.of(torch.device("cpu"), "fp32", 0.5)
    assert peaks.vendor is None
    assert peaks.description == (
        f"MFU is relative to {peaks.measured:.3g} TFLOP/s, measured in matrix products: no "
        "vendor's peak of a CPU is known"
    )


def test_both_rates_of_a_gpu_are_named() -> None:
    assert Peaks(712.34, 989.4, "NVIDIA H100 80GB HBM3").description == (
        "MFU is relative to 989.4 TFLOP/s, the vendor's peak of NVIDIA H100 80GB HBM3, and to 712 "
        "TFLOP/s, measured in matrix products"
    )
