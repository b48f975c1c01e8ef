"""Hostfiles: reading them, choosing hosts and slots, and errors in them."""

import socket
from pathlib import Path

import pytest

from megacore.config.hostfile import (
    devices_of,
    hosts_of,
    is_only_here,
    is_this_machine,
    local_slots,
    read_hostfile,
    slots_of,
)
from megacore.config.launch import LaunchConfig
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.hardware import Gpu, Hardware
from megacore.plan.preflight import resolve_launch
from tests.train import _runs


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text, encoding="utf-8")
    return path


def test_hosts_are_read_in_order_without_comments(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "# two racks\nworker-2 slots=8  # the new one\n\n  me@10.0.0.7\tslots=4\n"
        "worker-1 slots=8\n",
    )
    assert list(read_hostfile(path).items()) == [
        ("worker-2", 8),
        ("me@10.0.0.7", 4),
        ("worker-1", 8),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb\n", r"hosts, line 2: 'b' is not of the form `host slots=N`"),
        ("a slots=2 max_slots=4\n", r"line 1: 'a slots=2 max_slots=4' is not of the form"),
        ("a gpus=2\n", r"line 1: 'a gpus=2' is not of the form"),
        ("a slots=0\n", r"line 1: slots of a is '0': write the number of ranks, at least 1"),
        ("a slots=two\n", r"slots of a is 'two'"),
        ("a slots=1000000000\n", r"slots of a is '1000000000': .*at most 4,096"),
        (f"a slots={'9' * 6000}\n", r"slots of a is '9{199}…: write"),
        ("a slots=-1\n", r"slots of a is '-1'"),
        ("a slots=\n", r"slots of a is ''"),
        ("a slots=1\n\na slots=2\n", r"line 3: a is there already"),
        ("node[1-3] slots=1\n", r"line 1: 'node\[1-3\]' is no host"),
        ("# nobody\n\n", r"names no host: write a line `host slots=N`"),
        (
            "localhost slots=1\n127.0.0.1 slots=1\n",
            r"localhost and 127\.0\.0\.1 are both this machine",
        ),
        (
            "localhost slots=1\nworker slots=1\n",
            r"the other hosts cannot reach localhost: name this machine as",
        ),
    ],
)
def test_invalid_hostfile_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hostfile(write(tmp_path, text))


def test_missing_hostfile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"absent cannot be read: No such file or directory: give a file with a line",
    ):
        read_hostfile(tmp_path / "absent")


def test_binary_hostfile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary cannot be read: it is no text"):
        read_hostfile(tmp_path / "binary")


def test_nproc_per_node_must_equal_the_slots(tmp_path: Path) -> None:
    path = write(tmp_path, "a slots=2\nb slots=2\n")
    assert hosts_of(LaunchConfig(hostfile=str(path), nproc_per_node=2)) == {"a": 2, "b": 2}
    path = write(tmp_path, "a slots=4\nb slots=2\n")
    with pytest.raises(ConfigError, match=r"launch\.nproc_per_node is 4 and b has 2 slots"):
        hosts_of(LaunchConfig(hostfile=str(path), nproc_per_node=4))


def test_names_of_this_host_are_recognized() -> None:
    assert all(map(is_this_machine, ("localhost", "127.0.0.1", socket.gethostname())))
    assert not is_this_machine("worker-1")


def test_slots_of_this_host_are_found_among_other_hosts() -> None:
    name = socket.gethostname()
    assert local_slots({"worker-1": 8, name: 4}) == 4
    assert is_only_here({"localhost": 2})
    assert not is_only_here({"worker-1": 8, name: 4})


def test_hostfile_with_a_scheduler_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"hostfile is 'hosts', and slurm chooses the machines itself"
    ):
        LaunchConfig(kind="slurm", hostfile="hosts")


def test_nnodes_without_a_hostfile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"launch\.nnodes is 2 without launch\.hostfile"):
        LaunchConfig(nnodes=2)


