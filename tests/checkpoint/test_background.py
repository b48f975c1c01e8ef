"""Tests of saving checkpoints in the background."""

import builtins
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacore.checkpoint import background
from megacore.checkpoint.background import (
    CheckpointSaver,
    HostBuffers,
    divide_rectangles,
    rectangles_of,
)
from megacore.checkpoint.collective import RankGroup, latest_complete_together
from megacore.checkpoint.format import (
    Marker,
    checkpoint_directories,
    complete_checkpoints,
    latest_complete,
    read_state,
    read_tracker,
)
from megacore.checkpoint.save import CheckpointWriter
from megacore.checkpoint.shard import TensorShard
from megacore.errors import CheckpointError, WorkspaceError
from tests._dist import DistributedError, run_distributed
from tests._limits import HANG
from tests.checkpoint._examples import assert_equal, example
from tests.checkpoint._read import read_tensors


def test_buffers_are_reused_until_shapes_change() -> None:
    buffers, tensors = HostBuffers(), example()

    def addresses() -> dict[str, int]:
        copied = buffers.copy(tensors)
        assert_equal(copied, tensors)  # type: ignore[arg-type]
        # torch saves the entire storage of a tensor and copies a tensor that shares its storage.
        assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copied.values())  # type: ignore[union-attr]
        return {name: copy.data_ptr() for name, copy in copied.items()}  # type: ignore[union-attr]

    first = addresses()
    for tensor in tensors.values():
        tensor += 1
    assert addresses() == first
    tensors["model.large"] = torch.ones(9, 9)
    del tensors["model.half"]
    assert addresses().keys() == tensors.keys()


def test_too_little_host_memory_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(
        CheckpointError, match=r"no host memory for 3 MiB .*set checkpoint\.asynchronous to false"
    ):
        HostBuffers().copy({"model.large": torch.zeros(700_000)})


def test_several_threads_copy_equal_values() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        tensors = {"model.w": torch.arange(9_000_001.0), "model.v": torch.arange(300_000.0)}
        assert_equal(HostBuffers().copy(tensors), tensors)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)


def test_shared_out_divides_all_pieces_evenly() -> None:
    pieces = {(f"t{n}", (0,), (n,)): 10 * n for n in range(1, 40)}
    only_rank_0 = {("own", (0,), (500,)): 2000}
    sizes_by_rank = [pieces | only_rank_0, pieces, dict(list(pieces.items())[:20])]
    assigned = divide_rectangles(sizes_by_rank)
    assert sum(map(len, assigned)) == 40
    assert set().union(*assigned) == pieces.keys() | only_rank_0.keys()
    assert all(keys <= sizes.keys() for keys, sizes in zip(assigned, sizes_by_rank, strict=True))
    loads = [
        sum(sizes[key] for key in keys) for keys, sizes in zip(assigned, sizes_by_rank, strict=True)
    ]
    assert loads[2] == 2100, "rank 2 must write all of its pieces"
    assert abs(loads[0] - loads[1]) <= 100
    assert divide_rectangles(sizes_by_rank) == assigned


@pytest.fixture
def make_saver(tmp_path: Path) -> Iterator[Callable[..., CheckpointSaver]]:
    """Provide a constructor of savers that are closed after the test."""
    savers = []

    def new_saver(
        root: Path = tmp_path, *, asynchronous: bool = True, keep_last: int = 2
    ) -> CheckpointSaver:
        savers.append(
            CheckpointSaver(root, asynchronous=asynchronous, keep_last=keep_last, keep_best=False)
        )
        return savers[-1]

    yield new_saver
    for saver in savers:
        saver.close()


def test_retention_keeps_new_checkpoints_below_damaged_ones(
    tmp_path: Path, make_saver: Callable[..., CheckpointSaver]
) -> None:
    saver = make_saver(asynchronous=False)
    for iteration in (900, 1000):
        saver.save(iteration, example(), {}, validation_loss=None)
        flip_bit(tmp_path / f"iter_{iteration:07d}" / "__0_0.distcp")
    for iteration in (100, 200, 300):  # the run has started again, since both are damaged
        saver.save(iteration, example(), {}, validation_loss=None)
        latest = latest_complete(tmp_path)
        assert latest == tmp_path / f"iter_{iteration:07d}"
    saver.wait()
    assert [path.name for path in complete_checkpoints(tmp_path, "full")] == [
        "iter_0000200",
        "iter_0000300",
    ]


