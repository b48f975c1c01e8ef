"""One training iteration of a configuration on fake GPUs, as one rank of any world, with a record.

`python -m tests.gpu_emulated.step` answers one JSON case per line, each in a process of its own.
"""

import collections
import contextlib
import json
import os
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu_emulated import fake_cuda


@dataclass(frozen=True)
class Case:
    """A rank of a run."""

    conf: str
    rank: int = 0
    world_size: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 50257


@dataclass
class Record:
    """What a rank did in one iteration, its second one."""

    operations: dict[str, int] = field(default_factory=dict)
    """Number of calls of each operation of torch, without those that only make views."""
    copies: list[str] = field(default_factory=list)
    """Copies from the host to the GPU that wait for it, with their places."""
    synchronizations: list[str] = field(default_factory=list)
    """Calls that wait for the GPU, with their places."""
    events: int = 0
    """Number of CUDA events made."""
    collectives: list[tuple[str, list[int], str]] = field(default_factory=list)
    """Communication in order: operation, ranks of the group, and shape, type and peer."""
    attention: list[str] = field(default_factory=list)
    """Attention operations that ran."""
    memory: int = 0
    """Peak bytes on the GPU in the first two iterations, by torch's memory tracker."""
    parameters: int = 0
    """Number of this rank's parameters."""
    kernels: dict[str, str] = field(default_factory=dict)


def run(case: Case) -> Record:
    """Build the engine and run two iterations, an evaluation and a copy to the host."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    class Memory(MemTracker):
        """torch's tracker without its statistics by module, which allow only one micro batch."""

        def _ignored(self, *_: Any) -> None: ...

        _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _ignored

    from megacore.config.load import load_config
    from megacore.config.spec import SpecialTokens
    from megacore.engine.build import build_engine
    from megacore.hardware import resolve_precision
    from megacore.observe.timers import Timers
    from megacore.parallel import mesh as mesh_module
    from megacore.parallel.mesh import ProcessMesh
    from megacore.pipeline_parallel.partition import shared_stages
    from megacore.plan.layouts import layout_of
    from megacore.ranks.process import choose_device, set_up_arithmetic

    os.environ.update(
        RANK=str(case.rank),
        LOCAL_RANK=str(case.rank % fake_cuda.GPUS),
        WORLD_SIZE=str(case.world_size),
    )
    fake_cuda.install(case.rank % fake_cuda.GPUS)
    config = load_config(case.conf, case.overrides)
    layout = layout_of(config, case.world_size, case.vocab_size)
    torch.autograd.set_multithreading_enabled(False)
    if case.world_size > 1 or config.engine == "deepspeed":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "fake", rank=case.rank, world_size=case.world_size, store=FakeStore()
        )
    record = Record()
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_cuda.real_tensors(mesh_module, "init_device_mesh"))
        stack.enter_context(fake_cuda.real_tensors(torch, "from_numpy"))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        memory = stack.enter_context(Memory())
        set_up_arithmetic(1)
        device = choose_device()
        timers = Timers(device)
        mesh = ProcessMesh(timers=timers)
        if case.world_size > 1:
            shared = shared_stages(config, case.vocab_size)
            mesh = ProcessMesh.build(
                layout, shared_stages=shared, device_type=device.type, timers=timers
            )
        engine = build_engine(
            config,
            case.vocab_size,
            mesh,
            special_tokens=_special_tokens(case.vocab_size),
            device=device,
            precision=resolve_precision(config.train.precision, device.type),
        )
        record.kernels = dict(engine.kernels)
        _iterate(config, engine, mesh, record)
        record.memory = max(
            (
                kinds["Total"]
                for name, kinds in memory.get_tracker_snapshot("peak").items()
                if name.type == "cuda"
            ),
            default=0,
        )
    return record


def _iterate(config: Any, engine: Any, mesh: Any, record: Record) -> None:
    from megacore.data.sampler import PrefetchingIterator
    from megacore.train.loss_check import LossCheck
    from megacore.train.state import TrainState
    from megacore.train.step import Stepper, reader

    samples = Samples(config)
    read = reader(samples, engine.device)
    check = LossCheck(config, mesh, print, lambda _: None, ["host"] * mesh.world_size)
    stepper = Stepper(config, engine, mesh, check, read, print)
    state = TrainState()
    with PrefetchingIterator(read, stepper.upcoming(state, 2)) as batches:
        stepper.step(batches, state, lambda: (False, False))
        fake_cuda.synchronizations.clear()
        fake_cuda.Event.made = 0
        with watch(record):
            stepper.step(batches, state, lambda: (False, False))
    record.events = fake_cuda.Event.made
    record.synchronizations = [f"{name} at {at}" for name, at in fake_cuda.synchronizations]


