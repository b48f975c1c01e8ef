"""Messages between pipeline stages: receives are posted ahead of their use, sends are never waited for in between."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.collectives import wait_phase
from megacore.parallel.mesh import ProcessMesh
from megacore.pipeline_parallel.schedules import Message

AHEAD = 2
"""Receives that are posted at any time: the one that is waited for and the next, which then travels meanwhile."""


class Mailbox:
    """One stage's messages of one run through a schedule.

    NCCL takes the messages of a process group in order, so those whose order on both sides is not the same by nature
    travel on different channels of the mesh; gloo matches them by tag.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        expected: Iterable[Message],
        shape: Callable[[Message], torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        *,
        backlog: int | None = None,
    ) -> None:
        """Prepare to receive.

        Args:
            mesh: this process's groups.
            expected: everything that this stage receives, in the order of its passes.
            shape: of a message.
            dtype: of every message.
            device: where messages are received.
            backlog: messages that may be on their way at a time; None where the schedule bounds them. Needed for
                forward passes alone, in which a stage may run ahead of the next.
        """
        self._mesh = mesh
        self._expected: Iterator[Message] = iter(expected)
        self._shape, self._dtype, self._device = shape, dtype, device
        self._backlog = backlog
        self._posted: deque[tuple[Message, Tensor, dist.Work]] = deque()
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()
        self._post()

    def receive(self, message: Message) -> Tensor:
        """Wait for the next message, which must be `message`, and return it."""
        posted, tensor, work = self._posted.popleft()
        assert posted == message, f"{posted} was posted where {message} is due"
        self._post()
        with self._mesh.time(wait_phase(self._mesh.pipeline_parallel)):
            work.wait()
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send without waiting; `tensor` is kept until it is gone."""
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()
        if self._backlog is not None and len(self._sent) >= self._backlog:
            self._wait_for_oldest()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._channel(message), group_dst=message.destination, tag=message.number)
        assert work is not None
        self._sent.append((tensor, work))

    def close(self) -> None:
        """Wait until everything that was sent has left."""
        while self._sent:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        with self._mesh.time(wait_phase(self._mesh.pipeline_parallel)):
            self._sent.popleft()[1].wait()

    def _post(self) -> None:
        while len(self._posted) < AHEAD:
            message = next(self._expected, None)
            if message is None:
                return
            tensor = torch.empty(self._shape(message), dtype=self._dtype, device=self._device)
            work = dist.irecv(tensor, group=self._channel(message), group_src=message.source, tag=message.number)
            assert work is not None
            self._posted.append((message, tensor, work))

    def _channel(self, message: Message) -> dist.ProcessGroup:
        return self._mesh.channels[message.channel]
