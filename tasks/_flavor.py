"""Options of MLflow's transformers flavor for each kind of exported model.

transformers 5 has no pipeline for encoder-decoders and multiple choice: such a model is loaded as
model and tokenizer (`mlflow.transformers.load_model(uri, return_type="components")`), and has no
`pyfunc`.
"""

from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from megacore.artifact.files import read_object

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_NEW_TOKENS = 256
"""Most tokens that a pipeline generates, the default of transformers. It can exceed a small
position table."""


class Task(NamedTuple):
    """A pipeline of transformers."""

    name: str
    pipeline: str
    """Class of the pipeline."""
    model: str
    """Class of the model that the pipeline runs."""
    options: dict[str, Any]
    """Default options of the pipeline's calls."""
    served: bool = True
    """True if transformers has that pipeline."""


def task_of(directory: Path) -> Task:
    """Return the task of the model in a transformers directory."""
    config = read_object(directory / "config.json")
    architecture: str = config["architectures"][0]
    if architecture.endswith("ForSequenceClassification"):
        return Task("text-classification", "TextClassificationPipeline", architecture, {})
    if architecture.endswith("ForMultipleChoice"):
        return Task("multiple-choice", "MultipleChoicePipeline", architecture, {}, served=False)
    if config.get("is_encoder_decoder") or architecture.endswith("ForConditionalGeneration"):
        return Task(
            "text2text-generation", "Text2TextGenerationPipeline", architecture, {}, served=False
        )
    if architecture.endswith(("ForPreTraining", "ForMaskedLM")):
        masked = architecture.replace("ForPreTraining", "ForMaskedLM")
        return Task("fill-mask", "FillMaskPipeline", masked, {})
    positions = [int(config[name]) for name in _POSITIONS if config.get(name)]
    new_tokens = min(_NEW_TOKENS, positions[0] // 2) if positions else _NEW_TOKENS
    return Task(
        "text-generation", "TextGenerationPipeline", architecture, {"max_new_tokens": new_tokens}
    )


def flavor(task: Task) -> dict[str, Any]:
    """Return the transformers flavor's section of an MLmodel file."""
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
