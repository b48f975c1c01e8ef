"""Export stage: conversion of a checkpoint to a transformers directory that passes the gate.

This module also selects the samples for the gate and writes a sample output of the exported model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacore.artifact.files import workspace_errors, write_json
from megacore.artifact.workspace import MODEL_DIRECTORY, PARITY_FILE, SAMPLE_FILE
from megacore.checkpoint.format import reading, verify
from megacore.convert.counterparts import exportable
from megacore.convert.hf.forms import hf_form_of
from megacore.convert.hf.write import copy_tokenizer, write_model
from megacore.convert.key_map import LazyTensors
from megacore.convert.model_card import model_card
from megacore.convert.outputs import ModelPair, to_device
from megacore.convert.parity import (
    Batches,
    check_models,
    compare_native,
    compare_tokenizers,
    load_exported,
    load_exported_tokenizer,
    our_perplexity,
)
from megacore.convert.report import ParityReport
from megacore.convert.source import CheckpointTensors, load_weights
from megacore.convert.tokenizers import with_begin
from megacore.data.build import open_split
from megacore.data.samples import Dataset
from megacore.errors import ConversionError, DataFormatError
from megacore.hardware import refuse_unsupported_accelerator
from megacore.jobs.run import ConvertJob
from megacore.models.base import Model
from megacore.models.inputs import InputRules, MaskRules, ModelInput, input_rules
from megacore.models.parameters import parameter_count
from megacore.tokenizer import load_tokenizer

_ACTIVATIONS = 1.1
"""Memory of the gate relative to that of the weights of its models."""
_LOGITS = 1 << 24
"""Maximum number of logits per scored batch: 64 MiB in fp32."""
_CANDIDATES = 5
"""Number of tokens shown for each mask."""
_SENTINEL = "<extra_id_0>"


@dataclass(frozen=True)
class Samples:
    """Validation samples for logits and greedy choices, and a split for perplexity."""

    rows: npt.NDArray[np.int64]
    """[samples, width] ids of the validation split; -1 is padding."""
    validation: ModelInput
    """`rows` as model input."""
    split: str
    """Split for perplexity: test, or valid if there is no test split."""
    batches: Batches
    """Micro batches of `split`."""

    def texts(self, job: ConvertJob) -> list[list[int]]:
        """Return the ids of each validation sample's text: the model's input without padding."""
        length = self.rows.shape[1] if job.config.family == "gpt" else job.config.data.seq_length
        return [[token for token in row[:length].tolist() if token >= 0] for row in self.rows]


def export(job: ConvertJob, beat: Callable[[str], None] = lambda phase: None) -> ParityReport:
    """Fill `job.output_directory` with `model/`, `parity.json` and `sample.txt`.

    The weights are the checkpoint's fp32 main weights, written in `export.dtype`. If the gate
    fails, its report is also left in `job.exit_directory`, because a failed stage's output is
    discarded. `beat` is called with the name of each phase; in long phases it is called again for
    every tensor or batch.

    Raises:
        ConversionError: if transformers has no such model, or the export differs from the model.
        CheckpointError: if the checkpoint is damaged or of another model.
        DataFormatError: if the validation split has no samples.
    """
    exportable(job.config.family, job.config.model, job.config.data)
    output, directory = Path(job.output_directory), Path(job.output_directory) / MODEL_DIRECTORY
    with reading(Path(job.checkpoint)):
        beat("verify")
        marker = verify(Path(job.checkpoint))
        weights = CheckpointTensors(Path(job.checkpoint))

        def read(name: str) -> Tensor:
            beat("read weights")
            return weights[name]

        tensors = LazyTensors(weights, read)
        write_export(directory, job, tensors)
        model = load_weights(job.spec, tensors, _device(job))
    report, exported = pass_gate(job, model, beat)
    beat("sample")
    card = model_card(
        job.config, job.spec, iterations=marker.iteration, facts=job.card, report=report
    )
    with workspace_errors(output):
        (directory / "README.md").write_text(card, encoding="utf-8")
    write_sample(
        output / SAMPLE_FILE,
        job.config.family,
        exported.to("cpu"),
        load_exported_tokenizer(directory),
        prompt=job.config.export.sample_prompt,
        new_tokens=job.config.export.sample_tokens,
        seed=job.config.seed,
    )
    return report


def write_export(directory: Path, job: ConvertJob, tensors: Mapping[str, Tensor]) -> None:
    """Write weights, configuration and tokenizer, with one tensor in memory at a time.

    Raises:
        ConversionError: if `tensors` do not match the configuration.
        DataFormatError: if the tokenizer's files are damaged.
        WorkspaceError: if `directory` cannot be written.
    """
    tokenizer = Path(job.tokenizer_directory)
    spec = with_begin(job.spec, tokenizer)
    write_model(directory, spec, tensors, dtype=job.config.export.dtype)
    copy_tokenizer(tokenizer, directory, spec)


def pass_gate(
    job: ConvertJob, model: Model, beat: Callable[[str], None] = lambda phase: None
) -> tuple[ParityReport, Any]:
    """Compare the job's export, loaded by transformers, with `model` and write `parity.json`.

    The weights of `model` are rounded to the export's type in place.

    Returns:
        The report and the loaded model.

    Raises:
        ConversionError: if the models differ.
    """
    config = job.config.export
    directory = Path(job.output_directory) / MODEL_DIRECTORY
    beat("load the export")
    exported, tokenizer = load_exported(directory), load_exported_tokenizer(directory)
    device = next(model.parameters()).device
    beat("compare")
    samples = samples_of(job, device, lambda: beat("compare perplexities"))
    report = ParityReport(config.parity_tolerance, config.dtype, perplexity_split=samples.split)
    pair = ModelPair(job.spec, hf_form_of(job.spec)[1], model, exported.to(device))
    compare_tokenizers(
        report,
        load_tokenizer(Path(job.tokenizer_directory)),
        tokenizer,
        job.special_tokens,
        samples.texts(job),
    )
    if config.dtype != "float32":
        trained = our_perplexity(pair, samples.batches)
        _round(model, getattr(torch, config.dtype))
        native = load_exported(directory, getattr(torch, config.dtype)).to(device)
        compare_native(report, native, trained, samples.batches)
    check_models(report, pair, samples.validation, samples.batches)
    _write_report(job, report)
    return report, exported


def _write_report(job: ConvertJob, report: ParityReport) -> None:
    """Write the report to the output; if the gate failed, also to the exit directory.

    Raises:
        ConversionError: if the gate failed.
    """
    write_json(Path(job.output_directory) / PARITY_FILE, report.to_json())
    if report.passed:
        return
    target = Path(job.exit_directory) / PARITY_FILE
    with workspace_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, report.to_json())
    raise ConversionError(
        f"the export of {job.checkpoint} is not the model that was trained and is not published: "
        f"{report.sentence()}; every number is in {target}"
    )


def _round(model: Model, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def _device(job: ConvertJob) -> torch.device:
    """Return the GPU if both models fit on it: it scores a test split in seconds; else the CPU.

    They are in fp32, and for a smaller type of the export there is a third one in that type.
    """
    refuse_unsupported_accelerator()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    needed = parameter_count(job.spec) * (8 if job.config.export.dtype == "float32" else 10)
    free, _ = torch.cuda.mem_get_info()
    return torch.device("cuda" if free > _ACTIVATIONS * needed else "cpu")


def samples_of(
    job: ConvertJob, device: torch.device | str, on_batch: Callable[[], None] = lambda: None
) -> Samples:
    """Return the samples of a run; `on_batch` is called before each batch is read.

    Raises:
        DataFormatError: if the validation split has no samples.
    """
    rules = _rules(job)
    rows = validation_rows(job)
    split, test = "test", _open(job, "test")
    if len(test) == 0:
        split, test = "valid", _open(job, "valid")
    return Samples(
        rows,
        to_device(rules.read(torch.from_numpy(rows)), device),
        split,
        lambda: _batches(job, test, rules, device, on_batch),
    )


def validation_rows(job: ConvertJob) -> npt.NDArray[np.int64]:
    """Read the first `export.parity_samples` samples (or fewer) of the validation split.

    Returns:
        The ids, [samples, width].

    Raises:
        DataFormatError: if the split has no samples.
    """
    dataset = _open(job, "valid")
    count = min(job.config.export.parity_samples, len(dataset))
    if count == 0:
        raise DataFormatError(
            f"{job.index_directory} has no validation samples on which the export can be compared: "
            f"give data.split {job.config.data.split_weights!r} a larger second weight"
        )
    return np.ascontiguousarray(dataset.gather(range(count)), dtype=np.int64)


def _rules(job: ConvertJob) -> InputRules:
    """Return rules that read each row as one text, even if training separates documents."""
    rules = input_rules(job.config, job.special_tokens)
    if isinstance(rules, MaskRules):
        return replace(rules, reset_position_ids=False, reset_attention_mask=False)
    return rules


def _open(job: ConvertJob, split: str) -> Dataset:
    return open_split(
        job.token_prefixes,
        job.index_directory,
        split,
        job.config,
        tokenizer_directory=job.tokenizer_directory,
    )


def _batches(
    job: ConvertJob,
    dataset: Dataset,
    rules: InputRules,
    device: torch.device | str,
    on_batch: Callable[[], None],
) -> Iterator[ModelInput]:
    limit = job.config.export.max_test_samples
    count = len(dataset) if limit is None else min(limit, len(dataset))
    size = max(1, _LOGITS // (job.config.data.seq_length * job.spec.padded_vocab_size))
    for start in range(0, count, size):
        on_batch()
        numbers = range(start, min(start + size, count))
        rows = torch.from_numpy(np.ascontiguousarray(dataset.gather(numbers), dtype=np.int64))
        yield to_device(rules.read(rows), device)


def write_sample(
    path: Path, family: str, model: Any, tokenizer: Any, *, prompt: str, new_tokens: int, seed: int
) -> str:
    """Write a sample output of a transformers model to `path` and return it.

    A causal model continues `prompt` by `new_tokens` tokens, sampled according to its generation
    config. For BERT, the output has the best tokens of each mask; for T5, the decoder's text for
    the sentinels. A prompt without mask or sentinel gets one at its end. The same seed gives the
    same text.

    Raises:
        WorkspaceError: if `path` cannot be written.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        match family:
            case "bert":
                text = _filled_masks(model, tokenizer, prompt)
            case "t5":
                text = _filled_spans(model, tokenizer, prompt, new_tokens)
            case _:
                text = _continued(model, tokenizer, prompt, new_tokens)
    with workspace_errors(path):
        path.write_text(text + "\n", encoding="utf-8")
    return text


