"""Real torchrun under the real guard."""

import os
import sys
from pathlib import Path

import pytest

from megacore.cluster.start import local_torchrun_command, rank_environment
from megacore.errors import DataFormatError, RankLostError
from megacore.launch.guard import descendants
from megacore.launch.supervise import supervise
from tests._limits import HANG
from tests.launch._processes import environment, gloo_job


def run(tmp_path: Path, behaviour: str, ranks: int = 2) -> None:
    job = gloo_job(tmp_path, behaviour)
    supervise(
        local_torchrun_command("tests.launch._gloo_rank", job, ranks),
        log=tmp_path / "log",
        exit_directory=tmp_path / "exit",
        env={**environment(), **rank_environment(1)},
        stop_grace=3.0,
        timeout=HANG,
    )


def test_single_rank_is_a_plain_process(tmp_path: Path) -> None:
    assert local_torchrun_command("m", Path("c.json"), 1) == [
        sys.executable,
        "-m",
        "m",
        "--config",
        "c.json",
    ]
    run(tmp_path, "single", ranks=1)


def test_killed_rank_is_named_despite_the_error_of_its_peer(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    with pytest.raises(RankLostError, match=r"rank 1 was ended by SIGKILL.*retry starts"):
        run(tmp_path, "killed")
    assert set(descendants(os.getpid())) <= before
    assert (tmp_path / "torchrun").is_dir(), (
        "torchrun's files are not left in the machine's temporary directory"
    )


def test_error_of_a_rank_is_raised_despite_the_error_of_its_peer(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"rank 1: tokens\.bin is damaged"):
        run(tmp_path, "raises")


def test_rank_environment_sets_openmp_and_mkl_threads() -> None:
    assert {rank_environment(3)[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {"3"}


@pytest.mark.parametrize(
    ("own", "passed"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.rtld.nns=4", "glibc.rtld.nns=4:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_users_tunables_of_glibc_are_kept(
    own: str | None, passed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {} if own is None else {"GLIBC_TUNABLES": own}
    monkeypatch.setattr(os, "environ", environment)  # as datasets does when it maps in processes
    assert rank_environment(1)["GLIBC_TUNABLES"] == passed
