"""Sections `train`, `checkpoint`, `resume`, `evaluate`, `export` and `tracking`."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from megacore.config.base import Section, keyed, unkeyed

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full"]
_NAME = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"(?!.*(?:--|\.\.)){_NAME}/(?=.{{1,96}}$){_NAME}", re.ASCII)
"""Name of a repository on the Hugging Face hub with its owner."""
_SAMPLES = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
"""Number of a sample, or the first and last of several."""


class RampupBatchSize(Section):
    """Batch-size ramp-up like Megatron-LM's `--rampup-batch-size START INCREMENT SAMPLES`."""

    start: int = keyed(gt=0)
    """Samples per batch at the beginning; a multiple of micro_batch_size x data-parallel size."""
    increment: int = keyed(gt=0)
    """Samples by which the batch grows at each step; (global_batch_size - start) must be a multiple
    of it."""
    samples: int = keyed(gt=0)
    """Consumed samples at which the batch reaches global_batch_size."""


class ProfileConfig(Section):
    """Iterations for which every rank stores a torch profile and a memory timeline."""

    model_config = ConfigDict(serialize_by_alias=True)

    first: int = unkeyed(alias="from", gt=0, strict=True)
    """First profiled iteration."""
    last: int = unkeyed(alias="to", gt=0, strict=True)
    """Last profiled iteration; not less than `from` and not greater than train_iters."""


class KernelsConfig(Section):
    """Implementation of each operation. One word applies to all of them: auto or plain.

    auto is the best implementation that runs here; plain is PyTorch's own operation; cpp are the
    C++ kernels for CPUs with AVX-512; apex are NVIDIA's for GPUs. A run refuses an implementation
    that cannot run on its hardware.
    """

    attention: Literal["auto", "cpp", "flex", "plain"] = unkeyed("auto")
    """Attention; plain is scaled_dot_product_attention; flex is torch's FlexAttention for masks,
    soft caps and ALiBi, in compiled layers on GPUs only."""
    norm: Literal["auto", "apex", "cpp", "plain"] = unkeyed("auto")
    """LayerNorm and RMSNorm."""
    activation: Literal["auto", "cpp", "plain"] = unkeyed("auto")
    """Activation with its bias, and gated units."""
    rope: Literal["auto", "cpp", "plain"] = unkeyed("auto")
    """Rotary position embedding."""
    dropout: Literal["auto", "cpp", "plain"] = unkeyed("auto")
    """Dropout, and the residual sum with bias and dropout."""
    cross_entropy: Literal["auto", "cpp", "compiled", "plain"] = unkeyed("auto")
    """Cross entropy and its gradient; compiled uses torch.compile."""
    weight_gradient: Literal["auto", "apex", "torch_fp32", "cpp", "plain"] = unkeyed("auto")
    """Sum of weight gradients in fp32; torch_fp32 is torch's product of half-precision factors with
    an fp32 result, on GPUs only."""
    adamw: Literal["auto", "apex", "cpp", "plain"] = unkeyed("auto")
    """Update of the optimizer; plain is torch's fused AdamW."""
    sum_of_squares: Literal["auto", "apex", "plain"] = unkeyed("auto")
    """Sum of squares of the gradients for their norm."""

    @classmethod
    def expanded(cls, value: Any) -> Any:
        """Return auto or plain as a mapping of every operation; other values unchanged."""
        return dict.fromkeys(cls.model_fields, value) if value in ("auto", "plain") else value

    @model_validator(mode="before")
    @classmethod
    def _expand_one_word(cls, value: Any) -> Any:
        if not isinstance(value, dict | cls) and value not in ("auto", "plain"):
            raise ValueError(
                f"train.kernels is {value!r}: give auto, plain, or a mapping of operations, such "
                f"as {{norm: plain}}; the operations are {', '.join(cls.model_fields)}"
            )
        if isinstance(value, dict) and (
            unknown := sorted(map(str, value.keys() - cls.model_fields))
        ):
            raise ValueError(
                f"train.kernels has no operation {', '.join(unknown)}: the operations are "
                f"{', '.join(cls.model_fields)}"
            )
        return cls.expanded(value)

    @property
    def for_evaluation(self) -> "KernelsConfig":
        """The same without a choice for operations that only a training step has."""
        step = ("weight_gradient", "adamw", "sum_of_squares")
        # FlexAttention runs in compiled layers only.
        compiled = ("attention",) if self.attention == "flex" else ()
        return self.model_copy(update=dict.fromkeys(step + compiled, "auto"))

    @model_serializer(mode="plain")
    def _serialize_as_written(self) -> str | dict[str, str]:
        return self.written

    @property
    def written(self) -> str | dict[str, str]:
        """Auto or plain if it applies to all operations, else a mapping of those not auto."""
        options = {name: str(getattr(self, name)) for name in type(self).model_fields}
        if set(options.values()) in ({"auto"}, {"plain"}):
            return options["attention"]
        return {name: option for name, option in options.items() if option != "auto"}


