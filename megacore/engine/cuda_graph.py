"""CUDA graph of a micro batch's forward and backward pass (`train.cuda_graphs`).

The host starts a graph's kernels with one call instead of thousands. The graph has only computation
of one rank: gradients accumulate in the main gradients, which exist before it, and are cleared,
summed over the replicas and applied outside. Megatron-LM's full-iteration graph also contains the
communication.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rng import GraphSeed

WARM_UP = 3
"""Least number of micro batches computed before the capture, as torch recommends: kernels are
compiled and libraries allocate workspaces, which must not happen in it. They are the run's first
ones."""


class MicroBatchGraph:
    """Forward and backward of micro batches of one shape: some without a graph, then its replays.

    What changes from replay to replay is in tensors that the graph reads: the ids, the factor on
    the loss, the seeds of dropout. Its activations stay allocated.
    """

    def __init__(
        self,
        passes: Callable[[Tensor, int, Tensor], Tensor],
        mesh: ProcessMesh,
        device: torch.device,
    ) -> None:
        """Create the stream and the tensors that the graph reads.

        Args:
            passes: function that runs forward and backward of ids [b, width] with a dropout seed
                and a factor on the loss, and returns the mean losses [terms]. It must not wait for
                the GPU, nor communicate.
            mesh: this process's groups, for the timers.
            device: GPU of this process.
        """
        self._passes, self._mesh, self._device = passes, mesh, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scale = torch.ones((), device=device)
        self._seed = GraphSeed()
        self._warmed_up = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ids: Tensor
        self._losses: Tensor

    def run(self, batches: Iterator[Tensor], seeds: Sequence[int], scale: float) -> list[Tensor]:
        """Accumulate the gradients of one global batch.

        Args:
            batches: iterator over the ids [b, width] of each micro batch, on the GPU.
            seeds: dropout seed of each micro batch.
            scale: factor on the loss of a micro batch.

        Returns:
            Mean losses [terms] of each micro batch.

        Raises:
            ConfigError: the passes cannot be captured.
        """
        self._scale.fill_(scale)
        compute = self._replay if self._warmed_up >= WARM_UP else self._warm_up
        return [compute(next(batches), seed) for seed in seeds]

    def _warm_up(self, batch: Tensor, seed: int) -> Tensor:
        """Run the passes on the stream of the capture, whose workspaces they allocate."""
        self._seed.record(seed)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            losses = self._passes(batch, self._seed, self._scale)
        current.wait_stream(self._stream)
        self._warmed_up += 1
        return losses

    def _replay(self, batch: Tensor, seed: int) -> Tensor:
        """Run the graph, which the first call captures."""
        if self._graph is None:
            self._ids = batch.clone()
            self._graph = self._capture()
        assert batch.shape == self._ids.shape, "the micro batches have different shapes"
        with self._mesh.time("forward-backward"):
            self._ids.copy_(batch)
            self._seed.replay(seed)
            self._graph.replay()
            return self._losses.clone()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture the passes, which does not run their kernels.

        Other threads, which load samples and watch NCCL, may use the GPU meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        self._seed.register(graph, self._device)
        timers = self._mesh.timers
        # The end of a capture fails after a failure in it, and would hide it.
        failures: list[Exception] = []
        try:
            with (
                timers.paused() if timers else nullcontext(),  # events would be part of the graph
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
                _noted(failures),
                self._seed.captured(),
            ):
                self._losses = self._passes(self._ids, self._seed, self._scale)
        except Exception as error:
            cause = failures[0] if failures else error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise ConfigError(
                "train.cuda_graphs is true, but the forward and backward pass cannot be captured "
                f"in a CUDA graph ({reason}): set it to false"
            ) from cause
        return graph


@contextmanager
def _noted(failures: list[Exception]) -> Iterator[None]:
    """Add an exception of the body to `failures`."""
    try:
        yield
    except Exception as error:
        failures.append(error)
        raise
