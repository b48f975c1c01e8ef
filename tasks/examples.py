"""Stage `examples`: the tokenized samples of a fine-tuning, proven to fit its task and its model."""

from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey
from megacore.config.base import key_parameters
from megacore.config.finetune import FinetuneConfig
from tasks._cache import StageResult, build, stage_task

_LIMITS = ("max_train_samples", "max_valid_samples", "max_test_samples")


def examples_key(config: FinetuneConfig, pretrained: Artifact, dataset: Artifact) -> StageKey:
    """The key of the samples: rows, tokenizer, and what is learned."""
    from megacore.finetune.examples import EXAMPLES_VERSION

    parameters = {
        "limits": {name: getattr(config.data, name) for name in _LIMITS},
        "task": key_parameters(config.task),
        "pad_token": config.model.pad_token,
        "new_head": config.model.new_head,  # without it a head that does not fit is refused in this stage
    }
    return StageKey.of("examples", EXAMPLES_VERSION, parameters, dataset=dataset, pretrained=pretrained)


@stage_task("examples", examples_key)
def examples(config: FinetuneConfig, pretrained: Artifact, dataset: Artifact) -> StageResult:
    """Tokenize the rows; what a rank could not use is refused here."""
    from megacore.finetune.examples import build_examples

    def fill(directory: Path) -> dict[str, Any]:
        return build_examples(config, dataset.directory, pretrained.directory, directory)

    return build(config, examples_key(config, pretrained, dataset), fill)
