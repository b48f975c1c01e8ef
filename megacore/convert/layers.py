"""Where two models that should be the same begin to differ."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[], object]
"""Runs a model once."""


@contextmanager
def recorded_outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the output of each named module in the forward pass that runs inside the block."""
    outputs: dict[str, Tensor] = {}
    handles = [model.get_submodule(name).register_forward_hook(_keep(outputs, name)) for name in names]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _keep(outputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs[name] = hidden.detach().float()

    return hook


def layer_differences(
    ours: nn.Module,
    theirs: nn.Module,
    pairs: list[tuple[str, str]],
    runs: Iterable[tuple[Run, Run]],
    tolerance: float,
) -> tuple[dict[str, float], str | None]:
    """Compare the outputs of each pair of modules, in one run of both models after the other.

    Args:
        ours: our model.
        theirs: the model of transformers.
        pairs: modules of ours and of theirs, in the order in which they run.
        runs: for each sample, what runs our model on it and what runs theirs.
        tolerance: of the logits.

    Returns:
        The largest absolute difference by our module's name, in the order of `pairs`, and the first name whose
        difference exceeds a tenth of `tolerance`, relative to its largest value where that is above 1. A logit
        is a sum over hidden values, so it can exceed the tolerance when none of them does.
    """
    differences = {name: 0.0 for name, _ in pairs}
    differing: set[str] = set()
    for run_ours, run_theirs in runs:
        with (
            torch.inference_mode(),
            recorded_outputs(ours, [pair[0] for pair in pairs]) as our_outputs,
            recorded_outputs(theirs, [pair[1] for pair in pairs]) as their_outputs,
        ):
            run_ours()
            run_theirs()
        for our_name, their_name in pairs:
            reference = our_outputs[our_name]
            difference = float((reference - their_outputs[their_name]).abs().max())
            if not difference <= differences[our_name]:
                differences[our_name] = difference
            if not difference <= tolerance / 10 * max(1.0, float(reference.abs().max())):
                differing.add(our_name)
    return differences, next((name for name, _ in pairs if name in differing), None)
