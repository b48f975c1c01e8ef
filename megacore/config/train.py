"""The training loop, checkpoints, evaluation, export and tracking."""

from typing import Any, Literal

from pydantic import ConfigDict, field_validator

from megacore.config.base import Section, keyed, unkeyed

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full"]


class RampupBatchSize(Section):
    """Batch-size ramp-up, Megatron-LM's `--rampup-batch-size START INCREMENT SAMPLES`."""

    start: int = keyed(gt=0)
    """Samples of the first batches; a multiple of micro_batch_size x data-parallel size."""
    increment: int = keyed(gt=0)
    """Samples by which the batch grows each time; (global_batch_size - start) is a multiple of
    it."""
    samples: int = keyed(gt=0)
    """Consumed samples at which the batch has reached global_batch_size."""


class ProfileConfig(Section):
    """Iterations of which every rank stores a torch profile and a timeline of its memory."""

    model_config = ConfigDict(serialize_by_alias=True)

    first: int = unkeyed(alias="from", gt=0, strict=True)
    """Iteration that the profile begins with."""
    last: int = unkeyed(alias="to", gt=0, strict=True)
    """Iteration that it ends with; not below `from`, nor above train_iters."""


class TrainConfig(Section):
    """How long, how large a batch, and how often to look."""

    micro_batch_size: int = unkeyed(gt=0)
    """Samples per rank and forward pass (b)."""
    global_batch_size: int = keyed(key="run", resolved="index", gt=0)
    """Samples per optimizer step over all ranks; a multiple of micro_batch_size x data-parallel
    size."""
    train_iters: int = keyed(key="train", resolved="index", gt=0)
    """Optimizer steps; raising it extends a finished run."""
    precision: Precision = keyed("auto")
    """Compute type; auto takes bf16 where the hardware multiplies it natively, else fp32."""
    kernels: Literal["auto", "plain"] = unkeyed("auto")
    """What computes: auto takes the best kernel of each operation that runs here, plain is torch's
    own everywhere."""
    compile: Literal["auto", "on", "off"] = unkeyed("auto")
    """Whether each layer goes through torch.compile; auto: on a GPU. What cannot be runs as it is,
    with a warning."""
    recompute: Recompute = unkeyed("none")
    """Activation recomputation: full keeps only each layer's input (Chen et al. 2016), selective
    everything but what attention computes between q, k, v and its output (Korthikanti et al.
    2022)."""
    recompute_num_layers: int | None = unkeyed(None, gt=0)
    """Layers of each pipeline chunk that recompute, the first ones; null means all."""
    pretrained_checkpoint: str | None = keyed(None, resolved="run")
    """Checkpoint directory (iter_*) whose weights the run begins with; null draws initial
    weights."""
    rampup_batch_size: RampupBatchSize | None = keyed(None, key="run", resolved="index")
    """Grows the batch from a smaller one to global_batch_size; null means it is global_batch_size
    from the start."""
    label_smoothing: float = keyed(0.0, ge=0.0, lt=1.0)
    """Share of the target's probability that is spread evenly over the vocabulary (Szegedy et al.
    2016)."""
    z_loss: float = keyed(0.0, ge=0.0)
    """Coefficient of the squared log-partition of each token's logits, added to its loss (Chowdhery
    et al. 2022)."""
    loss_spike_factor: float | None = unkeyed(3.0, gt=1.0)
    """A micro batch whose loss exceeds this multiple of the recent mean is a spike; null does not
    look."""
    loss_spike_action: Literal["warn", "stop"] = unkeyed("warn")
    """What a spike does: a warning that names rank, iteration and samples, or the same as the run's
    end."""
    skip_samples: tuple[str, ...] = keyed((), resolved="train")
    """Samples in the run's order, as "4096" or "4096-4127": a global batch that holds one of them
    is passed over."""
    exit_interval: int | None = unkeyed(None, gt=0)
    """Iterations after whose multiples the run saves and ends, to be gone on with; null means
    never."""
    exit_duration_minutes: float | None = unkeyed(None, gt=0)
    """Minutes after whose end the run saves and ends, to be gone on with; null means never."""
    log_interval: int = unkeyed(10, gt=0)
    """Iterations between log lines and step events."""
    eval_interval: int = unkeyed(100, gt=0)
    """Iterations between validations; one more follows the last iteration."""
    eval_iters: int = keyed(10, resolved="index", gt=0)
    """Global batches per validation, the same ones each time."""
    profile: ProfileConfig | None = unkeyed(None)
    """Iterations {from, to} that are profiled, their trace and memory timeline stored with the run;
    null means none."""

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
            first, _, last = item.partition("-")
            numbers = (first, last if "-" in item else first)
            if not all(number.isdecimal() for number in numbers) or int(numbers[0]) > int(
                numbers[1]
            ):
                raise ValueError(
                    f"skip_samples has {item!r}: give a sample's number, as 4096, or the first and "
                    "last, as 4096-4127"
                )
        return value

    @property
    def skipped_ranges(self) -> list[range]:
        """skip_samples as numbers, in order."""
        pairs = [item.partition("-")[::2] for item in self.skip_samples]
        ranges = [range(int(first), int(last or first) + 1) for first, last in pairs]
        return sorted(ranges, key=lambda samples: (samples.start, samples.stop))


