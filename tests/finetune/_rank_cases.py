"""Scores that each rank of a group computes with the tasks of fine-tuning."""

from pathlib import Path
from typing import Any

from tests._dist import still_alive

MODELS = {"classification": "deberta", "seq2seq": "blenderbot", "causal_lm": "gpt2"}
COUNTS = (9, 3, 8)
"""Samples of a split: on two ranks with batches of 4, the last batch is padded by 7, 5 and 0."""
BATCH = 4


def case_config(root: Path, kind: str) -> Any:
    """Return the configuration of one of MODELS, with all files below `root`."""
    from tests.finetune._tiny_models import tiny_config

    metrics = {"seq2seq": {"metrics": ["bleu", "rouge1", "rougeLsum"]}}
    return tiny_config(
        root / kind / "model", root / kind / "data", kind, task=metrics.get(kind, {})
    )


def write_cases(root: Path) -> None:
    """Write all files that `run` reads."""
    from tests.finetune._tiny_models import prepare, write_data, write_model

    for kind, model in MODELS.items():
        write_model(root / kind / "model", model)
        write_data(root / kind / "data", kind, valid=12)
        prepare(case_config(root, kind), root / kind)


def run(root: Path) -> dict[str, Any]:
    """Return the metrics of the first validation samples by task, and the sums of weights."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from megacore.finetune.task import build_task

    accelerator = Accelerator(cpu=True)
    results: dict[str, Any] = {}
    for kind in MODELS:
        task = build_task(
            case_config(root, kind), root / kind / "examples", root / kind / "pretrained"
        )
        model = task.build_model()
        results[f"{kind} weights"] = sum(
            float(weight.detach().abs().double().sum()) for weight in model.parameters()
        )
        model = accelerator.prepare(model).eval()
        for count in COUNTS:
            results[f"{kind} {count}"] = score(accelerator, task, model, count)
            still_alive()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return results


def score(accelerator: Any, task: Any, model: Any, count: int) -> dict[str, float]:
    """Return the metrics of the first `count` samples of the validation split."""
    from torch.utils.data import DataLoader

    rows = task.split("valid").select(range(count))
    scorer = task.scorer(accelerator, model)
    for batch in accelerator.prepare(DataLoader(rows, BATCH, collate_fn=task.collate)):
        scorer.add(batch)
    return scorer.metrics()
