"""CUDA graphs of a micro batch, with a graph on the CPU that replays recorded operations.

Like CUDA's it computes with the tensors and numbers of the capture, changes nothing in the capture,
and refuses to read a tensor or to seed a generator in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.config.run import RunConfig
from megacore.engine.build import Compiler, build_engine
from megacore.engine.cuda_graph import WARM_UP, MicroBatchGraph
from megacore.engine.native import NativeEngine
from megacore.errors import ConfigError
from megacore.models.base import LossTotals
from megacore.models.stage import Stage
from megacore.observe.timers import Timers
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rng import micro_batch_seed
from tests.train import _runs

SIZES = (4, 4, 2, 3)
"""Micro batches of each iteration."""


class RecordedGraph(TorchDispatchMode):
    """torch.cuda.CUDAGraph of CPU operations."""

    capturing: "RecordedGraph | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.generators: list[torch.Generator] = []
        self.calls: list[Any] = []
        self.replays = 0
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def register_generator_state(self, generator: torch.Generator) -> None:
        assert RecordedGraph.capturing is None
        self.generators.append(generator)

    @contextmanager
    def capture(self) -> Iterator[None]:
        RecordedGraph.capturing = self
        try:
            with self:
                yield
        finally:
            RecordedGraph.capturing = None
            for tensor, content in self._before.values():  # nothing was computed
                tensor.copy_(content)

    def take_state(self, generator: torch.Generator) -> None:
        """Let the operations that follow draw from a registered generator."""
        assert generator in self.generators
        self.calls.append(lambda: torch.default_generator.set_state(generator.get_state()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        if "out" in kwargs:
            self._keep(kwargs["out"])
        out = func(*args, **kwargs)
        outs = out if isinstance(out, tuple | list) else [out]
        fresh = [
            each if isinstance(each, Tensor) and result.alias_info is None else None
            for each, result in zip(outs, func._schema.returns * len(outs), strict=False)
        ]
        self._made |= {each.untyped_storage().data_ptr() for each in fresh if each is not None}
        self.calls.append((func, args, kwargs, fresh))
        return out

    def _keep(self, tensor: Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._made and address not in self._before:
            whole = tensor.new_empty(0).set_(tensor.untyped_storage())  # type: ignore[call-overload]
            self._before[address] = whole, whole.clone()

    def replay(self) -> None:
        self.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for call in self.calls:
                if callable(call):
                    call()
                    continue
                func, args, kwargs, fresh = call
                out = func(*args, **kwargs)
                outs = out if isinstance(out, tuple | list) else [out]
                for old, new in zip(fresh, outs, strict=True):
                    if old is not None:
                        old.copy_(new)


class DefaultGenerator:
    """A GPU's default generator; operations on the CPU draw from that of the CPU."""

    def graphsafe_get_state(self) -> "DefaultGenerator":
        return self

    def graphsafe_set_state(self, state: Any) -> None:
        if state is not self:
            assert RecordedGraph.capturing is not None
            RecordedGraph.capturing.take_state(state)

    def manual_seed(self, _: int) -> None:
        assert RecordedGraph.capturing is None, "a generator is seeded in a capture"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda _: None)
    replaced: dict[str, Any] = {
        "CUDAGraph": RecordedGraph,
        "graph": lambda graph, stream, capture_error_mode: graph.capture(),
        "Stream": lambda _: stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda _: stream,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "default_generators": (DefaultGenerator(),),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)


def config(*, graphs: bool, dropout: float = 0.1, recompute: str = "none") -> RunConfig:
    return _runs.config(
        model={"hidden_dropout": dropout, "attention_dropout": dropout},
        optim={"loss_scale": {"initial": 2.0**28, "hysteresis": 1}},
        train={"cuda_graphs": graphs, "recompute": recompute},
    )


def build(run: RunConfig, precision: str, device: str = "cpu") -> NativeEngine:
    mesh = ProcessMesh.serial()
    stage = Stage(run, _runs.VOCAB_SIZE, mesh, special_tokens=_runs.TOKENS, device=device)
    return NativeEngine(stage, run, precision)


def iterations(engine: NativeEngine) -> list[Any]:
    """Return what each iteration computes from new tokens, and the weights at the end."""
    random = torch.Generator().manual_seed(1)
    results: list[Any] = []
    for number, count in enumerate(SIZES):
        shape = count, 2, _runs.SEQ_LENGTH + 1
        tokens = torch.randint(0, _runs.VOCAB_SIZE, shape, generator=random)
        seeds = [micro_batch_seed(number, sample) for sample in range(count)]
        tokens = tokens.to(engine.device)
        engine.forward_backward(iter(tokens), seeds)
        update = engine.update(1e-2, 0.1)
        results.append((update.losses, str(update.grad_norm), update.applied, engine.loss_scale))
        # An evaluation in between computes without the graph.
        totals = LossTotals(len(engine.loss_names), None, engine.device)
        results.append(engine.loss_sum(iter(tokens), [2] * count, totals).tolist())
    weights = engine.tensors()
    return [*results, {name: tensor for name, tensor in weights.items() if tensor is not None}]


