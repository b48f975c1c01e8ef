"""Hostfiles: what is read, and what each mistake is told."""

import socket
from pathlib import Path

import pytest

from megacore.config.train import LaunchConfig
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.launch.hostfile import is_only_here, is_this_machine, local_slots, read_hostfile
from megacore.plan.hardware import Gpu, Hardware
from megacore.plan.preflight import resolve_launch
from tests.train import _runs


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text, encoding="utf-8")
    return path


def test_hosts_keep_their_order_and_comments_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "# two racks\nworker-2 slots=8  # the new one\n\n  me@10.0.0.7\tslots=4\nworker-1 slots=8\n")
    assert list(read_hostfile(path).items()) == [("worker-2", 8), ("me@10.0.0.7", 4), ("worker-1", 8)]
    assert read_hostfile(write(tmp_path, "a slots=2\nb slots=2\n"), 2) == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb\n", r"hosts, line 2: 'b' is not of the form `host slots=N`"),
        ("a slots=2 max_slots=4\n", r"line 1: 'a slots=2 max_slots=4' is not of the form"),
        ("a gpus=2\n", r"line 1: 'a gpus=2' is not of the form"),
        ("a slots=0\n", r"line 1: slots of a is '0': write the number of ranks, at least 1"),
        ("a slots=two\n", r"slots of a is 'two'"),
        ("a slots=-1\n", r"slots of a is '-1'"),
        ("a slots=\n", r"slots of a is ''"),
        ("a slots=1\n\na slots=2\n", r"line 3: a is there already"),
        ("node[1-3] slots=1\n", r"line 1: 'node\[1-3\]' is no host"),
        ("# nobody\n\n", r"names no host: write a line `host slots=N`"),
        ("localhost slots=1\n127.0.0.1 slots=1\n", r"localhost and 127\.0\.0\.1 are both this machine"),
        ("localhost slots=1\nworker slots=1\n", r"the other hosts cannot reach localhost: name this machine as"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hostfile(write(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"absent cannot be read: No such file or directory: correct launch\.hostfile"
    ):
        read_hostfile(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary cannot be read: it is no text"):
        read_hostfile(tmp_path / "binary")


def test_nproc_per_node_must_be_the_slots(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch\.nproc_per_node is 4 and b has 2 slots"):
        read_hostfile(write(tmp_path, "a slots=4\nb slots=2\n"), 4)


def test_what_is_here() -> None:
    name = socket.gethostname()
    assert all(map(is_this_machine, ("localhost", "127.0.0.1", name)))
    assert not is_this_machine("worker-1")
    assert local_slots({"worker-1": 8, name: 4}) == 4
    assert is_only_here({"localhost": 2})
    assert not is_only_here({"worker-1": 8, name: 4})


def test_a_hostfile_needs_the_launcher_that_reads_it() -> None:
    with pytest.raises(
        ValueError, match=r"hostfile is 'hosts'.* launcher is torchrun: set launch\.launcher to deepspeed"
    ):
        LaunchConfig(hostfile="hosts")
    assert LaunchConfig(launcher="deepspeed", hostfile="hosts").nproc_per_node == "auto"


def test_a_job_has_the_slots_of_all_hosts_and_its_threads_those_of_this_one(tmp_path: Path) -> None:
    def resolve(text: str, hardware: Hardware, nproc_per_node: int | str = "auto") -> tuple[int, int]:
        launch = {"launcher": "deepspeed", "hostfile": str(write(tmp_path, text)), "nproc_per_node": nproc_per_node}
        return resolve_launch(_runs.config(launch=launch), hardware)

    two = Hardware(cores=8, memory=2**34, gpus=(Gpu("a", 2**34), Gpu("b", 2**34)))
    here = socket.gethostname()
    assert resolve(f"worker slots=2\n{here} slots=2\n", two, 2) == (4, 4)
    assert resolve("one slots=1\ntwo slots=1\n", two) == (2, 8), "a machine that only starts the others"
    assert resolve("one slots=4\n", two) == (4, 8), "its own GPUs are not those of the other"
    with pytest.raises(ParallelLayoutError, match=r"slots of this machine in .*hosts is 4 and .* 2 visible GPUs"):
        resolve("localhost slots=4\n", two)
    with pytest.raises(ParallelLayoutError, match="micro_batch_size 2 x 8 data-parallel ranks = 16"):
        resolve("one slots=4\ntwo slots=4\n", two)
