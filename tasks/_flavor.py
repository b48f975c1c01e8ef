"""What MLflow's transformers flavor is told of an export, for each kind of model.

transformers 5 has no pipeline for encoder-decoders: such a model is loaded as model and tokenizer
(`mlflow.transformers.load_model(uri, return_type="components")`), and has no `pyfunc`.
"""

from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from megacore.artifact.files import read_json

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_NEW_TOKENS = 256
"""Tokens that a pipeline writes at most, as transformers has it; that can lead past a small
position table."""


class Task(NamedTuple):
    """A pipeline of transformers."""

    name: str
    pipeline: str
    """Its class."""
    model: str
    """The class of the model that the pipeline runs."""
    options: dict[str, Any]
    """Of its calls, where nothing else is asked."""
    served: bool = True
    """Whether transformers has that pipeline."""


def task_of(directory: Path) -> Task:
    """The task that the model of a transformers directory is for."""
    config = read_json(directory / "config.json")
    architecture: str = config["architectures"][0]
    if architecture.endswith("ForSequenceClassification"):
        return Task("text-classification", "TextClassificationPipeline", architecture, {})
    if config.get("is_encoder_decoder") or architecture.endswith("ForConditionalGeneration"):
        return Task(
            "text2text-generation", "Text2TextGenerationPipeline", architecture, {}, served=False
        )
    if architecture.endswith(("ForPreTraining", "ForMaskedLM")):
        masked = architecture.replace("ForPreTraining", "ForMaskedLM")
        return Task("fill-mask", "FillMaskPipeline", masked, {})
    positions = [int(config[name]) for name in _POSITIONS if config.get(name)]
    written = min(_NEW_TOKENS, positions[0] // 2) if positions else _NEW_TOKENS
    return Task(
        "text-generation", "TextGenerationPipeline", architecture, {"max_new_tokens": written}
    )


def flavor(task: Task) -> dict[str, Any]:
    """The transformers flavor's part of an MLmodel file."""
    return {
        "transformers_version": metadata.version("transformers"),
        "code": None,
        "task": task.name,
        "instance_type": task.pipeline,
        "pipeline_model_type": task.model,
        "source_model_name": "",
        "model_binary": "model",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
    }