def _continued(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """Sample a continuation of `prompt`, without the end-of-document token.

    The text may exceed the model's positions: each call of `generate` gets the last tokens, at most
    half as many as there are positions.
    """
    positions = model.config.max_position_embeddings
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    total = len(ids) + new_tokens
    while len(ids) < total:
        seen = torch.tensor([ids[-max(1, positions // 2) :]])
        count = min(total - len(ids), positions - seen.shape[1])
        written = model.generate(
            seen, attention_mask=torch.ones_like(seen), max_new_tokens=count, min_new_tokens=count
        )
        ids = ids + written[0, seen.shape[1] :].tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _filled_masks(model: Any, tokenizer: Any, prompt: str) -> str:
    """Return the prompt and the most probable tokens for each of its masks."""
    if tokenizer.mask_token not in prompt:
        prompt = f"{prompt.rstrip()} {tokenizer.mask_token}"
    positions = model.config.max_position_embeddings
    words = tokenizer(prompt, add_special_tokens=False)["input_ids"][-(positions - 2) :]
    ids = torch.tensor([[tokenizer.cls_token_id, *words, tokenizer.sep_token_id]])
    output = model(ids)
    logits = output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    lines = [prompt]
    for index in (ids[0] == tokenizer.mask_token_id).nonzero().flatten().tolist():
        probabilities, tokens = logits[0, index].float().softmax(-1).topk(_CANDIDATES)
        candidates = (
            f"{tokenizer.decode([token])!r} {probability:.1%}"
            for token, probability in zip(tokens.tolist(), probabilities.tolist(), strict=True)
        )
        lines.append(f"{tokenizer.mask_token}: {', '.join(candidates)}")
    return "\n".join(lines)


def _filled_spans(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """Return the prompt and the decoder's text for its sentinels."""
    if _SENTINEL not in prompt:
        prompt = f"{prompt.rstrip()} {_SENTINEL}"
    words = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*words, model.config.eos_token_id]])
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
    )
    return f"{prompt}\n{tokenizer.decode(written[0], skip_special_tokens=False)}"
