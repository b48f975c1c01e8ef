"""Other machines for the tests of what starts processes there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster._hosts import Hosts, sshd_problem


@pytest.fixture(scope="package")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Machines `one`, `two` and `gone`, through ssh."""
    if (problem := sshd_problem()) is not None:
        pytest.skip(problem)
    found = Hosts(Path(tmp_path_factory.mktemp("ssh")) / "hosts")
    yield found
    found.close()
