"""One training iteration of a configuration on fake GPUs, as one rank of any world, with a record.

`python -m tests.gpu_emulated.step` answers one JSON case per line, each in a process of its own.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu_emulated import fake_cuda, inductor


def _disable_current_modes() -> Any:
    """Return a context in which tensors are real."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@dataclass(frozen=True)
class Case:
    """A rank of a run."""

    conf: str
    rank: int = 0
    world_size: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 50257
    memory: bool = False
    """True to track the memory, which takes more time."""
    one_iteration: bool = False
    """True to run only one iteration if there is no pipeline."""
    iterations_only: bool = False
    """True to leave out the evaluation and the save."""
    compiled: bool = False
    """True to compile the layers; their graphs run one operator at a time."""
    capability: int = 0
    """Compute capability x 10 for which Inductor generates and compiles the kernels of all graphs;
    0 for none."""


@dataclass(frozen=True)
class Communication:
    """A collective, or one side of a message."""

    operation: str
    """Name of c10d's operation: `allreduce_`, `send`, `recv_` and others."""
    group: str
    """Name of the process group."""
    ranks: list[int]
    """Ranks of the group."""
    tensors: list[str]
    """Type and shape of each tensor."""
    peer: int | None = None
    """The other rank of a message."""


@dataclass
class Record:
    """Work of a rank in its last iteration, an evaluation and a save."""

    copies: list[str] = field(default_factory=list)
    """Copies from the host to the GPU that wait for it, with their places."""
    synchronizations: list[str] = field(default_factory=list)
    """Calls that wait for the GPU, with their places."""
    events: int = 0
    """Number of CUDA events made."""
    communication: list["Communication"] = field(default_factory=list)
    """Communication in the order in which it starts."""
    attention: list[str] = field(default_factory=list)
    """Attention operations that ran."""
    squares: list[str] = field(default_factory=list)
    """Operations that made a matrix of a number for each pair of a sequence's tokens."""
    operations: int = 0
    """Number of operations that forward and backward of the global batch start."""
    evaluation: list[str] = field(default_factory=list)
    """Waits for the GPU in an evaluation, with their places."""
    save: list[str] = field(default_factory=list)
    """Waits for the GPU while a checkpoint's tensors are copied to the host, with their places."""
    graphs: int = 0
    """Number of graphs of compiled layers."""
    graph_breaks: list[str] = field(default_factory=list)
    """Reasons for which a layer is more than one graph."""
    peak_bytes: int = 0
    """Largest memory of the GPU's tensors until the end of the first iteration."""
    kernels: dict[str, str] = field(default_factory=dict)
    binaries: dict[str, int] = field(default_factory=dict)
    """Bytes of machine code of each kernel that Inductor generated."""
    failures: list[str] = field(default_factory=list)
    """Errors of Inductor, Triton and ptxas."""
    captured: list[str] = field(default_factory=list)
    """Calls in the capture of a CUDA graph that it must not contain, with their places."""
    captures: int = 0
    """Number of CUDA graphs captured before the iteration."""
    replays: int = 0
    """Number of replays of CUDA graphs in the iteration."""
    generators: int = 0
    """Number of generators of the CUDA graphs."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Record":
        """Return the record in a line of JSON."""
        calls = [Communication(**call) for call in values.pop("communication")]
        return cls(communication=calls, **values)


def run(case: Case) -> Record:
    """Build the engine, run two iterations, an evaluation and the copy of a save.

    The record is of the last iteration and what follows it. With CUDA graphs it is of the one
    after the capture, and of the capture.
    """
    record = Record()
    tracker = _memory_tracker() if case.memory else None
    graphs: Any = _graphs(record) if case.compiled else contextlib.nullcontext()
    if case.capability:
        graphs = inductor.generated(case.capability, record.binaries, record.failures)
    with graphs, _built(case, tracker) as (config, engine, mesh):
        record.kernels = dict(engine.kernels)
        one_iteration = case.one_iteration and mesh.pipeline_parallel.size == 1
        _iterate(config, engine, mesh, record, one_iteration=one_iteration)
        if tracker is not None:
            record.peak_bytes = tracker.peak
        if not case.iterations_only:
            _evaluate(config, engine, mesh, record)
            _save(engine, record)
    return record


def prepare() -> None:
    """Import the modules that cases need, and remember fake operations, for forked processes.

    Autograd must not start before the fork.
    """
    case = Case("gpt2-tiny", overrides={"model.num_layers": 1, "train.compile": "off"})
    with _built(case) as (config, engine, mesh):
        _evaluate(config, engine, mesh, Record())
        _save(engine, Record())
    import_module("megacore.engine.deepspeed.pipeline").import_deepspeed()
    import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    import_module("torch._dynamo.backends.debugging")
    import_module("torch._inductor.compile_fx")
    import_module("torch.distributed._tools.mem_tracker")


@contextlib.contextmanager
def _built(case: Case, tracker: Any = None) -> Iterator[tuple[Any, Any, Any]]:
    """Return configuration, engine and mesh of a case, for use in the body."""
    import torch
    import torch._functorch.config
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megacore.config.load import load_config
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_cuda.real_tensors(mesh_module, "init_device_mesh"))
        stack.enter_context(fake_cuda.real_tensors(torch, "from_numpy"))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # recomputation in graphs would read the device of a generator, which fake GPUs lack
        functorch = torch._functorch.config.patch(graphsafe_rng_functionalization=False)
        stack.enter_context(functorch)
        if tracker is not None:
            stack.enter_context(tracker)
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
        yield config, engine, mesh


def _iterate(
    config: Any, engine: Any, mesh: Any, record: Record, *, one_iteration: bool = False
) -> None:
    from megacore.data.sampler import PrefetchingIterator
    from megacore.engine.cuda_graph import WARM_UP
    from megacore.train.loss_check import LossCheck
    from megacore.train.state import TrainState
    from megacore.train.step import Stepper, reader

    gather = reader(Samples(config), engine.device)

    def read(indices: Any) -> Any:
        with _disable_current_modes():  # the second attempt at an iteration reads in this thread
            return gather(indices)

    check = LossCheck(config, mesh, print, lambda _: None, ["host"] * mesh.world_size)
    stepper = Stepper(config, engine, mesh, check, read, print)
    state = TrainState()
    # with graphs: at least one micro batch each, then the capture
    before = 0 if one_iteration else WARM_UP + 1 if config.train.cuda_graphs else 1
    with PrefetchingIterator(read, stepper.upcoming(state, before + 1)) as batches:
        with watch(Record()) if config.train.cuda_graphs else contextlib.nullcontext():
            for _ in range(before):
                stepper.step(batches, state, lambda: (False, False))
        record.captured = [f"{name} at {at}" for name, at in fake_cuda.captured]
        record.captures, record.generators = fake_cuda.Graph.captures, fake_cuda.Graph.generators
        fake_cuda.Event.made = fake_cuda.Graph.replays = 0
        with _waits(record.synchronizations), watch(record, config.data.seq_length) as operations:
            engine.forward_backward = _counted(engine.forward_backward, operations, record)
            stepper.step(batches, state, lambda: (False, False))
    record.events, record.replays = fake_cuda.Event.made, fake_cuda.Graph.replays


def _counted(forward_backward: Any, operations: list[int], record: Record) -> Any:
    """Count the operations of forward and backward."""

    def counted(*arguments: Any, **options: Any) -> None:
        before = operations[0]
        forward_backward(*arguments, **options)
        record.operations += operations[0] - before

    return counted


def _evaluate(config: Any, engine: Any, mesh: Any, record: Record) -> None:
    """Evaluate two micro batches of each replica, the second one smaller."""
    from megacore.train.evaluate import evaluate

    size = config.train.micro_batch_size
    seen = Record(copies=record.copies, squares=record.squares)
    with _waits(record.evaluation), watch(seen, config.data.seq_length):
        evaluate(
            engine,
            Samples(config),
            samples=2 * size * mesh.data_parallel.size - size // 2,
            micro_batch_size=size,
            mesh=mesh,
        )


def _save(engine: Any, record: Record) -> None:
    """Copy the tensors of a checkpoint to the host."""
    from megacore.checkpoint.background import HostBuffers, rectangles_of

    buffers = HostBuffers()
    memory = fake_cuda.real_tensors(HostBuffers, "_allocate")
    with memory, _waits(record.save), watch(Record()):
        tensors = engine.tensors()  # DeepSpeed's are on the host already
        if any(piece.is_cuda for piece in rectangles_of(tensors).values()):
            buffers.copy(tensors)
            buffers.free()


@contextlib.contextmanager
def _graphs(record: Record) -> Iterator[None]:
    """Let a backend that generates no kernels compile the layers, and record their graphs."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    from megacore.engine.build import Compiler

    build = Compiler.compile_layers

    def compile_layers(compiler: Any, chunks: Any, **options: Any) -> str:
        counters.clear()  # of the function that tests the compiler
        return build(compiler, chunks, **options)

    Compiler.compile = lambda _, graph, inputs: aot_eager(graph, list(inputs))  # type: ignore[method-assign]
    Compiler.compile_layers = compile_layers  # type: ignore[method-assign]
    yield
    record.graphs = counters["stats"]["unique_graphs"]
    record.graph_breaks = list(counters["graph_break"])