def test_a_damaged_checkpoint_takes_no_place_of_a_sound_one(
    tmp_path: Path, make_saver: Callable[..., CheckpointSaver]
) -> None:
    earlier = make_saver(asynchronous=False)
    for iteration in (100, 200, 237):
        earlier.save(iteration, example(), {}, validation_loss=None)
    damaged = tmp_path / "iter_0000237"
    flip_bit(damaged / "__0_0.distcp")
    saver = make_saver(asynchronous=False)
    saver.damaged.add(damaged)
    saver.save(237, example(), {}, validation_loss=None)  # sound again
    assert not saver.damaged
    flip_bit(damaged / "__0_0.distcp")
    saver.damaged.add(damaged)
    saver.save(300, example(), {}, validation_loss=None)
    saver.wait()
    assert [path.name for path in complete_checkpoints(tmp_path, "full")] == [
        "iter_0000200",
        "iter_0000300",
    ]
    assert not damaged.exists()


@contextmanager
def delayed_writes(change: Any = None) -> Iterator[threading.Event]:
    """Delay all writes until the event is set, and call `change` before each of them."""
    original, event = CheckpointWriter.write_data, threading.Event()

    def write_data(self: CheckpointWriter, *args: Any) -> Any:
        assert event.wait(HANG)
        if change is not None:
            change()
        return original(self, *args)

    CheckpointWriter.write_data = write_data  # type: ignore[method-assign]
    try:
        yield event
    finally:
        event.set()
        CheckpointWriter.write_data = original  # type: ignore[method-assign]


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "__0_0.distcp")


def test_later_changes_of_tensors_and_state_are_not_in_the_checkpoint(
    tmp_path: Path, make_saver: Callable[..., CheckpointSaver]
) -> None:
    tensors, state = example(), {"list": [1]}
    blocking, saver = make_saver(tmp_path / "a", asynchronous=False), make_saver(tmp_path / "b")
    blocking.save(1, tensors, state, validation_loss=2.0)
    with delayed_writes() as proceed:
        saver.save(1, tensors, state, validation_loss=2.0)
        saver.finish_copy()
        for tensor in tensors.values():
            tensor.fill_(-1)
        state["list"].append(2)
        assert saver.poll() is None
        assert not (tmp_path / "b/iter_0000001").exists()
        proceed.set()
        finished = saver.wait()
    blocking_result = blocking.poll()
    assert finished is not None
    assert blocking_result is not None
    assert finished.path == tmp_path / "b/iter_0000001"
    assert read_state(finished.path) == {"list": [1]}
    assert_equal(read_tensors(finished.path), example())
    assert_equal(read_tensors(blocking_result.path), example())
    assert finished.marker.files.keys() == blocking_result.marker.files.keys()
    assert finished.marker == Marker.read(finished.path)
    assert 0 < finished.stall_seconds <= finished.seconds
    assert saver.wait() is None


@contextmanager
def held_copies(failure: Exception | None = None) -> Iterator[threading.Event]:
    """Delay all copies until the event is set; then raise `failure`, if given."""
    original, event = background._copy, threading.Event()

    def copy(*args: Any) -> None:
        assert event.wait(HANG)
        if failure is not None:
            raise failure
        original(*args)

    background._copy = copy
    try:
        yield event
    finally:
        event.set()
        background._copy = original


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Provide the time of the savers' clock, in a list, which the test advances."""
    clock = [1000.0]
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_only_finish_copy_waits_for_the_copy_and_its_wait_counts(
    make_saver: Callable[..., CheckpointSaver], now: list[float]
) -> None:
    saver, tensors = make_saver(), {"model.w": torch.ones(300_000)}
    saver.finish_copy()
    with held_copies() as proceed:
        saver.save(1, tensors, {}, validation_loss=None)
        flight = saver._flight
        assert flight is not None

        def release() -> None:
            while flight.waiting_since is None:
                time.sleep(0.01)
            now[0] += 10.0
            proceed.set()

        threading.Thread(target=release).start()
        now[0] += 100.0  # passes of the next iteration
        saver.finish_copy()
        assert proceed.is_set()
        tensors["model.w"].zero_()
        finished = saver.wait()
    assert finished is not None
    assert finished.stall_seconds == 10.0
    assert_equal(read_tensors(finished.path), {"model.w": torch.ones(300_000)})
    saver.save(2, tensors, {}, validation_loss=None)
    saver.wait()
    saver.finish_copy()


