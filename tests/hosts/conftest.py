"""Two simulated hosts for each file of tests."""

from collections.abc import Iterator

import pytest

from tests.hosts._rig import Rig, hosts, require_rig


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Provide the hosts a and b; a test that cuts, freezes or kills one restores it."""
    require_rig()
    with hosts(tmp_path_factory.mktemp("rig")) as hosts_of_module:
        yield hosts_of_module
