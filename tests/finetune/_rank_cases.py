"""What each rank of a group computes of the tasks' scores."""

from pathlib import Path
from typing import Any

from tests._dist import still_alive

MODELS = {"classification": "deberta", "seq2seq": "blenderbot", "causal_lm": "gpt2"}
COUNTS = (9, 3, 8)
"""Samples of a split: with two ranks and batches of 4 the last batch is filled up by 7, by 5, and
by none."""
BATCH = 4


def case_config(root: Path, kind: str) -> Any:
    """The configuration of one of MODELS, all of whose files are below `root`."""
    from tests.finetune._tiny_models import tiny_config

    metrics = {"seq2seq": {"metrics": ["bleu", "rouge1", "rougeLsum"]}}
    return tiny_config(
        root / kind / "model", root / kind / "data", kind, task=metrics.get(kind, {})
    )


def write_cases(root: Path) -> None:
    """Everything that `run` reads."""
    from tests.finetune._tiny_models import prepare, write_data, write_model

    for kind, model in MODELS.items():
        write_model(root / kind / "model", model)
        write_data(root / kind / "data", kind, valid=12)
        prepare(case_config(root, kind), root / kind)


def run(root: Path) -> dict[str, Any]:
    """By task the metrics of the first samples of the validation split, and the sum of the
    weights."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from megacore.finetune.task import build_task

    accelerator = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    for kind in MODELS:
        task = build_task(
            case_config(root, kind), root / kind / "examples", root / kind / "pretrained"
        )
        model = task.build_model()
        found[f"{kind} weights"] = sum(
            float(weight.detach().abs().double().sum()) for weight in model.parameters()
        )
        model = accelerator.prepare(model).eval()
        for count in COUNTS:
            found[f"{kind} {count}"] = score(accelerator, task, model, count)
            still_alive()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return found


def score(accelerator: Any, task: Any, model: Any, count: int) -> dict[str, float]:
    """The metrics of the first `count` samples of the validation split."""
    from torch.utils.data import DataLoader

    rows = task.split("valid").select(range(count))
    scorer = task.scorer(accelerator, model)
    for batch in accelerator.prepare(DataLoader(rows, BATCH, collate_fn=task.collate)):
        scorer.add(batch)
    return scorer.metrics()