@contextlib.contextmanager
def _waits(record: list[str]) -> Iterator[None]:
    """Record the waits for the GPU in the body."""
    fake_cuda.synchronizations.clear()
    yield
    record += [f"{name} at {at}" for name, at in fake_cuda.synchronizations]


def _memory_tracker() -> Any:
    """Return torch's memory tracker, without its statistics of modules.

    They need real tensors, and their hooks keep the inputs of a pipeline stage alive.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    class NoModules(contextlib.nullcontext[None]):
        is_bw = False

        def register_user_hooks(self, *_: Any) -> None: ...

        def clear_user_hooks(self) -> None: ...

    class Tracker(MemTracker):
        def __init__(self) -> None:
            super().__init__()
            self._mod_tracker: Any = NoModules()
            self.peak = 0

        def _update_peak_stats(self, _: Any) -> None:
            for device, use in self._curr_mem_snap.items():
                if device.type == "cuda":
                    self.peak = max(self.peak, use["Total"])

    return Tracker()


class Samples:
    """Data set of one source, whose samples contain only one token."""

    sources = (0,)

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


_WAITING = ("aten.index_put_.default", "aten.index_put.default")
"""Operations in which some versions of torch read values on the host, unseen by fake tensors."""


@contextlib.contextmanager
def watch(record: Record, length: int = 0) -> Iterator[list[int]]:
    """Record copies, attention and communication in the body, and count all operations.

    With the `length` of a sequence, also record what makes a matrix of its tokens' pairs.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    operations = [0]

    class Watch(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def is_infra_mode(cls) -> bool:
            """Return True: with another mode torch would run compiled layers uncompiled."""
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "aten" and torch.is_inference_mode_enabled():
                # autograd would have divided the operation
                with self:
                    out = func.decompose(*args, **kwargs or {})
                if out is not NotImplemented:
                    return out
            name = str(func)
            operations[0] += 1
            if name.startswith("c10d."):
                fake_cuda.in_capture(name)
                record.communication.append(_communication(name, args))
            if name in _WAITING and args[0].is_cuda:
                fake_cuda.synchronizations.append((name, fake_cuda.place()))
            out = func(*args, **kwargs or {})
            if "attention" in name:
                record.attention.append(name)
            for made in tree_iter(out):
                if isinstance(made, torch.Tensor) and made.shape[-2:] == (length, length):
                    record.squares.append(f"{name} at {fake_cuda.place()}")
            if name.startswith(("aten._to_copy", "aten.copy_")):
                _record_copy(record, name, args, kwargs or {}, out)
            return out

    with Watch():
        yield operations


def _record_copy(record: Record, name: str, args: Any, kwargs: Any, out: Any) -> None:
    """Record a copy between host and GPU if the host waits for it.

    It does so for ordinary memory, even if the copy is said not to block.
    """
    target, source = args[:2] if name.startswith("aten.copy_") else (out, args[0])
    if source.device.type == target.device.type:
        return
    fake_cuda.in_capture(f"{source.device.type} to {target.device.type}")
    host = source if source.device.type == "cpu" else target
    with _disable_current_modes():
        pinned = host.is_pinned()
    if pinned and (kwargs.get("non_blocking") or args[2:] == (True,)):
        return
    what = f"{source.device.type} to {target.device.type} {list(source.shape)}"
    if target.device.type == "cuda":
        record.copies.append(f"{what} at {fake_cuda.place()}")
    else:
        fake_cuda.synchronizations.append((what, fake_cuda.place()))


def _communication(name: str, args: Any) -> Communication:
    """Return the record of a call of c10d: its tensors, its group, and the peer of a message."""
    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_iter

    group = None
    for value in tree_iter(args):
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # a ReduceOp
                group = group or dist.ProcessGroup.unbox(value)
    assert group is not None, name
    operation, ranks = name.split(".")[1], dist.get_process_group_ranks(group)
    tensors = [value for value in tree_iter(args) if isinstance(value, torch.Tensor)]
    return Communication(
        operation,
        group.group_name,
        ranks,
        [f"{str(tensor.dtype)[6:]} {list(tensor.shape)}" for tensor in tensors],
        ranks[args[2]] if operation in ("send", "recv_") else None,
    )


def main() -> None:
    """Answer the cases of standard input, a JSON object per line, with records."""
    with tempfile.TemporaryDirectory(prefix="megacore-fake-gpu-") as folder:
        fake_cuda.load(Path(folder))
        import torch
        import torch.testing._internal.distributed.fake_pg

        torch.set_num_threads(1)
        prepare()
        for answer in _answers([Case(**json.loads(line)) for line in sys.stdin], Path(folder)):
            sys.stdout.write(answer + "\n")


def _answers(cases: list[Case], folder: Path) -> list[str]:
    """Run each case in a forked process, two at a time; return records or tracebacks in order."""
    files, running = [folder / f"{number}.json" for number in range(len(cases))], 0
    for case, file in zip(cases, files, strict=True):
        if running == 2:
            os.wait()
            running -= 1
        if os.fork() == 0:
            try:
                result = {"record": asdict(run(case))}
            except BaseException:
                result = {"error": f"{case}\n{traceback.format_exc()}"}
            file.write_text(json.dumps(result))
            os._exit(0)
        running += 1
    for _ in range(running):
        os.wait()
    return [file.read_text() for file in files]


if __name__ == "__main__":
    main()
