"""Runs any schedule: what a stage does, in the order that the schedule says."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.parallel.mesh import ProcessMesh
from megacore.pipeline_parallel.p2p import Mailbox
from megacore.pipeline_parallel.schedules import Direction, Message, Pass, Pipeline

_InFlight = dict[tuple[int, int], tuple[Tensor | None, GradientEdge]]


class StageWork(Protocol):
    """What a stage computes for one micro batch and one of its chunks."""

    def forward(self, micro_batch: int, chunk: int, hidden: Tensor | None) -> Tensor:
        """From the hidden states that arrived (None where the chunk takes tokens) to those that leave, or a loss."""
        ...

    def backward(self, micro_batch: int, chunk: int, output: GradientEdge, grad: Tensor | None) -> None:
        """Backpropagate from `output`; `grad` is its gradient, None for a loss."""
        ...


class Executor:
    """One rank's part of a pipeline; with one stage it just runs the passes."""

    def __init__(self, mesh: ProcessMesh, pipeline: Pipeline, dtype: torch.dtype, device: torch.device) -> None:
        """Prepare for runs.

        Args:
            mesh: this process's groups.
            pipeline: stages and chunks.
            dtype: of hidden states.
            device: where they are.
        """
        self._mesh, self._pipeline = mesh, pipeline
        self._dtype, self._device = dtype, device
        self._stage = mesh.pipeline_parallel.rank

    def run(self, passes: Sequence[Pass], work: StageWork, shape: Callable[[Message], torch.Size]) -> None:
        """Make all passes of this stage.

        Args:
            passes: of this stage, in order.
            work: what a pass computes.
            shape: of a message that this stage receives.
        """
        receives = (self._pipeline.receive(self._stage, each) for each in passes)
        mailbox = Mailbox(
            self._mesh,
            [message for message in receives if message is not None],
            shape,
            self._dtype,
            self._device,
            backlog=None if torch.is_grad_enabled() else 2 * self._pipeline.stages,
        )
        in_flight: _InFlight = {}
        for each in passes:
            if each.direction is Direction.FORWARD:
                self._forward(each, work, mailbox, in_flight)
            else:
                self._backward(each, work, mailbox, in_flight)
        mailbox.close()

    def _forward(self, each: Pass, work: StageWork, mailbox: Mailbox, in_flight: _InFlight) -> None:
        hidden = self._receive(each, mailbox)
        training = torch.is_grad_enabled()
        if hidden is not None and training:
            hidden.requires_grad_()
        output = work.forward(each.micro_batch, each.chunk, hidden)
        if training:
            # The graph keeps what it needs: the output itself may go as soon as it was sent.
            in_flight[each.micro_batch, each.chunk] = hidden, get_gradient_edge(output)
        self._send(each, mailbox, output.detach())

    def _backward(self, each: Pass, work: StageWork, mailbox: Mailbox, in_flight: _InFlight) -> None:
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
