"""Two stand-ins for machines for each file of tests."""

from collections.abc import Iterator

import pytest

from tests.hosts._rig import Rig, hosts, require_rig


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Hosts a and b; a test that cuts, freezes or kills one restores it."""
    require_rig()
    with hosts(tmp_path_factory.mktemp("rig")) as made:
        yield made