class CheckpointConfig(Section):
    """When to save and what to keep."""

    save_interval: int = unkeyed(gt=0)
    """Iterations between checkpoints; one more is saved at the last iteration."""
    asynchronous: bool = unkeyed(True)
    """Whether training goes on while a checkpoint is written: a step waits for the copy in main
    memory alone."""
    keep_last: int = unkeyed(2, gt=0)
    """The newest checkpoints that are kept."""
    keep_every: int | None = unkeyed(None, gt=0)
    """Checkpoints at multiples of this iteration count are kept for ever."""
    keep_best: bool = unkeyed(True)
    """Whether the checkpoint with the lowest validation loss is kept."""


class ResumeConfig(Section):
    """Going on from another run's checkpoint, and what may differ from it."""

    checkpoint: str | None = keyed(None, resolved="run", min_length=1)
    """Checkpoint directory (iter_*) of another run to go on from, with its optimizer and data
    position; null goes on from the run's own newest one. Its content is part of the run's key, not
    its path."""
    override: tuple[str, ...] = unkeyed(())
    """Dotted names of keyed values that may differ from the checkpoint's configuration, as
    optim.lr."""


class ZeroShotConfig(Section):
    """Scores of the best checkpoint on texts that it was not trained for; with family gpt alone."""

    wikitext: str | None = keyed(None, resolved="zeroshot", min_length=1)
    """Path of WikiText's test split, words divided by spaces; its content, not its name, is part of
    the key."""
    lambada: str | None = keyed(None, resolved="zeroshot", min_length=1)
    """Path of LAMBADA's test split, JSON Lines with the key text; its content, not its name, is
    part of the key."""
    overlapping_eval: int | None = keyed(None, gt=0)
    """Tokens between the starts of WikiText's windows of seq_length tokens; null lets them not
    overlap."""

    @property
    def wanted(self) -> bool:
        """Whether there is a text to score."""
        return self.wikitext is not None or self.lambada is not None


class EvaluateConfig(Section):
    """Perplexity of both held-out splits for every kept checkpoint, and zero-shot scores.

    Zero-shot scores are of the best checkpoint alone.
    """

    micro_batch_size: int = unkeyed(16, gt=0)
    """Samples per forward pass and rank."""
    max_samples: int | None = keyed(None, gt=0)
    """Samples of each split that are scored, in the shuffled order; null means all."""
    zero_shot: ZeroShotConfig = keyed(ZeroShotConfig(), key="zeroshot")
    """Texts that the model was not trained for."""


class ExportConfig(Section):
    """Conversion to transformers and its gate."""

    parity_samples: int = keyed(8, gt=0)
    """Validation samples on which exported and own logits and greedy tokens are compared."""
    parity_tolerance: float = keyed(1e-4, gt=0)
    """Largest absolute difference of fp32 logits that passes."""
    max_test_samples: int | None = keyed(None, gt=0)
    """Samples of the test split on which the perplexities of both are compared; null means all."""
    dtype: Literal["float32", "bfloat16"] = keyed("float32")
    """Type of the exported weights."""
    sample_prompt: str = keyed("def ")
    """Prompt of the text that is shown at the end; without a mask BERT, and without a sentinel T5,
    fills its end."""
    sample_tokens: int = keyed(120, gt=0)
    """Length of that text, in tokens."""


class TrackingConfig(Section):
    """MLflow and TensorBoard."""

    experiment: str = unkeyed("pretrain")
    """MLflow experiment."""
    registered_model: str | None = keyed(None, resolved=("publish", "finetune-publish"))
    """Name in the model registry; null means the run's name."""
    tensorboard: bool = unkeyed(False)
    """Whether TensorBoard event files are written beside the run."""