class Samples:
    """Data set whose samples contain only one token."""

    def __init__(self, config: Any) -> None:
        self.seq_length = config.data.seq_length
        self.width = {
            "gpt": self.seq_length + 1,
            "bert": 3 * self.seq_length + 1,
            "t5": self.seq_length + config.data.span_corruption.decoder_seq_length
            if config.family == "t5"
            else 0,
        }[config.family]

    def __len__(self) -> int:
        return 2**40

    def gather(self, indices: Any, out: Any = None) -> Any:
        import numpy as np

        if out is None:
            out = np.empty((len(indices), self.width), np.int64)
        out[:] = 1
        return out


def _special_tokens(vocab_size: int) -> Any:
    from megacore.config.spec import SpecialTokens

    last = vocab_size - 1
    return SpecialTokens(
        eod=last,
        pad=last - 1,
        cls=last - 2,
        sep=last - 3,
        mask=last - 4,
        sentinels=tuple(range(last - 110, last - 10)),
    )


@contextlib.contextmanager
def watch(record: Record) -> Any:
    """Record operations, copies and communication in the body."""
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_iter

    operations: collections.Counter[str] = collections.Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = str(func)
            if name.startswith("c10d."):
                self.communication(name, args, kwargs)
            pinned = self.pageable(name, args)
            out = func(*args, **kwargs)
            if not func.is_view and not name.startswith("prim."):
                operations[name] += 1
            if "attention" in name:
                record.attention.append(name)
            self.copy(name, args, kwargs, out, pinned)
            return out

        @staticmethod
        def pageable(name: str, args: Any) -> bool:
            """Return True for a host tensor that is not page-locked as the source of a copy."""
            source = args[1] if name.startswith("aten.copy_") else args[0] if args else None
            if not isinstance(source, torch.Tensor) or source.device.type != "cpu":
                return False
            with _disable_current_modes():
                return not source.is_pinned()

        @staticmethod
        def copy(name: str, args: Any, kwargs: Any, out: Any, pageable: bool) -> None:
            if not name.startswith(("aten._to_copy", "aten.copy_")):
                return
            source, target = (args[1], args[0]) if "copy_." in name and "_to" not in name else (args[0], out)
            if source.device.type == target.device.type:
                return
            waits = pageable or not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if waits:
                at = fake_cuda.place()
                what = f"{source.device.type} to {target.device.type} {list(source.shape)} at {at}"
                if target.device.type == "cuda":
                    record.copies.append(what)
                else:
                    fake_cuda.synchronizations.append(("copy", what))

        @staticmethod
        def communication(name: str, args: Any, kwargs: Any) -> None:
            group, peer = None, ""
            numbers = []
            for value in tree_iter((args, kwargs)):
                if isinstance(value, torch.ScriptObject):
                    with contextlib.suppress(RuntimeError):
                        group = dist.ProcessGroup.unbox(value)
                elif isinstance(value, int) and not isinstance(value, bool):
                    numbers.append(value)
            tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
            ranks = dist.get_process_group_ranks(group) if group is not None else []
            if name.startswith(("c10d.send", "c10d.recv")):
                peer = f" {numbers[0]} tag {numbers[1]}"
            shapes = " ".join(f"{str(each.dtype)[6:]}{list(each.shape)}" for each in tensors)
            key = group.group_name if group is not None else ""
            record.collectives.append((name.split(".")[1], [*ranks], f"{key} {shapes}{peer}"))

    with Watch():
        yield
    record.operations = dict(operations.most_common())


def main() -> None:
    """Answer the cases of standard input, a JSON object per line, with records."""
    with tempfile.TemporaryDirectory(prefix="megacore-fake-gpu-") as folder:
        fake_cuda.load(Path(folder))
        import torch

        import megacore.train.loop
        import torch._subclasses.fake_tensor
        import torch.distributed._tools.mem_tracker
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
        import megacore.engine.build  # noqa: F401

        torch.set_num_threads(1)
        for line in sys.stdin:
            _answer(Case(**json.loads(line)))


def _answer(case: Case) -> None:
    """Run a case in a forked process, which prints the record or its traceback as one line."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            result = {"record": asdict(run(case))}
        except BaseException:
            result = {"error": traceback.format_exc()}
        print(json.dumps(result), flush=True)
        os._exit(0)
    os.waitpid(process, 0)


if __name__ == "__main__":
    main()
