"""GPUs that are not there: torch's CUDA paths run on fake tensors.

Fake tensors have shape, type and device but no values, so a step of any size takes seconds. Values,
streams and NCCL are not emulated. `load` must run before torch is imported, because torch asks for
its CUDA hooks only once.
"""

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
GPUS = 8
"""Number of fake GPUs on a host."""
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    is_integrated=0,
    is_multi_gpu_board=0,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
    uuid="0",
)
"""Properties of each fake GPU."""

_WITHOUT_RESULT = (
    *("_lazy_init", "init", "empty_cache", "reset_peak_memory_stats"),
    *("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all"),
)
_BYTES = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


def load(directory: Path) -> None:
    """Compile the device guard and the hooks into `directory`, and load them after torch's library.

    Raises RuntimeError if torch is imported already, CalledProcessError if the compiler fails.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, and keeps the hooks that it found")
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch_directory = Path(found.origin).parent
    libraries = torch_directory / "lib"
    built = directory / "fake_cuda.so"
    subprocess.run(
        [
            *("c++", "-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(built)),
            *(f"-I{torch_directory / 'include'}", f"-L{libraries}", "-lc10", "-ltorch_cpu"),
        ],
        check=True,
    )
    ctypes.CDLL(str(libraries / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    _library.append(ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL))


_library: list[ctypes.CDLL] = []


def _host_register(address: int, size: int, _: int) -> int:
    return int(_library[0].fake_host_register(ctypes.c_void_p(address), ctypes.c_size_t(size)))


def _host_unregister(address: int) -> int:
    return int(_library[0].fake_host_unregister(ctypes.c_void_p(address)))


class Event:
    """CUDA event; counts how many were made, and how many exist."""

    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        Event.made += 1

    def record(self, *_: Any) -> None:
        in_capture("event.record")

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        in_capture("event.synchronize")

    def query(self) -> bool:
        in_capture("event.query")
        return True

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


class Stream:
    """CUDA stream on which nothing runs."""

    device_index = device_type = stream_id = cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None:
        synchronizations.append(("stream.synchronize", place()))

    def wait_stream(self, _: "Stream") -> None: ...

    def wait_event(self, _: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class Graph:
    """CUDA graph that contains nothing."""

    captures = replays = 0
    generators = 0
    """Number of generators registered with all graphs."""
    capturing = False

    def register_generator_state(self, _: Any) -> None:
        Graph.generators += 1

    def replay(self) -> None:
        Graph.replays += 1


@contextlib.contextmanager
def capture(graph: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
    """Surround a capture, in which calls that CUDA refuses or cannot repeat are recorded."""
    assert capture_error_mode == "thread_local", "a pinned allocation of another thread would fail"
    before = len(synchronizations)
    Graph.capturing, Graph.captures = True, Graph.captures + 1
    try:
        yield
    finally:
        Graph.capturing = False
        captured.extend(synchronizations[before:])


def in_capture(what: str) -> None:
    """Record a call if a graph is captured."""
    if Graph.capturing:
        captured.append((what, place()))


captured: list[tuple[str, str]] = []
"""Calls in a capture that it must not contain: name and place in the project's code."""
synchronizations: list[tuple[str, str]] = []
"""Calls that wait for the GPU: name and place in the project's code."""