@pytest.mark.parametrize(
    ("precision", "recompute"), [("fp32", "none"), ("bf16", "full"), ("fp16", "selective")]
)
def test_iterations_compute_the_same_with_a_graph(
    cuda: None, precision: str, recompute: str
) -> None:
    *expected, weights = iterations(build(config(graphs=False, recompute=recompute), precision))
    engine = build(config(graphs=True, recompute=recompute), precision)
    *results, graph_weights = iterations(engine)
    assert results == expected
    for name, tensor in weights.items():
        assert torch.equal(tensor, graph_weights[name]), name
    graph: Any = engine._graph and engine._graph._graph
    assert graph.replays == sum(SIZES[1:])
    assert engine.kernels["passes"] == "CUDA graph"
    scales = {result[3] for result in expected[::2]}
    assert len(scales) > 1 or precision != "fp16"  # the scale changes between replays


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_iterations_compute_the_same_with_a_graph_on_a_gpu(precision: str, recompute: str) -> None:
    """The first losses have the same bits; later ones follow from atomic additions."""
    expected, results = (
        iterations(build(config(graphs=graphs, recompute=recompute), precision, "cuda:0"))[:-1:2]
        for graphs in (False, True)
    )
    assert results[0][0] == expected[0][0]
    for result, other in zip(results, expected, strict=True):
        assert result[0] == pytest.approx(other[0], rel=1e-2, nan_ok=True)
        assert result[2:] == other[2:]


def test_a_graph_draws_from_a_generator_for_each_seeding(cuda: None) -> None:
    """Of the embedding, of each layer and its attention, and again for recomputation."""
    engine = build(config(graphs=True, recompute="full"), "fp32")
    iterations(engine)
    graph: Any = engine._graph and engine._graph._graph
    assert len(graph.generators) == 1 + 2 * 2 * 2
    assert len({generator.initial_seed() for generator in graph.generators}) == 1 + 2


def test_without_dropout_a_graph_has_no_generator(cuda: None) -> None:
    engine = build(config(graphs=True, dropout=0.0), "fp32")
    iterations(engine)
    graph: Any = engine._graph and engine._graph._graph
    assert graph.generators == []


def test_passes_that_wait_for_the_gpu_are_refused(cuda: None) -> None:
    def passes(ids: Tensor, seed: int, scale: Tensor) -> Tensor:
        return (ids * ids.sum().item() * scale).sum().view(1)

    timers = Timers(torch.device("cpu"))
    graph = MicroBatchGraph(passes, ProcessMesh(timers=timers), torch.device("cpu"))
    batches, seeds = [torch.ones(2, 3)] * (WARM_UP + 1), list(range(WARM_UP + 1))
    assert graph.run(iter(batches[1:]), seeds[1:], 0.5) == [18.0] * WARM_UP
    with pytest.raises(
        ConfigError,
        match=r"^train.cuda_graphs is true, but .* cannot be captured in a CUDA graph "
        r"\(operation not permitted when stream is capturing\): set it to false$",
    ):
        graph.run(iter(batches), seeds, 0.5)
    assert torch.cuda.default_generators[0].graphsafe_get_state() is not None


def test_memory_that_does_not_suffice_for_a_capture_is_reported_as_such(cuda: None) -> None:
    calls = []

    def passes(ids: Tensor, seed: int, scale: Tensor) -> Tensor:
        calls.append(ids)
        if len(calls) > WARM_UP:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scale.view(1)

    graph = MicroBatchGraph(passes, ProcessMesh.serial(), torch.device("cpu"))
    graph.run(iter([torch.ones(1, 1)] * WARM_UP), range(WARM_UP), 1.0)
    with pytest.raises(torch.OutOfMemoryError):
        graph.run(iter([torch.ones(1, 1)]), [0], 1.0)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^train\.cuda_graphs is true, which needs a GPU"):
        build_engine(
            config(graphs=True),
            _runs.VOCAB_SIZE,
            ProcessMesh.serial(),
            special_tokens=_runs.TOKENS,
            device=torch.device("cpu"),
            precision="fp32",
        )


@pytest.mark.slow
def test_a_capture_compiles_nothing(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even layers that seed dropout in between, whose seed is of the same kind as before."""
    torch._dynamo.reset()
    monkeypatch.setattr(Compiler, "__call__", lambda self, graph, inputs: graph.forward)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    engine = build(config(graphs=True, recompute="selective"), "fp32")
    Compiler(torch.device("cpu")).compile_layers(engine._stage.chunks)
    # A dispatch mode would keep the layers from being compiled.
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(DefaultGenerator, "graphsafe_set_state", lambda *_: None)
    counters.clear()
    tokens = torch.ones(WARM_UP, 2, _runs.SEQ_LENGTH + 1, dtype=torch.int64)
    graphs = []
    for _ in range(2):
        engine.forward_backward(iter(tokens), list(range(WARM_UP)))
        graphs.append(counters["stats"]["unique_graphs"])
    assert engine._graph is not None
    assert engine._graph._graph is not None
    assert graphs[0] == graphs[1] > 0


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"engine": "deepspeed"}, "engine is deepspeed, which waits for the GPU in every pass"),
        (
            {"parallel": {"tensor_model_parallel_size": 2}, "launch": {"nproc_per_node": 2}},
            "parallel.tensor_model_parallel_size is 2, but a graph holds no communication",
        ),
        (
            {"parallel": {"context_parallel_size": 2}, "launch": {"nproc_per_node": 2}},
            "parallel.context_parallel_size is 2, but a graph holds no communication",
        ),
        (
            {"parallel": {"pipeline_model_parallel_size": 2}, "launch": {"nproc_per_node": 2}},
            "parallel.pipeline_model_parallel_size is 2, but a graph holds no communication",
        ),
    ],
)
def test_configurations_that_a_graph_cannot_hold_are_refused(
    sections: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"train.cuda_graphs is true and {sentence}: set "):
        _runs.config(train={"cuda_graphs": True}, **sections)
