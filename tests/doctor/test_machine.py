"""What nvidia-smi is asked, with a stand-in for it."""

import time
from pathlib import Path

import pytest

from megacore.doctor.machine import look_at_gpus

SLOW_DRIVER = """#!/bin/sh
sleep 2
case $1 in
    --query-gpu=*) echo "0, GPU-1, H100, 81559, 81000, 570.1, 0, 40, 0" ;;
    *) echo "GPU-1, 7, python, 100" ;;
esac
"""


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "nvidia-smi").write_text(text)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_slow_driver_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, SLOW_DRIVER, monkeypatch)
    started = time.monotonic()
    (gpu,) = look_at_gpus()["smi"]
    assert time.monotonic() - started < 3.8
    assert (gpu["driver"], gpu["processes"]) == ("570.1", [{"pid": 7, "name": "python", "used": 100 * 2**20}])


def test_a_driver_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "#!/bin/sh\necho 'Driver/library version mismatch' >&2; exit 18\n", monkeypatch)
    found = look_at_gpus()
    assert found["smi"] is None
    assert found["problem"] == "nvidia-smi failed: Driver/library version mismatch"