def test_what_a_gpu_computes_during_the_copy_is_no_wait(
    make_saver: Callable[..., CheckpointSaver], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, tensors = make_saver(), {"model.w": torch.ones(300_000)}
    saver.save(1, tensors, {}, validation_loss=None)
    saver.wait()
    with held_copies() as proceed:

        class Stream:
            """Stream of passes that last longer than the copy."""

            def record_event(self) -> None: ...

            def synchronize(self) -> None:
                now[0] += 100.0
                proceed.set()
                assert saver._flight is not None
                assert saver._flight.copied.wait(HANG)

        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
        saver._buffers.device = torch.device("cuda", 0)
        saver.save(2, tensors, {}, validation_loss=None)
        saver.finish_copy()
        finished = saver.wait()
    assert finished is not None
    assert finished.stall_seconds == 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_save_on_a_gpu_has_the_values_before_the_next_update(
    make_saver: Callable[..., CheckpointSaver],
) -> None:
    saver = make_saver()
    tensors = {f"model.{number}": torch.zeros(1 << 24, device="cuda:0") for number in range(8)}
    passes = torch.rand(4096, 4096, device="cuda:0")
    for iteration in range(1, 4):
        for tensor in tensors.values():  # the update of this iteration, still running at the save
            tensor.add_(1)
        saver.save(iteration, tensors, {}, validation_loss=None)
        for _ in range(20):
            passes = (passes @ passes).clamp_(0, 1)
        saver.finish_copy()
        for tensor in tensors.values():
            tensor.add_(1000)
            tensor.sub_(1000)
        finished = saver.wait()
        assert finished is not None
        for values in read_tensors(finished.path).values():
            assert torch.all(values == iteration)


def test_a_failed_copy_fails_the_save_and_does_not_hold_up_training(
    tmp_path: Path, make_saver: Callable[..., CheckpointSaver]
) -> None:
    saver = make_saver()
    with held_copies(RuntimeError("CUDA error: an illegal memory access")) as proceed:
        saver.save(1, example(), {}, validation_loss=None)
        proceed.set()
        saver.finish_copy()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            saver.wait()
    assert checkpoint_directories(tmp_path) == []


def test_a_second_save_waits_for_the_first_and_progress_is_reported(
    tmp_path: Path, make_saver: Callable[..., CheckpointSaver]
) -> None:
    beats: list[str] = []
    saver = make_saver()
    saver._beat = beats.append
    assert saver.progress() is None
    with delayed_writes() as proceed:
        saver.save(1, {"model.w": torch.ones(300_000)}, {}, validation_loss=None)
        assert saver.progress() == (0, 1_200_000)
        began = time.monotonic()
        threading.Timer(0.8, proceed.set).start()
        saver.save(2, {"model.w": torch.ones(300_000)}, {}, validation_loss=None)
        assert time.monotonic() - began > 0.5
        assert read_tracker(tmp_path) == 1, "the second save began before the first was complete"
        finished = [saver.wait(), saver.wait(), saver.wait()]
    assert [save and save.marker.iteration for save in finished] == [1, 2, None]
    assert saver.progress() is None


def save_and_wait(saver: CheckpointSaver) -> None:
    saver.save(1, example(), {}, validation_loss=None)
    while not saver.failed:
        time.sleep(0.01)
    saver.wait()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failure_is_raised_once_and_the_next_save_succeeds(
    tmp_path: Path, make_saver: Callable[..., CheckpointSaver], *, asynchronous: bool
) -> None:
    saver = make_saver(asynchronous=asynchronous)
    with delayed_writes(full_disk) as proceed:
        proceed.set()
        with pytest.raises(WorkspaceError, match="No space left on device: free some space"):
            save_and_wait(saver)
    assert not saver.failed
    assert saver.wait() is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="is not JSON"):
        saver.save(1, example(), {"x": object()}, validation_loss=None)
    with pytest.raises(CheckpointError, match="not a tensor"):
        saver.save(1, {"x": 3}, {}, validation_loss=None)  # type: ignore[dict-item]
    saver.save(2, example(), {}, validation_loss=None)
    finished = saver.wait()
    assert finished is not None
    assert latest_complete(tmp_path) == finished.path