class TrainConfig(Section):
    """Options of the training loop: length, batch sizes, precision, and intervals of reports."""

    micro_batch_size: int = unkeyed(8, gt=0)
    """Samples of one forward pass on one rank (b)."""
    global_batch_size: int = keyed(16, key="run", resolved="index", gt=0, le=2**18)
    """Samples of one optimizer step over all ranks; a multiple of micro_batch_size x data-parallel
    size, at most 262,144."""
    train_iters: int = keyed(1000, key="train", resolved="index", gt=0)
    """Number of optimizer steps; a higher value extends a finished run."""
    precision: Precision = keyed("auto")
    """Data type of the computation; auto selects bf16 where the hardware supports its
    multiplication natively, else fp32."""
    tf32: bool = keyed(False, omit_default=True)
    """If true, matrix products of fp32 on a GPU round their factors to TF32's 10 bits (Ampere or
    newer). Requires precision fp32."""
    kernels: KernelsConfig = unkeyed(KernelsConfig())
    """Implementations of the operations: auto selects the best available one of each, plain uses
    PyTorch's own operations only; or a mapping of operations to implementations, where operations
    that are not named are auto."""
    compile: Literal["auto", "on", "off"] = unkeyed("auto")
    """Compilation of each layer with torch.compile: on, off, or auto, which means on a GPU only.
    Layers that cannot be compiled run uncompiled, with a warning."""
    cuda_graphs: bool = unkeyed(False)
    """If true, forward and backward of a micro batch are captured in a CUDA graph, which the GPU
    then runs without the host; for small micro batches, whose kernels take less time than their
    launches. Requires a GPU, engine native, and no tensor or pipeline parallelism."""
    deterministic: bool = unkeyed(False)
    """If true, a run on GPUs computes the same bits each time on the same GPUs: nondeterministic
    operations are replaced or refused, which is slower. On CPUs every run does."""
    recompute: Recompute = unkeyed("none")
    """Activation recomputation: full stores only the input of each layer (Chen et al. 2016);
    selective recomputes only the attention between q, k, v and its output (Korthikanti et al.
    2022); none stores all activations."""
    recompute_num_layers: int | None = unkeyed(None, gt=0)
    """Number of layers at the start of each pipeline chunk that are recomputed; null means all."""
    pretrained_checkpoint: str | None = keyed(None, resolved="run")
    """Path of a checkpoint (`iter_*`) whose weights the run starts with; null means random initial
    weights."""
    rampup_batch_size: RampupBatchSize | None = keyed(None, key="run", resolved="index")
    """Growth of the batch from a smaller size to global_batch_size; null means global_batch_size
    from the start."""
    label_smoothing: float = keyed(0.0, ge=0.0, lt=1.0)
    """Label smoothing: fraction of the target's probability that is spread evenly over the
    vocabulary (Szegedy et al. 2016)."""
    z_loss: float = keyed(0.0, ge=0.0)
    """Coefficient of the z-loss, the squared log-partition of each token's logits that is added to
    the loss (Chowdhery et al. 2022)."""
    loss_spike_factor: float | None = keyed(3.0, resolved="train", gt=1.0)
    """Multiple of the recent mean loss above which a micro batch's loss is a spike; null disables
    the check."""
    loss_spike_action: Literal["warn", "skip", "stop"] = keyed("warn", resolved="train")
    """Action on a spike that a second computation confirms: warn logs a warning with rank,
    iteration and samples; skip also leaves the global batch out; stop ends the run."""
    nonfinite_action: Literal["skip", "stop"] = keyed("stop", resolved="train")
    """Action on a loss or gradient that is not finite, in fp16 at the lowest loss scale, and that a
    second computation confirms: skip logs a warning and leaves the global batch out; stop ends the
    run. After five batches in a row that were left out, the next bad one ends the run."""
    skip_samples: tuple[str, ...] = keyed((), resolved="train")
    """Numbers of samples in the run's order, from 0: one, such as 4096, or the first and the last,
    such as 4096-4127. A global batch that contains one of them is skipped."""
    exit_interval: int | None = unkeyed(None, gt=0)
    """Interval in iterations after which the run saves a checkpoint and ends, to be resumed later;
    null means never."""
    exit_duration_minutes: float | None = unkeyed(None, gt=0)
    """Time in minutes after which the run saves a checkpoint and ends, to be resumed later; null
    means never."""
    log_interval: int = unkeyed(10, gt=0)
    """Interval in iterations of log lines and step events."""
    eval_interval: int = unkeyed(100, gt=0)
    """Interval in iterations of validations; another one follows the last iteration."""
    eval_iters: int = keyed(10, resolved="index", gt=0)
    """Number of global batches per validation, the same ones each time."""
    profile: ProfileConfig | None = unkeyed(None)
    """Iterations that are profiled, such as `{from: 10, to: 12}`; traces and memory timelines are
    stored with the run. Null means none."""

    @model_validator(mode="after")
    def _tf32_is_for_fp32(self) -> Self:
        if self.tf32 and self.precision != "fp32":
            raise ValueError(
                f"train.tf32 is true and train.precision {self.precision}, whose products are not "
                "in fp32: set train.precision to fp32, or train.tf32 to false"
            )
        return self

    @field_validator("skip_samples", mode="before")
    @classmethod
    def _numbers_are_ranges(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(str(item) if type(item) is int else item for item in value)
        return value

    @field_validator("skip_samples")
    @classmethod
    def _ranges_are_numbers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for item in value:
            match = _SAMPLES.fullmatch(item)
            if match is None or int(match[1]) > int(match[2] or match[1]):
                raise ValueError(
                    f"train.skip_samples has {item[:100]!r}: give a sample's number, such "
                    "as 4096, or the first and last, such as 4096-4127"
                )
        return value

    @property
    def skipped_ranges(self) -> list[range]:
        """Ranges of skip_samples as numbers, sorted."""
        pairs = [item.partition("-")[::2] for item in self.skip_samples]
        ranges = [range(int(first), int(last or first) + 1) for first, last in pairs]
        return sorted(ranges, key=lambda samples: (samples.start, samples.stop))


class CheckpointConfig(Section):
    """Options of saving and keeping checkpoints."""

    save_interval: int = unkeyed(500, gt=0)
    """Interval in iterations of checkpoints; another one is saved at the last iteration."""
    asynchronous: bool = unkeyed(True)
    """If true, training continues while a checkpoint is copied to host memory and written: only the
    next update of the weights waits for the copy."""
    keep_last: int = unkeyed(2, gt=0)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = unkeyed(None, gt=0)
    """Interval in iterations of checkpoints that are never deleted; null means none."""
    keep_best: bool = unkeyed(True)
    """If true, the checkpoint with the lowest validation loss is kept."""


class ResumeConfig(Section):
    """Options of resuming from another run's checkpoint."""

    checkpoint: str | None = keyed(None, resolved="run", min_length=1)
    """Path of another run's checkpoint (`iter_*`) to resume from, including optimizer state and
    data position; null means the run's own newest checkpoint. The key contains its content, not its
    path."""
    override: tuple[str, ...] = unkeyed(())
    """Dotted names of keyed values, such as optim.lr, that may differ from the checkpoint's
    configuration."""


class PasskeyConfig(Section):
    """Retrieval of a number hidden in filler text (Mohtashami and Jaggi 2023, arXiv:2305.16300)."""

    lengths: tuple[Annotated[int, Field(gt=0)], ...] = keyed((), omit_default=True)
    """Lengths in tokens of the prompts with their number, such as [512, 1024], up to
    model.max_position_embeddings; empty means no test."""
    depths: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] = keyed(
        (0.0, 0.25, 0.5, 0.75, 1.0), omit_default=True, min_length=1
    )
    """Places of the number as fractions of the filler text: 0 is its beginning, 1 its end."""
    prompts: int = keyed(10, omit_default=True, gt=0)
    """Number of prompts per length and depth."""
    candidates: int = keyed(10, omit_default=True, gt=1, le=1000)
    """Number of numbers whose likelihoods are compared. A model that guesses finds one in this
    many."""
    seed: int = keyed(1234, omit_default=True, ge=0)
    """Seed of the numbers."""

    @field_validator("lengths", "depths")
    @classmethod
    def _no_value_is_repeated(
        cls, values: tuple[float, ...], info: ValidationInfo
    ) -> tuple[float, ...]:
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            listed = ", ".join(f"{value:g}" for value in values)
            raise ValueError(
                f"evaluate.zero_shot.passkey.{info.field_name} is [{listed}], where {twice:g} is "
                "given more than once: give it once"
            )
        return values


