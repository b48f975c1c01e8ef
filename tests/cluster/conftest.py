"""Hosts and a Slurm cluster for the tests that start processes on other hosts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster._hosts import Hosts, sshd_problem
from tests.cluster.batch._slurm import Slurm, running_slurm
from tests.launch._processes import REPOSITORY


@pytest.fixture(scope="package")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Provide the hosts `one`, `two` and `gone`, reached through ssh."""
    if (problem := sshd_problem()) is not None:
        pytest.skip(problem)
    running_hosts = Hosts(Path(tmp_path_factory.mktemp("ssh")) / "hosts")
    yield running_hosts
    running_hosts.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a Slurm cluster on this host."""
    with running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def slurm(cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Provide the cluster to this test's processes, and cancel its jobs afterwards.

    The report of a failed test has the state of nodes and jobs.
    """
    monkeypatch.setenv("SLURM_CONF", cluster.conf)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    yield cluster
    for kind in ("nodes", "jobs"):
        sys.stdout.write(cluster.run("scontrol", "show", kind))
    cluster.cancel_all()
