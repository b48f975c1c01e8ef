"""Hardware files: all of them load, and wrong ones are refused with one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.errors import ConfigError
from megacore.hardware import Gpu, Hardware
from megacore.plan.machine import HARDWARE_DIR, LOCAL_FILE, load_machine, machine_of

FILES = sorted(HARDWARE_DIR.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_loads_and_names_its_sources(path: Path) -> None:
    machine = load_machine(path.stem)
    assert machine == load_machine(str(path))
    assert all(len(source) > 10 for source in machine.sources)
    assert machine.peak("bf16") == machine.tflops["bf16"] * 1e12
    # a ring inside a host is at least as fast as the network of one of its devices
    assert machine.node.gbs >= machine.network.gbs
    assert machine.memory_gbs > machine.node.gbs


def test_there_is_a_file_for_each_of_the_usual_gpus() -> None:
    expected = {"a100-40gb", "a100-80gb", "h100", "h200", "b200", "l40s", "cpu"}
    assert expected <= {path.stem for path in FILES}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"processors": 0}, r"processors is 0: input should be greater than 0"),
        ({"memory_gbs": "fast"}, r"memory_gbs is fast: .* valid number"),
        ({"half_depth": None}, r"half_depth is .*: field required"),
        ({"node": {"gbs": -1, "latency_us": 1}}, r"node\.gbs is -1"),
        ({"stragglers": 0.1}, r"stragglers is 0\.1"),
    ],
)
def test_a_wrong_value_is_named_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    values = yaml.safe_load((HARDWARE_DIR / "h100.yaml").read_text(encoding="utf-8")) | changes
    path = tmp_path / "mine.yaml"
    kept = {key: value for key, value in values.items() if value is not None}
    path.write_text(yaml.safe_dump(kept), encoding="utf-8")
    with pytest.raises(ConfigError, match=problem) as error:
        load_machine(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_file_of_another_kind_is_refused_without_its_content(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0\nmail:x:8:8\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no mapping of hardware values: give") as error:
        load_machine(str(path))
    assert "root" not in str(error.value).replace(str(tmp_path), "")


def test_an_unknown_name_proposes_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no hardware named 'h1000'.*did you mean h100\?"):
        load_machine("h1000")


def test_a_name_too_long_for_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="no hardware named 'aaa"):
        load_machine("a" * 5000)


def test_an_unknown_rate_is_refused() -> None:
    machine = load_machine("h100").model_copy(update={"tflops": {"bf16": 989.4}})
    with pytest.raises(ConfigError, match=r"has no tflops\.fp32"):
        machine.peak("fp32")


@pytest.mark.parametrize(
    ("name", "gib", "stem"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"),
        ("NVIDIA L40S", 44, "l40s"),
    ],
)
def test_a_gpu_gets_its_file_with_its_own_memory(name: str, gib: int, stem: str) -> None:
    hardware = Hardware(16, 2**38, (Gpu(name, gib * 2**30),) * 4)
    machine = machine_of(hardware, "bf16")
    changes = {"memory_gib": gib, "devices_per_node": 4}
    assert machine == load_machine(stem).model_copy(update=changes)


def test_a_measured_file_of_such_devices_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / HARDWARE_DIR).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    measured = load_machine("cpu").model_copy(update={"name": "this core", "fitted_on": "measured"})
    text = json.dumps(measured.model_dump(mode="json"))  # JSON is YAML
    (HARDWARE_DIR / LOCAL_FILE).write_text(text, encoding="utf-8")
    assert machine_of(Hardware(2, 2**34), "fp32").name == "this core"
    gpu = Hardware(16, 2**38, (Gpu("NVIDIA H100 80GB HBM3", 79 * 2**30),))
    assert machine_of(gpu, "bf16").name == load_machine("h100").name


@pytest.mark.parametrize(
    ("flags", "native_bf16", "rates"),
    [
        ({"neon"}, False, (15e9, 25e9, 1.5e9)),
        ({"avx2"}, False, (60e9, 25e9, 1.5e9)),
        ({"avx2", "avx512f"}, False, (120e9, 25e9, 1.5e9)),
        ({"avx2", "avx512f", "avx512_bf16"}, True, (250e9, 500e9, 1.5e9)),
        ({"avx2", "avx512f", "amx_bf16", "amx_fp16"}, True, (250e9, 500e9, 500e9)),
    ],
)
def test_a_host_without_gpus_has_its_own_cores(
    flags: set[str], native_bf16: bool, rates: tuple[float, float, float]
) -> None:
    hardware = Hardware(6, 12 * 2**30, cpu_flags=frozenset(flags), native_bf16=native_bf16)
    machine = machine_of(hardware, "fp32")
    assert (machine.device, machine.devices_per_node, machine.memory_gib) == ("cpu", 6, 2)
    assert machine.name == ("CPU core with bf16" if native_bf16 else "CPU core")
    peaks = [machine.peak(precision) for precision in ("fp32", "bf16", "fp16")]
    assert peaks == pytest.approx(rates)