class ZeroShotConfig(Section):
    """Zero-shot evaluation of checkpoints on texts outside their training data. GPT only."""

    wikitext: str | None = keyed(None, resolved=("search", "zeroshot"), min_length=1)
    """Path of WikiText's test split with words separated by spaces. The key contains its content,
    not its name."""
    lambada: str | None = keyed(None, resolved=("search", "zeroshot"), min_length=1)
    """Path of LAMBADA's test split in JSON Lines with the field `text`. The key contains its
    content, not its name."""
    overlapping_eval: int | None = keyed(None, gt=0)
    """Distance in tokens between the starts of WikiText's windows of seq_length tokens; null means
    windows without overlap."""
    passkey: PasskeyConfig = keyed(PasskeyConfig())
    """Test of retrieval from long prompts."""
    checkpoints: Literal["all", "best"] = unkeyed("all")
    """Checkpoints to score: all that are kept, or only the one with the lowest validation loss."""

    @property
    def requested(self) -> bool:
        """True if there is a text to score or a passkey to find."""
        return self.wikitext is not None or self.lambada is not None or bool(self.passkey.lengths)


class LmEvalConfig(Section):
    """Scores of exported checkpoints by EleutherAI's lm-evaluation-harness. GPT only."""

    tasks: tuple[str, ...] = keyed((), key=("search", "lm-eval"))
    """Names of tasks, groups or tags, such as arc_easy; none means no scores. `megacore[lm-eval]`
    must be installed."""
    include_path: str | None = keyed(None, resolved=("search", "lm-eval"), min_length=1)
    """Directory with YAML files of additional tasks. The key contains their content and that of
    local files in their `data_files`, not the path."""
    num_fewshot: int | None = keyed(None, ge=0)
    """Number of examples before each question; null means the number of each task."""
    limit: int | None = keyed(None, key=("search", "lm-eval"), gt=0)
    """Largest number of questions of each task; null means all."""
    checkpoints: Literal["all", "best"] = unkeyed("best")
    """Checkpoints to export and score: all that are kept, or only the one with the lowest
    validation loss, which is exported anyway."""