def test_a_failure_is_raised_by_wait_and_not_by_poll(
    tmp_path: Path, make_saver: Callable[..., CheckpointSaver]
) -> None:
    # Ranks poll at different times: if only one raised, the others would start the next iteration.
    saver = make_saver()
    with delayed_writes(full_disk) as proceed:
        proceed.set()
        saver.save(1, example(), {}, validation_loss=None)
        flight = saver._flight
        assert flight is not None
        assert flight.thread is not None
        flight.thread.join(HANG)
    assert saver.poll() is None
    assert saver.failed
    with pytest.raises(WorkspaceError):
        saver.wait()


def test_retention_is_applied_after_each_save(
    tmp_path: Path, make_saver: Callable[..., CheckpointSaver]
) -> None:
    saver, deleted = make_saver(keep_last=2), []
    for iteration in (1, 2, 3, 4):
        saver.save(iteration, {"model.w": torch.ones(3)}, {}, validation_loss=None)
        finished = saver.wait()
        assert finished is not None
        deleted += finished.deleted
    assert [path.name for path in deleted] == ["iter_0000001", "iter_0000002"]
    assert [marker.iteration for marker in complete_checkpoints(tmp_path).values()] == [3, 4]


def test_a_failed_deletion_does_not_fail_the_save(
    tmp_path: Path, make_saver: Callable[..., CheckpointSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = shutil.rmtree

    def rmtree(path: Path, *args: Any, **options: Any) -> None:
        if str(path).endswith(("-deleted", "-replaced")):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        original(path, *args, **options)

    saver = make_saver(keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        for iteration in (1, 2, 2):  # the last one replaces a checkpoint
            saver.save(iteration, {"model.w": torch.ones(3)}, {}, validation_loss=None)
            finished = saver.wait()
            assert finished is not None
            assert latest_complete(tmp_path) == finished.path
        assert len(list(tmp_path.glob("*.tmp-*"))) == 2
    saver.save(3, {"model.w": torch.ones(3)}, {}, validation_loss=None)
    saver.wait()
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_writer_that_cannot_be_imported_fails_the_save(
    make_saver: Callable[..., CheckpointSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def failing(name: str, *args: Any, **options: Any) -> Any:
        if (
            name == "megacore.checkpoint.save"
            and threading.current_thread().name == "checkpoint-save"
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO), "save.py")
        return original(name, *args, **options)

    saver = make_saver()
    monkeypatch.setattr(builtins, "__import__", failing)
    saver.save(1, {"model.w": torch.ones(3)}, {}, validation_loss=None)
    assert saver._flight is not None
    assert saver._flight.thread is not None
    saver._flight.thread.join(HANG)
    assert saver.failed
    with pytest.raises(OSError, match=r"Input/output error: 'save\.py'"):
        saver.wait()


def test_a_thread_that_ends_without_a_result_fails_the_save(
    make_saver: Callable[..., CheckpointSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make_saver()
    monkeypatch.setattr(saver, "_run", lambda *args: None)
    saver.save(7, {"model.w": torch.ones(3)}, {}, validation_loss=None)
    assert saver._flight is not None
    assert saver._flight.thread is not None
    saver._flight.thread.join(HANG)
    assert saver.failed
    assert saver.poll() is None
    with pytest.raises(CheckpointError, match="of iteration 7 ended without a result"):
        saver.wait()
    assert not saver.failed


def test_a_thread_that_cannot_start_fails_the_save_with_its_cause(
    make_saver: Callable[..., CheckpointSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    saver = make_saver()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        saver.save(7, {"model.w": torch.ones(3)}, {}, validation_loss=None)
        assert saver.failed
        saver.finish_copy()
        assert saver.poll() is None
    with pytest.raises(CheckpointError, match=r"of iteration 7 cannot start \(can't start new"):
        saver.wait()
    assert not saver.failed
    saver.save(8, {"model.w": torch.ones(3)}, {}, validation_loss=None)
    assert saver.wait() is not None


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_progress_needs_no_readable_directory(
    make_saver: Callable[..., CheckpointSaver], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def unreadable(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    saver = make_saver()
    with delayed_writes() as proceed:
        saver.save(1, {"model.w": torch.ones(300_000)}, {}, validation_loss=None)
        while saver._flight is None or saver._flight.staging is None:
            time.sleep(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", unreadable)
            assert saver.progress() == (0, 1_200_000)
        proceed.set()
        assert saver.wait() is not None


def test_close_does_not_wait_for_a_stalled_save(
    tmp_path: Path,
    make_saver: Callable[..., CheckpointSaver],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setattr(background, "_PATIENCE", 0.1)
    with delayed_writes():
        saver = make_saver()
        saver.save(1, example(), {}, validation_loss=None)
        saver.close()
        assert "made no progress and is abandoned" in caplog.text
    deadline = time.monotonic() + HANG
    while latest_complete(tmp_path) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert latest_complete(tmp_path) is not None, "the abandoned save did not finish"


@pytest.mark.parametrize("function", ["sync_file", "FileRecord.of"])
def test_no_thread_of_an_abandoned_save_keeps_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    hangs, proceed = threading.Event(), threading.Event()

    def hang(path: Path) -> None:
        hangs.set()
        assert proceed.wait(HANG)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(background, "_PATIENCE", 0.1)
    saver = CheckpointSaver(tmp_path, asynchronous=True, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(f"megacore.checkpoint.save.{function}", hang)
        saver.save(1, example(), {}, validation_loss=None)
        assert hangs.wait(HANG)
        saver.close()
        threads = {each for each in threading.enumerate() if each.name.startswith("checkpoint-")}
        assert all(each.daemon for each in threads), "Python waits for the others at its exit"
        assert threads.isdisjoint(executor._threads_queues), "and for those of executors"
        assert {"checkpoint-save", "checkpoint-hash", "checkpoint-sync"} <= {
            each.name for each in threads
        }
        proceed.set()
        for thread in threads:
            thread.join(HANG)
    assert checkpoint_directories(tmp_path) == []


MOMENTS = {
    "_open_staging": False,
    "_write_state": False,
    "_publish": True,
    "write_tracker": True,
    "exit": False,
}
"""Functions of a save around which the process dies; True if the checkpoint is visible then."""
KILLED_SAVES = """
import os, signal, sys, time
from pathlib import Path
import torch
from megacore.checkpoint import save
from megacore.checkpoint.background import CheckpointSaver

torch.set_num_threads(1)

def run(moment):
    place = Path(sys.argv[1], moment)
    saver = CheckpointSaver(place, asynchronous=True, keep_last=1, keep_best=False)
    tensors = {"model.w": torch.ones(300_000)}
    saver.save(1, tensors, {}, validation_loss=None)
    saver.wait()
    if moment == "exit":
        save._publish = lambda *args: time.sleep(600)
    else:
        original = getattr(save, moment)
        def die(*args):
            if moment != "write_tracker":
                original(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(save, moment, die)
    saver.save(2, {"model.w": torch.full((300_000,), 2.0)}, {}, validation_loss=None)
    time.sleep(0.5 if moment == "exit" else 600)

for moment in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        run(moment)
        sys.exit(5)
    _, status = os.waitpid(child, 0)
    print(moment, os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_killed_save_leaves_only_complete_checkpoints(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", KILLED_SAVES, str(tmp_path), *MOMENTS],
        capture_output=True,
        text=True,
        timeout=HANG,  # far less than the save lasts that the exit does not wait for
    )
    codes = dict(line.split() for line in result.stdout.splitlines())
    assert codes == dict.fromkeys(MOMENTS, str(-signal.SIGKILL)) | {"exit": "5"}, result.stderr
    for moment, published in MOMENTS.items():
        root = tmp_path / moment
        visible = {"iter_0000001": 1.0} | ({"iter_0000002": 2.0} if published else {})
        values = {
            path.name: read_tensors(path)["model.w"].unique().tolist()
            for path in complete_checkpoints(root)
        }
        assert values == {name: [value] for name, value in visible.items()}, moment
        assert [path.name for path in checkpoint_directories(root)] == list(visible), moment
        saver = CheckpointSaver(root, asynchronous=True, keep_last=1, keep_best=False)
        saver.save(3, {"model.w": torch.ones(3)}, {}, validation_loss=None)
        assert saver.wait() is not None
        saver.close()
        assert sorted(path.name for path in root.iterdir()) == [
            "iter_0000003",
            "latest_checkpointed_iteration.txt",
        ]


def half(tensor: Tensor, rank: int) -> TensorShard:
    size = tensor.numel() // 2
    run = tensor.flatten()[rank * size :][:size].clone()
    return TensorShard.of_runs([(rank * size, run)], tensor.shape, tensor.dtype)


def run_two_rank_cases(root: str) -> dict[str, Any]:
    """Run all cases of one rank of two in a single process group and return their results."""
    rank, folder = dist.get_rank(), Path(root)
    results: dict[str, Any] = {}
    values = torch.arange(600_000.0).view(600, 1000)
    tensors: dict[str, Tensor | TensorShard] = {
        "model.first": values.clone(),
        "model.second": values + 1,
        "optimizer.divided": half(values + 2, rank),
        f"model.rank.{rank}": torch.full((10,), float(rank)),
    }
    for asynchronous in (True, False):
        saver = CheckpointSaver(
            folder / str(asynchronous), asynchronous=asynchronous, keep_last=1, keep_best=False
        )
        saver.save(1, tensors, {"rank": rank}, validation_loss=None)
        saver.save(2, tensors, {"rank": rank}, validation_loss=None)
        finished = [saver.wait(), saver.wait()]
        share = rectangles_of(saver._shares.own(tensors))
        results[f"bytes {asynchronous}"] = sum(piece.nbytes for piece in share.values())
        results[f"deleted {asynchronous}"] = [
            path.name for save in finished if save for path in save.deleted
        ]
        saver.close()

    saver = CheckpointSaver(folder / "full", asynchronous=True, keep_last=9)
    with delayed_writes(full_disk if rank == 1 else None) as proceed:
        proceed.set()
        saver.save(1, tensors, {}, validation_loss=None)
        try:
            saver.wait()
            results["full"] = "nothing"
        except WorkspaceError as error:
            results["full"] = str(error)
    paths = []
    for iteration in (3, 5):
        saver.save(iteration, tensors, {}, validation_loss=None)
        finished_save = saver.wait()
        assert finished_save is not None
        paths.append(finished_save.path)
    saver.close()
    if rank == 0:
        (folder / "full/iter_0000004").mkdir()
        (folder / "full/latest_checkpointed_iteration.txt").write_text("7")
        os.truncate(paths[1] / "__0_0.distcp", 100)
        flip_bit(folder / "True/iter_0000002/__1_0.distcp")
    dist.barrier()
    for name in ("full", "True", "False"):
        warnings: list[str] = []
        chosen = latest_complete_together(folder / name, RankGroup(None), log=warnings.append)
        results[f"chosen {name}"] = chosen and chosen.name
        results[f"warnings {name}"] = warnings
    return results


def flip_bit(path: Path) -> None:
    """Change one bit of the file and keep its size and times."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[5000] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


TwoRankResults = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two_rank_results(tmp_path_factory: pytest.TempPathFactory) -> TwoRankResults:
    """Provide the directory of the checkpoints of two ranks and the results of each rank."""
    root = tmp_path_factory.mktemp("two-ranks")
    return root, run_distributed(2, run_two_rank_cases, str(root))


def expected_tensors() -> dict[str, Tensor]:
    """Return the tensors that two ranks save together."""
    values = torch.arange(600_000.0).view(600, 1000)
    tensors = {"model.first": values, "model.second": values + 1, "optimizer.divided": values + 2}
    return tensors | {f"model.rank.{rank}": torch.full((10,), float(rank)) for rank in range(2)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_ranks_share_the_work_and_write_each_byte_once(
    two_rank_results: TwoRankResults, asynchronous: bool
) -> None:
    root, results = two_rank_results
    one_copy = sum(tensor.nbytes for tensor in expected_tensors().values())
    assert [result[f"bytes {asynchronous}"] for result in results] == [one_copy // 2] * 2
    path = root / str(asynchronous) / "iter_0000002"
    sizes = [path.joinpath(f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert one_copy < sum(sizes) < 1.01 * one_copy
    assert read_state(path) == {"rank": 0}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_ranks_learn_which_checkpoints_retention_deleted(
    two_rank_results: TwoRankResults, asynchronous: bool
) -> None:
    _, results = two_rank_results
    assert all(result[f"deleted {asynchronous}"] == ["iter_0000001"] for result in results)


@pytest.mark.parametrize("name", ["False/iter_0000002", "full/iter_0000003"])
def test_a_checkpoint_of_two_ranks_contains_the_tensors_of_both(
    two_rank_results: TwoRankResults, name: str
) -> None:
    root, _ = two_rank_results
    assert_equal(read_tensors(root / name), expected_tensors())


def test_a_full_disk_of_one_rank_fails_the_save_on_both(two_rank_results: TwoRankResults) -> None:
    root, results = two_rank_results
    assert all("No space left on device" in result["full"] for result in results)
    assert not (root / "full/iter_0000001").exists()


def test_latest_complete_together_skips_damaged_checkpoints_and_only_rank_0_warns(
    two_rank_results: TwoRankResults,
) -> None:
    root, results = two_rank_results
    assert [result["chosen full"] for result in results] == ["iter_0000003"] * 2
    truncated, empty, tracker = results[0]["warnings full"]
    assert f"{root}/full/iter_0000005/__0_0.distcp has 100 bytes instead of" in truncated
    assert "using the one before it" in truncated
    assert "iter_0000004 has no complete.json" in empty
    assert "names iteration 7, which is not there; using" in tracker
    assert all(results[1][f"warnings {name}"] == [] for name in ("full", "True", "False"))


def test_latest_complete_together_detects_a_flipped_bit(two_rank_results: TwoRankResults) -> None:
    root, results = two_rank_results
    assert [result["chosen True"] for result in results] == [None, None]
    (warning,) = results[0]["warnings True"]
    assert (
        f"{root}/True/iter_0000002/__1_0.distcp has other content than when it was written"
        in warning
    )


def test_latest_complete_together_returns_a_valid_checkpoint_without_warning(
    two_rank_results: TwoRankResults,
) -> None:
    _, results = two_rank_results
    assert [result["chosen False"] for result in results] == ["iter_0000002"] * 2
    assert results[0]["warnings False"] == []


def peer_dies(root: str) -> None:
    """Let rank 1 die during a save; rank 0 writes the type of its error to a file."""
    saver = CheckpointSaver(Path(root) / "run", asynchronous=True, keep_last=1)
    saver.save(1, {"model.w": torch.ones(1000, 1000)}, {}, validation_loss=None)
    saver.wait()
    with delayed_writes((lambda: os._exit(3)) if dist.get_rank() == 1 else None) as proceed:
        saver.save(2, {"model.w": torch.ones(1000, 1000)}, {}, validation_loss=None)
        proceed.set()
        try:
            saver.wait()
        except RuntimeError as error:
            Path(root, "error").write_text(type(error).__name__)
            saver.close()


def test_a_save_fails_at_once_and_stays_invisible_if_a_peer_dies(tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match="died with exit code 3"):
        run_distributed(2, peer_dies, str(tmp_path))
    assert (tmp_path / "error").read_text().endswith("Error")
    assert [path.name for path in checkpoint_directories(tmp_path / "run")] == ["iter_0000001"]
