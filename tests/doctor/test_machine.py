"""Probes of one host: GPUs, with a stand-in for nvidia-smi, and the digest of the sources."""

from pathlib import Path

import pytest

from megacore.doctor import machine
from megacore.doctor.machine import look_at_gpus, measure_storage, parse_smi, sources_digest

PATIENT_DRIVER = """#!/bin/sh
touch "$0.$$"
for attempt in $(seq 200); do
    [ "$(ls "$0".* | wc -l)" = 2 ] && break
    sleep 0.1
done
[ "$attempt" -lt 200 ] || exit 1
case $1 in
    --query-gpu=*) echo "0, GPU-1, H100, 81559, 81000, 570.1, 0, 40, 0" ;;
    *) echo "GPU-1, 7, python, 100" ;;
esac
"""
"""A stand-in for nvidia-smi that answers when two queries run."""


def install_nvidia_smi(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "nvidia-smi").write_text(text)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_both_queries_of_the_driver_run_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvidia_smi(tmp_path, PATIENT_DRIVER, monkeypatch)
    (gpu,) = look_at_gpus()["smi"]
    assert (gpu["driver"], gpu["processes"]) == (
        "570.1",
        [{"pid": 7, "name": "python", "used": 100 * 2**20}],
    )


def test_error_of_nvidia_smi_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(
        tmp_path, "#!/bin/sh\necho 'Driver/library version mismatch' >&2; exit 18\n", monkeypatch
    )
    gpus = look_at_gpus()
    assert gpus["smi"] is None
    assert gpus["problem"] == "nvidia-smi failed: Driver/library version mismatch"


def test_output_of_nvidia_smi_is_parsed() -> None:
    listed = (
        "0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 81008, 570.86, 0, 34, 0\n"
        "1, GPU-bb, NVIDIA H100 80GB HBM3, 81559, 1024, 570.86, [N/A], [N/A], 99\n"
    )
    running = "GPU-bb, 4711, python3, 80000\nGPU-zz, 1, other, 3\n"
    first, second = parse_smi(listed, running)
    assert (first["name"], first["driver"], first["uncorrected"]) == (
        "NVIDIA H100 80GB HBM3",
        "570.86",
        0,
    )
    assert (second["free"], second["uncorrected"]) == (1024 * 2**20, None)
    assert second["processes"] == [{"pid": 4711, "name": "python3", "used": 80000 * 2**20}]
    assert parse_smi("", "") == []


def test_digest_of_sources_depends_only_on_python_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("nothing that runs")
    assert sources_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert sources_digest(tmp_path) != before


def test_rates_of_a_workspace_are_measured_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_STORAGE_SECONDS", 0.05)
    rates = measure_storage(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert rates["write"] > 1e5
    assert rates["read"] > 1e5
    assert rates["random_reads"] > 1
    assert 0 < rates["fsync"] < 10
    assert measure_storage(tmp_path / "none") == {"skipped": "the workspace is not there yet"}
