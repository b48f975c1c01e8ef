"""GPUs as their driver and nvidia-smi describe them, without a context on any of them."""

import csv
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megacore.plan.hardware import Hardware

_MIB = 2**20
_SECONDS = 15.0
_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
    "utilization.gpu",
)


_QUERIES = {"--query-gpu": _FIELDS, "--query-compute-apps": ("gpu_uuid", "pid", "process_name", "used_memory")}


def look_at_gpus() -> dict[str, Any]:
    """GPUs that this process sees, and for each of the machine what nvidia-smi tells."""
    found: dict[str, Any] = {
        "visible": [{"name": gpu.name, "memory": gpu.memory} for gpu in Hardware.detect().gpus],
        "restricted": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "smi": None,
        "problem": None,
    }
    program = shutil.which("nvidia-smi")
    if program is None:
        return found
    try:
        # Together: without its persistence mode the driver starts all GPUs for each question that comes alone.
        with ThreadPoolExecutor(2) as pool:
            listed, running = pool.map(lambda query: _ask(program, *query), _QUERIES.items())
    except (OSError, subprocess.SubprocessError) as error:
        found["problem"] = f"nvidia-smi failed: {_said(error)}"
        return found
    found["smi"] = parse_smi(listed, running)
    return found


def parse_smi(listed: str, running: str) -> list[dict[str, Any]]:
    """nvidia-smi's CSV as one mapping for each GPU: memory in bytes, None for what it does not tell."""
    gpus: dict[str, dict[str, Any]] = {}
    for row in _rows(listed):
        values = dict(zip(_FIELDS, row, strict=False))
        gpus[values["uuid"]] = {
            "index": _number(values.get("index")),
            "name": values.get("name"),
            "total": _bytes(values.get("memory.total")),
            "free": _bytes(values.get("memory.free")),
            "driver": values.get("driver_version"),
            "uncorrected": _number(values.get("ecc.errors.uncorrected.volatile.total")),
            "temperature": _number(values.get("temperature.gpu")),
            "utilization": _number(values.get("utilization.gpu")),
            "processes": [],
        }
    for row in _rows(running):
        if len(row) >= 4 and row[0] in gpus:
            gpus[row[0]]["processes"].append({"pid": _number(row[1]), "name": row[2], "used": _bytes(row[3])})
    return list(gpus.values())


def _ask(program: str, query: str, fields: tuple[str, ...]) -> str:
    command = [program, f"{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout


def _said(error: Exception) -> str:
    said = getattr(error, "stdout", None) or getattr(error, "stderr", None) or str(error)
    return " ".join(str(said).split())[:300]


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _bytes(text: str | None) -> int | None:
    mebibytes = _number(text)
    return None if mebibytes is None else mebibytes * _MIB
