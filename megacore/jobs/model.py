"""Jobs on a model by itself, apart from any run: generation and zero-shot evaluation."""

from pathlib import Path
from typing import Any

from megacore.config.base import Section
from megacore.config.spec import ModelSpec
from megacore.config.train import Precision
from megacore.generate.options import GenerateOptions
from megacore.jobs.run import RankJob
from megacore.parallel.rank_layout import RankLayout

_OUTPUT = "result.json"


class ModelSource(Section):
    """A model on disk, in whichever form."""

    directory: str
    """A checkpoint (iter_*), or a transformers directory."""
    exported: bool
    """Whether it is a transformers directory."""
    spec: ModelSpec
    """What the model is."""


class ModelJob(RankJob):
    """What every rank needs to know of a job on a finished model."""

    source: ModelSource
    """Where the weights are, and of which model."""
    tensor_model_parallel_size: int
    """Ranks that share each layer; what they leave of the ranks is data parallel."""
    precision: Precision
    """Compute type; auto takes bf16 where the hardware multiplies it natively, else fp32."""
    batch_size: int
    """Sequences per forward pass."""
    output: str
    """JSON file to write."""

    @property
    def layout(self) -> RankLayout:
        """The layout of the job's ranks. Raises ParallelLayoutError when they do not divide."""
        return RankLayout.of_world(self.ranks, tensor=self.tensor_model_parallel_size)


class GenerateJob(ModelJob):
    """Continuations of prompts."""

    prompts: tuple[tuple[int, ...], ...]
    """Ids of each."""
    options: GenerateOptions
    """How tokens are chosen, and how many."""
    end: int | None
    """Id of the token that ends a text; null lets every prompt have all its tokens."""


class ZeroShotJob(ModelJob):
    """Scores of a model on texts that it was not trained for."""

    tokenizer_directory: str
    """Directory with tokenizer.json."""
    wikitext: str | None
    """Path of WikiText's test split; null leaves it out."""
    lambada: str | None
    """Path of LAMBADA's test split; null leaves it out."""
    seq_length: int
    """Tokens of a window."""
    overlapping_eval: int | None
    """Tokens between the starts of windows; null means seq_length."""


def places(scratch: Path) -> dict[str, Any]:
    """Where a job in `scratch` puts its result and the reasons of ranks that fail."""
    return {"exit_directory": str(scratch / "exit"), "output": str(scratch / _OUTPUT)}
