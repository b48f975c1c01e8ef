"""A first configuration for a user's text: sizes for this machine and a time budget, as YAML.

The rule, with the numbers below: a model sees the training split EPOCHS times if the budget allows;
of a larger text it sees a part. Of the sizes in SIZES, the largest is chosen that has at most
PARAMETERS_PER_BYTE parameters per byte of text and, in the budget, sees the split EPOCHS times or
TOKENS_PER_PARAMETER tokens per parameter. The time is that of `megacore.plan.throughput`.
"""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megacore.config.data import END_OF_TEXT, TextSource
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.corpus.survey import Survey
from megacore.errors import ConfigError, DataFormatError
from megacore.hardware import Hardware
from megacore.models.parameters import parameter_count
from megacore.plan.layouts import launched_ranks, layout_of
from megacore.plan.throughput import planned_iteration, predict_run
from megacore.tokenizer.build import train_bpe
from megacore.tokenizer.load import JsonTokenizer

SIZES = (
    (2, 128, 2, 2048),
    (4, 128, 4, 2048),
    (4, 256, 4, 2048),
    (6, 384, 6, 4096),
    (8, 512, 8, 8192),
    (12, 768, 12, 32_768),
    (24, 1024, 16, 131_072),
)
"""Layers, hidden size and heads of the models to choose from, and tokens per iteration."""
EPOCHS = 4
"""Number of passes over the training split; more of them make a small model repeat it."""
PARAMETERS_PER_BYTE = 4
TOKENS_PER_PARAMETER = 10
TRAINING_SHARE = 0.8
"""Share of the budget for training; tokenizing, evaluation and export take the rest."""
LEAST_STEPS = 100
BYTES_PER_ENTRY = 1000
"""Bytes of text per entry of the vocabulary, which must occur often enough to be learned."""
VOCABULARIES = (512, 1024, 2048, 4096, 8192)
BYTES_ONLY = 257
"""Entries of a vocabulary without merges: the bytes and the end of a document."""
SEQUENCES = (256, 128, 64, 32)
SPLITS = ("90,5,5", "80,10,10")
SAMPLES_PER_SPLIT = 8
"""Number of samples that the validation and the test split should have."""
DOCUMENTS = 200
"""Number of documents below which text files are cut."""
DOCUMENT_CHARACTERS = (256, 4000)
"""Smallest and largest length of the parts of a cut file."""
_LR_TIMES_HIDDEN = 0.77
_HIGHEST_LR = 4e-3
_PROMPT_CHARACTERS = 40
_FFN_MULTIPLE = 64
_COLUMNS = 99


@dataclass(frozen=True)
class Starter:
    """A proposed configuration."""

    text: str
    """Content of the YAML file."""
    summary: str
    """Model, tokens and expected duration in one line."""


@dataclass(frozen=True)
class _Text:
    """Text of a corpus in tokens, and its division into documents and splits."""

    vocab_size: int
    tokens: int
    documents: int
    document_characters: int | None
    split: str
    seq_length: int

    @property
    def training_share(self) -> float:
        """Share of the documents in the training split."""
        return float(self.split.split(",")[0]) / 100


def propose(survey: Survey, name: str, minutes: float, hardware: Hardware) -> Starter:
    """Return a configuration that fits a text, a machine and a time budget.

    Raises ConfigError if `minutes` is not finite, or if the text is too small to be divided into
    train, validation and test.
    """
    if not math.isfinite(minutes):
        raise ConfigError(f"--minutes is {minutes:g}: give a finite number of minutes")
    text = _divide(survey)
    values, seconds = _size(survey, text, name, minutes * 60 * TRAINING_SHARE, hardware)
    config = RunConfig.model_validate(values)
    parameters = parameter_count(ModelSpec.of(config, text.vocab_size))
    tokens = config.train.train_iters * config.train.global_batch_size * text.seq_length
    passes = tokens / (text.tokens * text.training_share)
    summary = (
        f"{parameters / 1e6:.1f} M parameters, {tokens / 1e6:.2f} M tokens "
        f"({passes:.1f} passes over the training split), about {seconds / 60:.1f} minutes of "
        f"training at the speed predicted for this machine"
    )
    return Starter(_yaml(values, survey, text, summary, minutes), summary)


