"""Every variant that `benchmarks.zero` compares has a valid configuration."""

import pytest

from benchmarks._zero_variants import VARIANTS, Work

OWN = [name for name, variant in VARIANTS.items() if variant.own]
NATIVE = [name for name in OWN if VARIANTS[name].engine == "native"]


@pytest.mark.parametrize("name", OWN)
def test_variants_are_valid_configurations(name: str) -> None:
    config = Work(name, "tiny", "fp32", "cpu", 2).config()
    assert (config.engine, config.optim.name) == (VARIANTS[name].engine, "adam")


@pytest.mark.parametrize("name", NATIVE)
def test_native_variants_take_muon(name: str) -> None:
    assert Work(name, "tiny", "fp32", "cpu", 2, optimizer="muon").config().optim.name == "muon"