def place() -> str:
    """Return file and line of the innermost frame in megacore or DeepSpeed."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for package in ("/megacore/", "/deepspeed/"):
            if package in name:
                return f"{package[1:]}{name.rsplit(package, 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class _OnDevice(contextlib.nullcontext[None]):
    """Context of a device, which is the current one anyway."""

    def __init__(self, _: Any) -> None:
        super().__init__()


def _no_result() -> Callable[..., None]:
    """Return a new function: torch.compile tells functions of torch apart by identity."""
    return lambda *_, **__: None


def _default_generators() -> tuple[Any, ...]:
    """Return a generator of random numbers for each GPU, which a captured graph must not seed."""
    import torch

    class DefaultGenerator(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            in_capture("generator.manual_seed")
            return super().manual_seed(seed)

        def graphsafe_get_state(self) -> torch.Generator:
            return self

        def graphsafe_set_state(self, _: torch.Generator) -> torch.Generator:
            return self

    return tuple(DefaultGenerator() for _ in range(GPUS))


def _answers(local_rank: int, state: Any) -> dict[str, Any]:
    """Return what replaces the functions and classes of torch.cuda, by name."""
    import torch

    current = [local_rank]

    def index(device: Any = None) -> int:
        if device is None:
            return current[0]
        number = device if isinstance(device, int) else torch.device(device).index
        return current[0] if number is None else number

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: GPUS,
        "set_device": lambda device: current.__setitem__(0, index(device)),
        "current_device": lambda: current[0],
        "get_device_name": lambda _=None: PROPERTIES.name,
        "get_device_capability": lambda _=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda _=None: PROPERTIES,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda _=None: (79 * 2**30, PROPERTIES.total_memory),
        "synchronize": lambda _=None: synchronizations.append(("cuda.synchronize", place())),
        "current_stream": lambda _=None: Stream(),
        "default_stream": lambda _=None: Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "device": _OnDevice,
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": capture,
        "is_current_stream_capturing": lambda: Graph.capturing,
        "get_rng_state": lambda _="cuda": state,
        "get_rng_state_all": lambda: [state] * GPUS,
        "memory_stats": lambda _=None: {},
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=_host_register, cudaHostUnregister=_host_unregister
        ),
        "_is_in_bad_fork": lambda: False,
    }
    for name in _WITHOUT_RESULT:
        answers[name] = _no_result()
    for name in _BYTES:
        answers[name] = lambda _=None: 0
    return answers


def install(local_rank: int) -> None:
    """Let torch.cuda answer as if there were GPUs, with `local_rank` as the current one."""
    import torch
    from torch._C._distributed_c10d import FakeWork
    from torch._subclasses import fake_tensor

    import megacore.hardware

    _library[0].fake_register()
    cuda: Any = torch.cuda
    generators = _default_generators()
    for name, answer in _answers(local_rank, generators[0].get_state()).items():
        setattr(cuda, name, answer)
        if hasattr(cuda.random, name):
            setattr(cuda.random, name, answer)
    cuda.default_generators = generators
    cuda.nvtx.range_push, cuda.nvtx.range_pop = (lambda *_: 0), (lambda *_: 0)
    cuda.nccl.version = lambda *_: (2, 29, 7)
    torch._C._ensureCUDADeviceGuardSet = _no_result()  # type: ignore[attr-defined]
    fake_tensor.init_gpu_context = _no_result()  # type: ignore[assignment]
    # torch.tensor(x, device="cuda") stays fake
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[assignment,method-assign]
    megacore.hardware.cuda_capability = lambda: PROPERTIES.major * 10  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]
    torch.Tensor.record_stream = _no_result()  # type: ignore[method-assign,assignment]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign,assignment]
    FakeWork.is_completed = lambda _: True
    _register_fused()
    _record_reads()


_FUSED = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")
"""Operations of a GPU that a CPU build of torch would divide into several."""
_fused_operations: list[Any] = []


def _register_fused() -> None:
    """Let the operations of `_FUSED` be one operation on a fake GPU."""
    import torch

    def fused(*_: Any, **__: Any) -> None:
        raise AssertionError("fake tensors do not run kernels")

    if not _fused_operations:
        library = torch.library.Library("aten", "IMPL")
        for name in _FUSED:
            library.impl(name, fused, "CUDA")
        _fused_operations.append(library)


def _apply(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Convert a module's tensors; torch would exchange fake parameters, which have references."""
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            parameter.data = function(parameter.data)
        for name, buffer in each.named_buffers(recurse=False):
            setattr(each, name, function(buffer))
    return module


def _record_reads() -> None:
    """Record the methods that read a tensor's values on the host, and let them return values.

    Floating-point numbers are 1, an integer is 0 (no overflow), and integers of a list count from
    0 (an order).
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    def values(tensor: torch.Tensor) -> Any:
        with _disable_current_modes():
            if tensor.dtype.is_floating_point:
                return torch.ones(tensor.shape).tolist()
            return torch.arange(tensor.numel()).view(tensor.shape).tolist()

    def one(tensor: torch.Tensor) -> float:
        return 1.0 if tensor.dtype.is_floating_point else 0

    reads: dict[str, Callable[[torch.Tensor], Any]] = {
        "tolist": values,
        "item": one,
        "__bool__": lambda _: True,
        "__float__": lambda _: 1.0,
        "__int__": lambda _: 1,
    }
    for kind in (torch.Tensor, FakeTensor):
        for name, answer in reads.items():
            if name in vars(kind) or kind is torch.Tensor:
                setattr(kind, name, _recorded(name, getattr(kind, name), answer))


def _recorded(name: str, original: Any, answer: Callable[[Any], Any]) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    def read(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if tensor.device.type == "cuda":
            synchronizations.append((name, place()))
            return answer(tensor)
        if isinstance(tensor, FakeTensor):
            return answer(tensor)
        return original(tensor, *arguments, **options)

    return read


@contextlib.contextmanager
def real_tensors(module: Any, name: str) -> Iterator[None]:
    """Let a function make real tensors, although fake ones are made around it."""
    from torch.utils._python_dispatch import _disable_current_modes

    original = getattr(module, name)

    def real(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return original(*arguments, **options)

    setattr(module, name, real)
    try:
        yield
    finally:
        setattr(module, name, original)
