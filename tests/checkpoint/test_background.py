import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacore.checkpoint import background
from megacore.checkpoint.background import CheckpointSaver
from megacore.checkpoint.collective import RankGroup, latest_complete_together
from megacore.checkpoint.format import (
    Marker,
    checkpoint_directories,
    complete_checkpoints,
    latest_complete,
    read_state,
    read_tracker,
)
from megacore.checkpoint.load import read_tensors
from megacore.checkpoint.save import CheckpointWriter
from megacore.checkpoint.shard import TensorShard
from megacore.errors import CheckpointError, WorkspaceError
from tests._dist import DistributedError, run_distributed
from tests.checkpoint._examples import assert_equal, example


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., CheckpointSaver]]:
    made = []

    def saver(
        root: Path = tmp_path, *, asynchronous: bool = True, keep_last: int = 2
    ) -> CheckpointSaver:
        made.append(
            CheckpointSaver(root, asynchronous=asynchronous, keep_last=keep_last, keep_best=False)
        )
        return made[-1]

    yield saver
    for each in made:
        each.close()


@contextmanager
def held_back(change: Any = None) -> Iterator[threading.Event]:
    """Let no rank write before the event is set, and then do `change` before."""
    original, event = CheckpointWriter.write_data, threading.Event()

    def write_data(self: CheckpointWriter, *args: Any) -> Any:
        assert event.wait(30)
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


def test_what_changes_after_save_returned_is_not_in_the_checkpoint(
    tmp_path: Path, make: Callable[..., CheckpointSaver]
) -> None:
    tensors, state = example(), {"list": [1]}
    blocking, saver = make(tmp_path / "a", asynchronous=False), make(tmp_path / "b")
    blocking.save(1, tensors, state, validation_loss=2.0)
    with held_back() as go_on:
        started = saver.save(1, tensors, state, validation_loss=2.0)
        for tensor in tensors.values():
            tensor.fill_(-1)
        state["list"].append(2)
        assert saver.poll() is None
        assert not (tmp_path / "b/iter_0000001").exists()
        go_on.set()
        finished = saver.wait()
    before = blocking.poll()
    assert finished is not None
    assert before is not None
    assert finished.path == tmp_path / "b/iter_0000001"
    assert read_state(finished.path) == {"list": [1]}
    assert_equal(read_tensors(finished.path), example())
    assert_equal(read_tensors(before.path), example())
    assert finished.marker.files.keys() == before.marker.files.keys()
    assert finished.marker == Marker.read(finished.path)
    assert started.size_bytes == sum(tensor.nbytes for tensor in example().values())
    assert 0 < started.stall_seconds <= finished.seconds
    assert saver.wait() is None


def test_one_save_in_flight_with_progress(
    tmp_path: Path, make: Callable[..., CheckpointSaver]
) -> None:
    beats: list[str] = []
    saver = make()
    saver._beat = beats.append
    assert saver.progress() is None
    with held_back() as go_on:
        saver.save(1, {"model.w": torch.ones(300_000)}, {}, validation_loss=None)
        assert saver.progress() == (0, 1_200_000)
        threading.Timer(0.8, go_on.set).start()
        began = time.monotonic()
        saver.save(2, {"model.w": torch.ones(300_000)}, {}, validation_loss=None)
        assert time.monotonic() - began > 0.5
        assert read_tracker(tmp_path) == 1, "the first save was complete before the second began"
        finished = [saver.wait(), saver.wait(), saver.wait()]
    assert [each and each.marker.iteration for each in finished] == [1, 2, None]
    assert saver.progress() is None


def save_and_wait(saver: CheckpointSaver) -> None:
    saver.save(1, example(), {}, validation_loss=None)
    while not saver.failed:
        time.sleep(0.01)
    saver.wait()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failure_is_raised_once_and_the_next_save_goes_on(
    tmp_path: Path, make: Callable[..., CheckpointSaver], *, asynchronous: bool
) -> None:
    saver = make(asynchronous=asynchronous)
    with held_back(full_disk) as go_on:
        go_on.set()
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


def test_a_failure_waits_until_all_ranks_ask_for_it(
    tmp_path: Path, make: Callable[..., CheckpointSaver]
) -> None:
    """Ranks look at different moments.

    One that raised alone would leave the others in their next iteration.
    """
    saver = make()
    with held_back(full_disk) as go_on:
        go_on.set()
        saver.save(1, example(), {}, validation_loss=None)
        flight = saver._flight
        assert flight is not None
        assert flight.thread is not None
        flight.thread.join(10)
    assert saver.poll() is None
    assert saver.failed
    with pytest.raises(WorkspaceError):
        saver.wait()