class EvaluateConfig(Section):
    """Evaluation of checkpoints: perplexities and zero-shot scores.

    `valid_ppl` and `test_ppl` are exp of the mean loss over the first `max_samples` samples of a
    single pass over a split. Training measures `valid_ppl` at each checkpoint, the stage `evaluate`
    both for each kept checkpoint, and with `zero_shot` its scores on other texts.
    """

    micro_batch_size: int = unkeyed(16, gt=0)
    """Samples of one forward pass on one rank in evaluations."""
    max_samples: int | None = keyed(4096, gt=0)
    """Number of samples per split to evaluate, in shuffled order, and of a blend's sources by their
    sizes; null means all. Training evaluates as many validation samples at each checkpoint."""
    zero_shot: ZeroShotConfig = keyed(ZeroShotConfig(), key="zeroshot")
    """Zero-shot evaluation on texts outside the training data."""
    lm_eval: LmEvalConfig = keyed(LmEvalConfig(), key="lm-eval")
    """Scores of the exported models by lm-evaluation-harness."""
    contamination: Literal["report", "remove", "refuse"] | None = keyed(
        None, key="publish", resolved="contamination", omit_default=True
    )
    """Search of the evaluation sets in the training corpus, which needs `megacore[curate]`; null
    means none. report publishes a score with the share of contaminated items, and with a warning
    above contamination_limit; refuse does not publish such a score; remove leaves documents that
    share an n-gram with an evaluation set, and copies of documents, out of the corpus."""
    contamination_ngram: int = keyed(13, key="search", gt=0, le=100)
    """Number of consecutive words that make an item contaminated. Items of fewer words cannot be
    searched."""
    contamination_limit: float = keyed(0.01, key="publish", omit_default=True, ge=0.0, le=1.0)
    """Share of contaminated items above which a score has a warning or is refused. It bounds by how
    much an accuracy can be too high."""


