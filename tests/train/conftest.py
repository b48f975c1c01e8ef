"""Data that the tests of training share."""

from pathlib import Path

import pytest

from tests.train import _runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide token files and index maps for `_runs.config()`."""
    directory = tmp_path_factory.mktemp("data")
    _runs.write_data(directory, _runs.config())
    return directory