def test_retention_follows_each_save(tmp_path: Path, make: Callable[..., CheckpointSaver]) -> None:
    saver, deleted = make(keep_last=2), []
    for iteration in (1, 2, 3, 4):
        saver.save(iteration, {"model.w": torch.ones(3)}, {}, validation_loss=None)
        finished = saver.wait()
        assert finished is not None
        deleted += finished.deleted
    assert [path.name for path in deleted] == ["iter_0000001", "iter_0000002"]
    assert [marker.iteration for marker in complete_checkpoints(tmp_path).values()] == [3, 4]


def test_close_leaves_a_save_that_does_not_come_further(
    tmp_path: Path,
    make: Callable[..., CheckpointSaver],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setattr(background, "_PATIENCE", 0.1)
    with held_back():
        saver = make()
        saver.save(1, example(), {}, validation_loss=None)
        saver.close()
        assert "did not come further" in caplog.text
    deadline = time.monotonic() + 10
    while latest_complete(tmp_path) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert latest_complete(tmp_path) is not None, "what is left to itself may still end"


MOMENTS = {
    "_open_staging": False,
    "_write_state": False,
    "_publish": True,
    "write_tracker": True,
    "exit": False,
}
"""Functions of a save, around which a process dies, and whether the checkpoint is visible by
then."""
KILLED = """
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
        save._publish = lambda *args: time.sleep(60)
    else:
        original = getattr(save, moment)
        def die(*args):
            if moment != "write_tracker":
                original(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(save, moment, die)
    saver.save(2, {"model.w": torch.full((300_000,), 2.0)}, {}, validation_loss=None)
    time.sleep(0.5 if moment == "exit" else 60)

for moment in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        run(moment)
        sys.exit(5)
    _, status = os.waitpid(child, 0)
    print(moment, os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_process_that_dies_at_any_moment_leaves_nothing_half_done(tmp_path: Path) -> None:
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), *MOMENTS],
        capture_output=True,
        text=True,
        timeout=60,
    )
    codes = dict(line.split() for line in result.stdout.splitlines())
    assert codes == dict.fromkeys(MOMENTS, str(-signal.SIGKILL)) | {"exit": "5"}, result.stderr
    assert time.monotonic() - began < 45, "a process that ends does not wait for its save"
    for moment, published in MOMENTS.items():
        root = tmp_path / moment
        visible = {"iter_0000001": 1.0} | ({"iter_0000002": 2.0} if published else {})
        found = {
            path.name: read_tensors(path)["model.w"].unique().tolist()
            for path in complete_checkpoints(root)
        }
        assert found == {name: [value] for name, value in visible.items()}, moment
        assert [path.name for path in checkpoint_directories(root)] == list(visible), moment
        saver = CheckpointSaver(root, asynchronous=True, keep_last=1, keep_best=False)
        saver.save(3, {"model.w": torch.ones(3)}, {}, validation_loss=None)
        assert saver.wait() is not None
        saver.close()
        assert sorted(path.name for path in root.iterdir()) == [
            "iter_0000003",
            "latest_checkpointed_iteration.txt",
        ]


def half(whole: Tensor, rank: int) -> TensorShard:
    size = whole.numel() // 2
    return TensorShard.of_runs(
        [(rank * size, whole.flatten()[rank * size :][:size].clone())], whole.shape, whole.dtype
    )


def ranks_case(root: str) -> dict[str, Any]:
    """Everything that needs two ranks, in one group."""
    rank, folder = dist.get_rank(), Path(root)
    results: dict[str, Any] = {}
    whole = torch.arange(600_000.0).view(600, 1000)
    tensors: dict[str, Tensor | TensorShard] = {
        "model.alike": whole.clone(),
        "model.too": whole + 1,
        "optimizer.divided": half(whole + 2, rank),
        f"model.own.{rank}": torch.full((10,), float(rank)),
    }
    for asynchronous in (True, False):
        saver = CheckpointSaver(
            folder / str(asynchronous), asynchronous=asynchronous, keep_last=1, keep_best=False
        )
        saver.save(1, tensors, {"rank": rank}, validation_loss=None)
        started = saver.save(2, tensors, {"rank": rank}, validation_loss=None)
        finished = [saver.wait(), saver.wait()]
        results[f"bytes {asynchronous}"] = started.size_bytes
        results[f"deleted {asynchronous}"] = [
            path.name for each in finished if each for path in each.deleted
        ]
        saver.close()

    saver = CheckpointSaver(folder / "full", asynchronous=True, keep_last=9)
    with held_back(full_disk if rank == 1 else None) as go_on:
        go_on.set()
        saver.save(1, tensors, {}, validation_loss=None)
        try:
            saver.wait()
            results["full"] = "nothing"
        except WorkspaceError as error:
            results["full"] = str(error)
    paths = []
    for iteration in (3, 5):
        saver.save(iteration, tensors, {}, validation_loss=None)
        finished_now = saver.wait()
        assert finished_now is not None
        paths.append(finished_now.path)
    saver.close()
    if rank == 0:
        (folder / "full/iter_0000004").mkdir()
        (folder / "full/latest_checkpointed_iteration.txt").write_text("7")
        os.truncate(paths[1] / "__0_0.distcp", 100)
        flip(folder / "True/iter_0000002/__1_0.distcp")
    dist.barrier()
    for name in ("full", "True", "False"):
        warnings: list[str] = []
        chosen = latest_complete_together(folder / name, RankGroup(None), log=warnings.append)
        results[f"chosen {name}"] = chosen and chosen.name
        results[f"warnings {name}"] = warnings
    return results


def flip(path: Path) -> None:
    """Change one bit and nothing else that could be noticed."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[5000] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_two_ranks(tmp_path: Path) -> None:
    results = run_distributed(2, ranks_case, str(tmp_path))
    whole = torch.arange(600_000.0).view(600, 1000)
    wanted = {"model.alike": whole, "model.too": whole + 1, "optimizer.divided": whole + 2}
    wanted |= {f"model.own.{rank}": torch.full((10,), float(rank)) for rank in range(2)}
    one_copy = sum(tensor.nbytes for tensor in wanted.values())
    for asynchronous in (False, True):
        assert [result[f"bytes {asynchronous}"] for result in results] == [one_copy // 2] * 2
        assert all(result[f"deleted {asynchronous}"] == ["iter_0000001"] for result in results)
        path = tmp_path / str(asynchronous) / "iter_0000002"
        sizes = [path.joinpath(f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
        assert one_copy < sum(sizes) < 1.01 * one_copy, "each byte is written once"
        assert read_state(path) == {"rank": 0}
    assert_equal(read_tensors(tmp_path / "False/iter_0000002"), wanted)
    assert_equal(read_tensors(tmp_path / "full/iter_0000003"), wanted)
    assert all("No space left on device" in result["full"] for result in results)
    assert not (tmp_path / "full/iter_0000001").exists()

    assert [result["chosen full"] for result in results] == ["iter_0000003"] * 2
    truncated, empty, tracker = results[0]["warnings full"]
    assert f"{tmp_path}/full/iter_0000005/__0_0.distcp has 100 bytes instead of" in truncated
    assert "passing it over for the one before" in truncated
    assert "iter_0000004 has no complete.json" in empty
    assert "names iteration 7, which is not there; using" in tracker
    assert [result["chosen True"] for result in results] == [None, None]
    (flipped,) = results[0]["warnings True"]
    assert (
        f"{tmp_path}/True/iter_0000002/__1_0.distcp has another content than when it was written"
        in flipped
    )
    assert [result["chosen False"] for result in results] == ["iter_0000002"] * 2
    assert results[0]["warnings False"] == []
    assert all(results[1][f"warnings {name}"] == [] for name in ("full", "True", "False"))


def peer_dies(root: str) -> None:
    """Rank 1 dies while the save is in flight; rank 0 notes what it met."""
    saver = CheckpointSaver(Path(root) / "run", asynchronous=True, keep_last=1)
    saver.save(1, {"model.w": torch.ones(1000, 1000)}, {}, validation_loss=None)
    saver.wait()
    with held_back((lambda: os._exit(3)) if dist.get_rank() == 1 else None) as go_on:
        saver.save(2, {"model.w": torch.ones(1000, 1000)}, {}, validation_loss=None)
        go_on.set()
        try:
            saver.wait()
        except RuntimeError as error:
            Path(root, "met").write_text(type(error).__name__)
            saver.close()


def test_a_peer_that_dies_is_met_at_once_and_nothing_is_visible(tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match="died with exit code 3"):
        run_distributed(2, peer_dies, str(tmp_path))
    assert (tmp_path / "met").read_text().endswith("Error")
    assert [path.name for path in checkpoint_directories(tmp_path / "run")] == ["iter_0000001"]
