"""Executor of pipeline schedules.

Receives between stages are posted before their use, so that messages are transferred while a stage
computes. Sends are waited for only at the end, or when too many are in transit.

On a GPU a posted receive is a kernel that runs until the message arrives. Calls of the host that
wait for all kernels, as CUDA may in order to load the code of a new one, then wait for the sender.
So a receive is never posted before the passes of its own stage that its message depends on. Two
stages could still wait for each other, if both load code at a time: passes that run for the first
time post a receive only when they need its message.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.parallel.collectives import wait_phase
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.shared_memory import ADDRESS
from megacore.pipeline_parallel.schedules import (
    Direction,
    Message,
    Pass,
    Pipeline,
    StagePasses,
)

AHEAD = 2
"""Most receives posted at any time: the current one, and the next, which is transferred at the same
time."""


class Mailbox:
    """Messages of one stage during one run of a schedule.

    NCCL takes the messages of a process group in order. Messages that could be in different orders
    on the two sides therefore use different channels of the mesh. gloo matches messages by tag.
    With shared memory, gloo carries only the address of a message, unless no slot is free.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        expected: Iterable[tuple[Message, int]],
        shape: Callable[[Message], torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        *,
        ahead: int = AHEAD,
        backlog: int | None = None,
    ) -> None:
        """Post the first receives.

        Args:
            mesh: this process's groups.
            expected: all messages that this stage receives, in the order of its passes, each with
                the number of this stage's first passes that it depends on.
            shape: function that returns a message's shape.
            dtype: type of every message.
            device: device that receives the messages.
            ahead: maximum number of posted receives; 0 posts each when its message is needed.
            backlog: maximum number of messages in transit; None if the schedule limits them. Needed
                only for forward passes without backward passes, in which a stage may run ahead of
                the next.
        """
        self._mesh, self._memory = mesh, mesh.messages
        self._expected = deque(expected)
        self._started = 0
        self._shape, self._dtype, self._device = shape, dtype, device
        self._ahead, self._backlog = ahead, backlog
        self._posted: deque[tuple[Message, Tensor, dist.Work]] = deque()
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()
        self._post()

    def receive(self, message: Message) -> Tensor:
        """Wait for the next message, which must be `message`, and return it."""
        if not self._posted:
            self._post_next()
        posted, tensor, work = self._posted.popleft()
        assert posted == message, f"{posted} was posted where {message} is due"
        self._post()
        with self._mesh.time(wait_phase(self._mesh.pipeline_parallel)):
            work.wait()
            if self._memory is None:
                return tensor
            address, tensor = tensor, self._empty(message)
            if not self._memory.take(message.source, address, tensor):
                self._start_receive(message, tensor, _tag(message, whole=True)).wait()
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send without waiting; `tensor` is kept until it is sent."""
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()
        if self._backlog is not None and len(self._sent) >= self._backlog:
            self._wait_for_oldest()
        tensor = tensor.contiguous()
        if self._memory is not None:
            address = self._memory.put(message.destination, tensor)
            self._start_send(
                message, self._memory.no_address() if address is None else address, _tag(message)
            )
            if address is not None:
                return
        self._start_send(message, tensor, _tag(message, whole=True))

    def count_pass(self) -> None:
        """Count a pass that has been started, and post the receives that depended on it."""
        self._started += 1
        self._post()

    def close(self) -> None:
        """Wait until all messages have been sent."""
        while self._sent:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        with self._mesh.time(wait_phase(self._mesh.pipeline_parallel)):
            self._sent.popleft()[1].wait()

    def _post(self) -> None:
        """Post receives of messages that depend only on passes that have been started."""
        while (
            len(self._posted) < self._ahead
            and self._expected
            and self._expected[0][1] <= self._started
        ):
            self._post_next()

    def _post_next(self) -> None:
        message, _ = self._expected.popleft()
        whole = self._memory is None
        tensor = self._empty(message) if whole else torch.empty(ADDRESS, dtype=torch.int64)
        work = self._start_receive(message, tensor, _tag(message, whole=whole))
        self._posted.append((message, tensor, work))

    def _empty(self, message: Message) -> Tensor:
        return torch.empty(self._shape(message), dtype=self._dtype, device=self._device)

    def _start_send(self, message: Message, tensor: Tensor, tag: int) -> None:
        work = dist.isend(
            tensor, group=self._channel(message), group_dst=message.destination, tag=tag
        )
        assert work is not None
        self._sent.append((tensor, work))

    def _start_receive(self, message: Message, tensor: Tensor, tag: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._channel(message), group_src=message.source, tag=tag)
        assert work is not None
        return work

    def _channel(self, message: Message) -> dist.ProcessGroup:
        return self._mesh.channels[message.channel]


def _tag(message: Message, *, whole: bool = False) -> int:
    """Return the tag of a whole message, or of its address in shared memory."""
    return 2 * message.number + whole


class StageWork(Protocol):
    """Computation of a stage for one micro batch and one of its chunks."""

    def forward(self, micro_batch: int, chunk: int, hidden: Tensor | None) -> Tensor:
        """Compute the outgoing hidden states, or a loss, from the incoming hidden states.

        `hidden` is None for the chunk that takes tokens.
        """
        ...

    def backward(
        self, micro_batch: int, chunk: int, output: GradientEdge, grad: Tensor | None
    ) -> None:
        """Backpropagate from `output`; `grad` is its gradient, None for a loss."""
        raise AssertionError("a forward-only schedule has a backward pass")

    def weight_gradients(self, micro_batch: int, chunk: int) -> None:
        """Compute what a backward pass has delayed."""
        raise AssertionError("a forward-only schedule has weight gradients")


class Executor:
    """Executor of one rank's part of a pipeline; with a single stage there are no messages."""

    _work: StageWork
    _mailbox: Mailbox
    _in_flight: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]]
    """Input and output of each forward pass that awaits its backward pass, by micro batch and
    chunk. The graph keeps what it needs: the output can be freed as soon as it is sent."""

    def __init__(
        self, mesh: ProcessMesh, pipeline: Pipeline, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Create the executor.

        Args:
            mesh: this process's groups.
            pipeline: stages and chunks.
            dtype: type of the hidden states.
            device: device of the hidden states.
        """
        self._mesh, self._pipeline = mesh, pipeline
        self._dtype, self._device = dtype, device
        self._stage = mesh.pipeline_parallel.rank

    def run(
        self,
        stage: StagePasses,
        work: StageWork,
        shape: Callable[[Message], torch.Size],
        *,
        ahead: int = AHEAD,
    ) -> None:
        """Run all passes of this stage.

        Args:
            stage: passes of this stage.
            work: computation of a pass.
            shape: function that returns the shape of a message that this stage receives.
            ahead: see `Mailbox`; must be 0 if a pass may be the first of its kind on this device.
        """
        receives = (self._pipeline.receive(self._stage, each) for each in stage.passes)
        expected = [
            (message, needed)
            for message, needed in zip(receives, stage.dependencies, strict=True)
            if message is not None
        ]
        backlog = None if torch.is_grad_enabled() else 2 * self._pipeline.stages
        self._work, self._in_flight = work, {}
        self._mailbox = Mailbox(
            self._mesh,
            expected,
            shape,
            self._dtype,
            self._device,
            ahead=ahead,
            backlog=backlog,
        )
        for each in stage.passes:
            self._run_pass(each)
            self._mailbox.count_pass()
        self._mailbox.close()

    def _run_pass(self, each: Pass) -> None:
        """Receive the message of a pass, compute it, and send its result."""
        place = each.micro_batch, each.chunk
        message = self._pipeline.receive(self._stage, each)
        received = None if message is None else self._mailbox.receive(message)
        result: Tensor | None = None
        match each.direction:
            case Direction.FORWARD:
                training = torch.is_grad_enabled()
                if received is not None and training:
                    received.requires_grad_()
                output = self._work.forward(*place, received)
                if training:
                    self._in_flight[place] = received, get_gradient_edge(output)
                result = output.detach()
            case Direction.BACKWARD:
                hidden, edge = self._in_flight.pop(place)
                self._work.backward(*place, edge, received)
                result = None if hidden is None else hidden.grad
            case Direction.WEIGHTS:
                self._work.weight_gradients(*place)
        message = self._pipeline.send(self._stage, each)
        if message is not None:
            assert result is not None
            self._mailbox.send(message, result)