def _divide(survey: Survey) -> _Text:
    """Choose the vocabulary, the documents, the split and the length of a sample."""
    vocab_size, bytes_per_token = _vocabulary(survey)
    tokens = int(survey.size / bytes_per_token)
    documents, characters = survey.documents, None
    if isinstance(survey.source, TextSource) and (
        documents < DOCUMENTS or survey.largest * 20 > survey.size
    ):
        least, most = DOCUMENT_CHARACTERS
        characters = min(most, max(least, survey.size // DOCUMENTS))
        documents += survey.size // characters
    for split, seq_length in ((split, length) for length in SEQUENCES for split in SPLITS):
        share = float(split.split(",")[1]) / 100
        samples = tokens * share / (seq_length + 1)
        if samples >= SAMPLES_PER_SPLIT and documents * share >= 2:
            return _Text(vocab_size, tokens, documents, characters, split, seq_length)
    least = int(10 * SAMPLES_PER_SPLIT * (SEQUENCES[-1] + 1) * bytes_per_token)
    rows = "" if isinstance(survey.source, TextSource) else f" in {documents} rows"
    raise ConfigError(
        f"the text has {survey.size:,} bytes{rows}, too few to divide them into train, validation "
        f"and test: give at least {least:,} bytes{' in 20 rows' if rows else ''}"
    )


def _vocabulary(survey: Survey) -> tuple[int, float]:
    """Return the size of the vocabulary, and the bytes per token that the sample has with it."""
    allowed = [size for size in VOCABULARIES if size * BYTES_PER_ENTRY <= survey.size * 1.5]
    size = sum(len(text.encode()) for text in survey.sample)
    for vocab_size in [*reversed(allowed or VOCABULARIES[:1]), BYTES_ONLY]:
        try:
            backend = train_bpe(survey.sample, vocab_size)
        except DataFormatError:  # the sample has too few different pairs
            continue
        tokens = sum(map(len, JsonTokenizer(backend, END_OF_TEXT).encode_batch(survey.sample)))
        return vocab_size, size / tokens
    raise AssertionError("a vocabulary of bytes can always be built")


def _size(
    survey: Survey, text: _Text, name: str, budget: float, hardware: Hardware
) -> tuple[dict[str, Any], float]:
    """Return the configuration of the largest suitable model, and its seconds of training."""
    for shape in reversed(SIZES):
        values, steps = _values(survey, text, name, shape, hardware), _full_steps(text, shape[-1])
        seconds = _seconds(values, steps, text.vocab_size, hardware)
        affordable = min(steps, int(steps * budget / seconds))
        parameters = 12 * shape[0] * shape[1] ** 2
        seen = affordable * shape[-1]
        small = parameters <= PARAMETERS_PER_BYTE * survey.size
        if small and (affordable == steps or seen >= TOKENS_PER_PARAMETER * parameters):
            break
    affordable = max(affordable, LEAST_STEPS)
    return _with_steps(values, affordable), seconds * affordable / steps


def _full_steps(text: _Text, tokens_per_step: int) -> int:
    """Return the number of iterations of EPOCHS passes over the training split."""
    tokens = EPOCHS * text.tokens * text.training_share
    return max(LEAST_STEPS, int(tokens / tokens_per_step))


def _values(
    survey: Survey, text: _Text, name: str, shape: Sequence[int], hardware: Hardware
) -> dict[str, Any]:
    """Return the values of a configuration without the number of iterations."""
    layers, hidden, heads, tokens_per_step = shape
    source = survey.source.model_dump(mode="json")
    if text.document_characters is not None:
        source["document_characters"] = text.document_characters
    elif "document_characters" in source:
        del source["document_characters"]
    whole = isinstance(survey.source, TextSource) and survey.documents == 1
    ranks = max(1, len(hardware.gpus))
    per_rank = -(-(tokens_per_step // text.seq_length) // ranks)
    return {
        "name": name,
        "data": {
            "source": source,
            "tokenizer": {"kind": "train-bpe", "vocab_size": text.vocab_size},
            "split": text.split,
            "shuffle_documents": not whole,
            "seq_length": text.seq_length,
        },
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": -(-8 * hidden // 3 // _FFN_MULTIPLE) * _FFN_MULTIPLE,
            "activation": "swiglu",
            "normalization": "rmsnorm",
            "position_embedding_type": "rope",
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "optim": {
            "lr": round(min(_HIGHEST_LR, _LR_TIMES_HIDDEN / hidden), 4),
            "lr_warmup_fraction": 0.05,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
        },
        "train": {
            "micro_batch_size": min(per_rank, 16),
            "global_batch_size": -(-per_rank // min(per_rank, 16)) * min(per_rank, 16) * ranks,
        },
        "evaluate": {"max_samples": 256},
        "export": {"max_test_samples": 64, "sample_prompt": _prompt(survey.sample)},
    }


def _with_steps(values: dict[str, Any], steps: int) -> dict[str, Any]:
    train = values["train"] | {
        "train_iters": steps,
        "log_interval": max(1, steps // 50),
        "eval_interval": -(-steps // 8),
        "eval_iters": 4,
    }
    lr = values["optim"]["lr"]
    optim = {"lr": lr, "min_lr": round(lr / 20, 6), "lr_decay_iters": steps} | values["optim"]
    return values | {
        "train": train,
        "optim": optim,
        "checkpoint": {"save_interval": -(-steps // 2)},
    }


def _seconds(values: dict[str, Any], steps: int, vocab_size: int, hardware: Hardware) -> float:
    """Return the estimated seconds of training with its validations."""
    config = RunConfig.model_validate(_with_steps(values, steps))
    ranks, threads = launched_ranks(config.launch, hardware)
    layout = layout_of(config, ranks, vocab_size)
    return predict_run(planned_iteration(config, vocab_size, hardware, layout, threads)).seconds


def _prompt(sample: Sequence[str]) -> str:
    """Return the beginning of the first text, to its last whole word."""
    text = next(text.strip() for text in sample if text.strip())
    head = text[:_PROMPT_CHARACTERS]
    return head if len(head) == len(text) else head.rpartition(" ")[0] or head


def _yaml(values: dict[str, Any], survey: Survey, text: _Text, summary: str, minutes: float) -> str:
    """Return the configuration as YAML with a comment at each choice."""
    comments = _comments(values, survey, text)
    lines = [
        *_comment(
            "Written by `megacore init`. Every value but data.source has a default; "
            "docs/configuration.md explains the values and the rule behind the sizes."
        ),
        *_comment(f"Budget {minutes:g} {'minute' if minutes == 1 else 'minutes'}: {summary}."),
        f"name: {_scalar(values['name'])}",
    ]
    for section, fields in values.items():
        if not isinstance(fields, dict):
            continue
        lines += ["", f"{section}:"]
        for field, value in fields.items():
            for sentence in comments.get(f"{section}.{field}", ()):
                lines += _comment(sentence, "  ")
            lines.append(f"  {field}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _comment(sentence: str, indent: str = "") -> list[str]:
    """Return a sentence as lines of a comment."""
    return textwrap.wrap(
        sentence, _COLUMNS, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )


def _comments(values: dict[str, Any], survey: Survey, text: _Text) -> dict[str, tuple[str, ...]]:
    """Return the comment lines above the fields, by dotted name."""
    cut = (
        (
            f"Files are cut into documents of at most {text.document_characters} characters, at "
            "blank lines where possible.",
        )
        if text.document_characters
        else ()
    )
    order = (
        "Parts of one text keep their order: validation and test are its end, not parts between."
        if not values["data"]["shuffle_documents"]
        else "Documents are shuffled, so that each split has documents from everywhere."
    )
    entries = (
        "One entry per byte and one for the end of a document, as the text has few different words"
        if text.vocab_size == BYTES_ONLY
        else f"One entry per {BYTES_PER_ENTRY:,} bytes of text, between {VOCABULARIES[0]} and "
        f"{VOCABULARIES[-1]:,}"
    )
    train_percent, valid_percent, test_percent = text.split.split(",")
    return {
        "data.source": (
            f"{survey.size:,} bytes of text in about {text.documents:,} documents.",
            *(f"{remark[:1].upper()}{remark[1:]}." for remark in survey.remarks),
            *cut,
        ),
        "data.tokenizer": (
            f"{entries}: about {survey.size / text.tokens:.1f} bytes per token, "
            f"{text.tokens:,} tokens in all.",
        ),
        "data.split": (
            f"Percent of the documents: {train_percent} train, {valid_percent} validation, "
            f"{test_percent} test.",
        ),
        "data.shuffle_documents": (order,),
        "data.seq_length": ("Tokens that the model sees at once.",),
        "model.num_layers": ("The largest size that fits the text and the time budget.",),
        "model.ffn_hidden_size": (
            "SwiGLU, RMSNorm, rotary positions and no biases, as in Llama, learn faster than the "
            "layers of GPT-2.",
        ),
        "model.hidden_dropout": ("No dropout: the text is seen few times.",),
        "optim.lr": ("Smaller models take higher rates.",),
        "optim.lr_decay_iters": (
            "Set explicitly, so that more train_iters continue the run with the same schedule.",
        ),
        "train.micro_batch_size": (
            "Samples of one forward pass, and of one optimizer step on all ranks.",
        ),
        "train.train_iters": (
            "More iterations continue the finished run from its last checkpoint.",
        ),
        "checkpoint.save_interval": ("An interrupted run resumes from the last checkpoint.",),
        "evaluate.max_samples": ("Samples of each split for the perplexities.",),
        "export.sample_prompt": ("The finished model continues this text in the summary.",),
    }


def _scalar(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_scalar(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_scalar, value)) + "]"
    if isinstance(value, str):
        text = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=2**31)
        return str(text).strip()
    return json.dumps(value)