def test_hostfile_sets_nproc_per_node_to_auto() -> None:
    assert LaunchConfig(kind="deepspeed", hostfile="hosts").nproc_per_node == "auto"


def test_slots_are_compared_with_the_gpus_of_an_equal_host_that_an_attempt_leaves_out(
    tmp_path: Path,
) -> None:
    def resolve(hosts: dict[str, int]) -> tuple[int, int]:
        text = "one slots=2\ntwo slots=2\nthree slots=4\n"
        launch = {
            "hostfile": str(write(tmp_path, text)),
            "nproc_per_node": "auto",
            "nnodes": "1:3",
        }
        gpus = Hardware(cores=8, memory=2**34, gpus=(Gpu("a", 2**34),) * 2, host="one")
        return resolve_launch(_runs.config(launch=launch), gpus, hosts=hosts)

    assert resolve({"two": 2}) == (2, 4)
    with pytest.raises(
        ParallelLayoutError,
        match=r"slots of host three in .* is 4 and host one has 2 visible GPUs: set it to 2 or to",
    ):
        resolve({"three": 4})


def test_launch_has_ranks_of_all_hosts_and_threads_of_the_local_slots(tmp_path: Path) -> None:
    def resolve(
        text: str, hardware: Hardware, nproc_per_node: int | str = "auto"
    ) -> tuple[int, int]:
        launch = {
            "kind": "deepspeed",
            "hostfile": str(write(tmp_path, text)),
            "nproc_per_node": nproc_per_node,
        }
        return resolve_launch(_runs.config(launch=launch), hardware)

    two_gpus = Hardware(cores=8, memory=2**34, gpus=(Gpu("a", 2**34), Gpu("b", 2**34)))
    local_name = socket.gethostname()
    assert resolve(f"worker slots=2\n{local_name} slots=2\n", two_gpus, 2) == (4, 4)
    assert resolve("one slots=1\ntwo slots=1\n", two_gpus) == (2, 8), (
        "this host starts the other hosts and has no ranks"
    )
    assert resolve("one slots=4\n", two_gpus) == (4, 2), "the local GPUs do not limit another host"
    with pytest.raises(
        ParallelLayoutError, match=r"slots of this machine in .*hosts is 4 and .* 2 visible GPUs"
    ):
        resolve("localhost slots=4\n", two_gpus)
    with pytest.raises(
        ParallelLayoutError, match="micro_batch_size 2 x 8 data-parallel ranks = 16"
    ):
        resolve("one slots=4\ntwo slots=4\n", two_gpus)


THREE_HOSTS = "worker-1 slots=4\nworker-2 slots=4 # new\nworker-3 slots=2\n"


def launch(tmp_path: Path, text: str = THREE_HOSTS, **values: object) -> LaunchConfig:
    return LaunchConfig.model_validate({"hostfile": str(write(tmp_path, text)), **values})


def test_launch_without_a_hostfile_has_no_hosts() -> None:
    assert hosts_of(LaunchConfig()) == {}
    assert devices_of(LaunchConfig()) == {}


