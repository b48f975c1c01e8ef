"""Folders that cannot be listed; as root, no permission keeps a test from listing one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def refuse_listing(monkeypatch: pytest.MonkeyPatch, name: str, number: int = errno.EACCES) -> None:
    """Let the listing of each folder `name` fail with the error `number`."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
