"""Stage `examples`: tokenized samples of a fine-tuning, checked against its task and model."""

from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey
from megacore.config.finetune import FinetuneConfig
from megacore.config.keys import key_parameters
from tasks._cache import StageResult, build, stage_task


def examples_key(config: FinetuneConfig, pretrained: Artifact, dataset: Artifact) -> StageKey:
    """Return the key of the samples: rows, tokenizer, and task options."""
    from megacore.finetune.examples import EXAMPLES_VERSION

    parameters = key_parameters(config, "examples")
    return StageKey.of(
        "examples", EXAMPLES_VERSION, parameters, dataset=dataset, pretrained=pretrained
    )


@stage_task("examples", examples_key)
def examples(config: FinetuneConfig, pretrained: Artifact, dataset: Artifact) -> StageResult:
    """Tokenize the rows; refuse rows that a rank could not use."""
    from megacore.finetune.examples import build_examples

    def fill(directory: Path) -> dict[str, Any]:
        return build_examples(config, dataset.directory, pretrained.directory, directory)

    return build(config, examples_key(config, pretrained, dataset), fill)
