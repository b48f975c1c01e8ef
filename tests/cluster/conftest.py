"""Hosts for the tests that start processes on other hosts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster._hosts import Hosts, sshd_problem


@pytest.fixture(scope="package")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Provide the hosts `one`, `two` and `gone`, reached through ssh."""
    if (problem := sshd_problem()) is not None:
        pytest.skip(problem)
    running_hosts = Hosts(Path(tmp_path_factory.mktemp("ssh")) / "hosts")
    yield running_hosts
    running_hosts.close()
