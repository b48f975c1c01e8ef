"""Versions of what a rank imports, found without importing it."""

import hashlib
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import megacore

PACKAGES = ("torch", "numpy", "deepspeed", "transformers", "tokenizers", "safetensors", "pydantic", "triton")
"""Beside megacore and Python: what shapes a run, and what ranks exchange."""
REQUIRED = ("python", "megacore", "torch", "numpy")
"""Of which every host must have the same."""
_GIT_SECONDS = 5.0


def look_at_packages() -> dict[str, Any]:
    """Versions by package, None where it is not installed; megacore's with a digest of its sources."""
    root = Path(megacore.__file__).parent
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "megacore": f"{megacore.__version__} ({sources_digest(root)})",
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "commit": git_commit(root),
        "executable": sys.executable,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


def sources_digest(root: Path) -> str:
    """The first digits of a hash over names and contents of a package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def git_commit(root: Path) -> str | None:
    """Commit of the work tree that holds `root`; None outside of git."""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
