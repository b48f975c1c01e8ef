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
_InFlight = dict[tuple[int, int], tuple[Tensor | None, GradientEdge]]


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
        ...

    def weight_gradients(self, micro_batch: int, chunk: int) -> None:
        """Compute what a backward pass has delayed."""
        ...


class Executor:
    """Executor of one rank's part of a pipeline; with a single stage there are no messages."""

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
        mailbox = Mailbox(
            self._mesh,
            [
                (message, needed)
                for message, needed in zip(receives, stage.dependencies, strict=True)
                if message is not None
            ],
            shape,
            self._dtype,
            self._device,
            ahead=ahead,
            backlog=None if torch.is_grad_enabled() else 2 * self._pipeline.stages,
        )
        in_flight: _InFlight = {}
        for each in stage.passes:
            match each.direction:
                case Direction.FORWARD:
                    self._forward(each, work, mailbox, in_flight)
                case Direction.BACKWARD:
                    self._backward(each, work, mailbox, in_flight)
                case Direction.WEIGHTS:
                    work.weight_gradients(each.micro_batch, each.chunk)
            mailbox.count_pass()
        mailbox.close()

    def _forward(self, each: Pass, work: StageWork, mailbox: Mailbox, in_flight: _InFlight) -> None:
        hidden = self._receive(each, mailbox)
        training = torch.is_grad_enabled()
        if hidden is not None and training:
            hidden.requires_grad_()
        output = work.forward(each.micro_batch, each.chunk, hidden)
        if training:
            # The graph keeps what it needs: the output can be freed as soon as it is sent.
            in_flight[each.micro_batch, each.chunk] = hidden, get_gradient_edge(output)
        self._send(each, mailbox, output.detach())

    def _backward(
        self, each: Pass, work: StageWork, mailbox: Mailbox, in_flight: _InFlight
    ) -> None:
        grad = self._receive(each, mailbox)
        hidden, output = in_flight.pop((each.micro_batch, each.chunk))
        work.backward(each.micro_batch, each.chunk, output, grad)
        if hidden is not None:
            assert hidden.grad is not None
            self._send(each, mailbox, hidden.grad)

    def _receive(self, each: Pass, mailbox: Mailbox) -> Tensor | None:
        message = self._pipeline.receive(self._stage, each)
        return None if message is None else mailbox.receive(message)

    def _send(self, each: Pass, mailbox: Mailbox, tensor: Tensor) -> None:
        message = self._pipeline.send(self._stage, each)
        if message is not None:
            mailbox.send(message, tensor)