@pytest.mark.parametrize(
    ("values", "hosts", "devices"),
    [
        ({}, {"worker-1": 4, "worker-2": 4, "worker-3": 2}, {}),
        ({"include": ["worker-3", "worker-1"]}, {"worker-1": 4, "worker-3": 2}, {}),
        (
            {"include": ["worker-2:3,0", "worker-1"]},
            {"worker-1": 4, "worker-2": 2},
            {"worker-2": (0, 3)},
        ),
        ({"exclude": ["worker-1"]}, {"worker-2": 4, "worker-3": 2}, {}),
        (
            {"exclude": ["worker-1:1", "worker-3:0,1"]},
            {"worker-1": 3, "worker-2": 4},
            {"worker-1": (0, 2, 3)},
        ),
        ({"nnodes": 2}, {"worker-1": 4, "worker-2": 4}, {}),
        ({"nnodes": "1:2"}, {"worker-1": 4, "worker-2": 4}, {}),
        ({"nnodes": "2:8"}, {"worker-1": 4, "worker-2": 4, "worker-3": 2}, {}),
        (
            {"nnodes": "1:2", "exclude": ["worker-3:0"]},
            {"worker-1": 4, "worker-2": 4},
            {"worker-3": (1,)},
        ),
        ({"nnodes": 2, "exclude": ["worker-3:0"]}, {"worker-1": 4, "worker-2": 4}, {}),
        ({"exclude": ["worker-1"], "nnodes": 1}, {"worker-2": 4}, {}),
        (
            {"include": ["worker-1:0,1", "worker-3"], "nproc_per_node": 2},
            {"worker-1": 2, "worker-3": 2},
            {"worker-1": (0, 1)},
        ),
    ],
)
def test_include_exclude_and_nnodes_select_hosts_and_devices(
    values: dict[str, object],
    hosts: dict[str, int],
    devices: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    config = launch(tmp_path, **values)
    assert list(hosts_of(config).items()) == list(hosts.items())
    assert devices_of(config) == devices


def test_unlimited_slots_include_hosts_beyond_nnodes(tmp_path: Path) -> None:
    config = launch(tmp_path, nnodes="1:2", exclude=["worker-1:0"])
    slot_counts = {host: len(slots) for host, slots in slots_of(config, limited=False).items()}
    assert slot_counts == {"worker-1": 3, "worker-2": 4, "worker-3": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"include": ["worker-9"]},
            r"launch\.include names 'worker-9', which .*hosts does not: it has worker-1, ",
        ),
        ({"exclude": ["2"]}, r"launch\.exclude names '2', which"),
        (
            {"include": ["worker-1:4"]},
            r"names slot 4 of worker-1, which has 4 slots in .*, counted from 0",
        ),
        (
            {"include": ["worker-1:0", "worker-1:1"]},
            r"names worker-1 twice: keep one, with all its slots",
        ),
        (
            {"include": ["worker-1:"]},
            r"launch\.include has 'worker-1:': write `host`, or `host:0,2`",
        ),
        ({"include": ["worker-1:0-2"]}, r"has 'worker-1:0-2': write"),
        ({"exclude": ["worker-1", "worker-2", "worker-3"]}, r"launch\.exclude leaves no host of"),
        (
            {"nnodes": 4},
            (
                r"nnodes is 4 and of .*hosts only worker-1, worker-2, worker-3 take part: add "
                r"hosts, or lower"
            ),
        ),
        (
            {"nnodes": "3:4", "exclude": ["worker-2"]},
            r"nnodes is 3:4 and of .* only worker-1, worker-3 take part",
        ),
        ({"nproc_per_node": 4}, r"nproc_per_node is 4 and worker-3 has 2 slots"),
    ],
)
def test_invalid_selection_of_hosts_is_refused(
    values: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        hosts_of(launch(tmp_path, **values))


def test_former_key_launcher_is_refused_with_its_new_name() -> None:
    with pytest.raises(ValueError, match=r"launch\.launcher is called launch\.kind: rename it"):
        LaunchConfig.model_validate({"launcher": "deepspeed"})


def test_ranks_of_a_scheduler_follow_nproc_per_node_and_nnodes() -> None:
    def resolve(**values: object) -> tuple[int, int]:
        return resolve_launch(
            _runs.config(launch={"kind": "slurm", **values}), Hardware(cores=8, memory=2**34)
        )

    assert resolve(nproc_per_node=2) == (2, 4)
    assert resolve(nproc_per_node=2, nnodes=2) == (4, 4)
    assert resolve(nproc_per_node=1, nnodes="1:2") == (2, 8)
    with pytest.raises(
        ConfigError,
        match=r"nproc_per_node is auto and launch\.kind is slurm, whose machines are not known yet",
    ):
        resolve(nproc_per_node="auto")
    with pytest.raises(ValueError, match="micro_batch_size 2 x 8 data-parallel ranks = 16"):
        resolve(nproc_per_node=4, nnodes=2)