class HubConfig(Section):
    """Upload of the exported model to the Hugging Face hub, after its gate and publication."""

    push_to_hub: str | None = keyed(None, key="push")
    """Repository that the export is uploaded to, as OWNER/NAME; null means none. The token is that
    of the environment variable HF_TOKEN or of `hf auth login`."""
    hub_private: bool = keyed(True, key="push")
    """If true, a new repository is private, and an existing one that is public is refused. If
    false, a new repository is public."""

    @field_validator("push_to_hub")
    @classmethod
    def _repository_has_an_owner(cls, value: str | None) -> str | None:
        if value is None or _REPOSITORY.fullmatch(value):
            return value
        raise ValueError(
            f"export.push_to_hub is {value!r}: give the owner and the name of a repository, as in "
            "my-team/my-model, of letters, digits, dots, dashes and underscores"
        )


class ExportConfig(HubConfig):
    """Options of the conversion to transformers, of its gate, and of the upload to the hub."""

    parity_samples: int = keyed(8, gt=0)
    """Number of validation samples on which the gate compares logits and greedy tokens of
    megacore's model and the export."""
    parity_tolerance: float = keyed(1e-4, gt=0)
    """Largest absolute difference of fp32 logits that the gate accepts."""
    max_test_samples: int | None = keyed(None, gt=0)
    """Number of test samples on which the gate compares the perplexities of both models; null means
    all."""
    dtype: Literal["float32", "bfloat16"] = keyed("float32")
    """Data type of the exported weights."""
    sample_prompt: str = keyed("def ")
    """Prompt of the sample text that is printed at the end. BERT and T5 complete the end of a
    prompt without mask or sentinel."""
    sample_tokens: int = keyed(120, gt=0)
    """Length of the sample text in tokens."""


class WandbConfig(Section):
    """Options of a run of Weights & Biases.

    The API key is that of the environment variable WANDB_API_KEY or of `wandb login`.
    """

    project: str | None = unkeyed(None, min_length=1)
    """Project of the run; null means the name of the MLflow experiment."""
    entity: str | None = unkeyed(None, min_length=1)
    """User or team that owns the project; null means the user's default."""
    name: str | None = unkeyed(None, min_length=1)
    """Name of the run; null means that of the MLflow run."""
    tags: tuple[str, ...] = unkeyed(())
    """Tags of the run."""
    mode: Literal["online", "offline"] = unkeyed("online")
    """online sends the rows while the run trains; offline writes them to `wandb/` in the run's
    directory, for `wandb sync`."""


class TrackingConfig(Section):
    """Options of tracking with MLflow, TensorBoard and Weights & Biases."""

    experiment: str = unkeyed("pretrain", min_length=1)
    """Name of the MLflow experiment. A run that is continued stays in the experiment in which it
    began."""
    registered_model: str | None = keyed(
        None, resolved=("publish", "finetune-publish"), pattern=r"^[^/:%'\x22]*$"
    )
    """Name in the model registry; null means the name of the run. MLflow allows no `/`, `:`, `%`
    or quotes in it."""
    tensorboard: bool = unkeyed(False)
    """If true, TensorBoard event files are written to `tensorboard/` in the run's directory.
    Pretraining only."""
    wandb: WandbConfig | None = unkeyed(None)
    """Run of Weights & Biases in addition to MLflow, such as `{project: my-project}`. Null means
    none."""
    system_metrics: bool = unkeyed(True)
    """If true, MLflow measures CPU, memory, disk, network and GPUs of the flow's host every 10 s
    while the run trains. After 10 minutes it stores the mean of each minute."""
    force_alias: bool = unkeyed(False)
    """If true, the alias `candidate` moves to the published version, even if the test metric of
    another version is better."""
