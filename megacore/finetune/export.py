"""Export of a fine-tuning's best model as a transformers directory that passes the gate."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import megacore
from megacore.artifact.files import (
    access_error,
    copy_tree,
    read_object,
    workspace_errors,
    write_json,
)
from megacore.artifact.workspace import MODEL_DIRECTORY, PARITY_FILE, SAMPLE_FILE
from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import classification_settings
from megacore.convert.model_card import example_tokens, render_card
from megacore.convert.tokenizers import missing_end
from megacore.errors import ConversionError, one_line
from megacore.finetune.best import read_best
from megacore.finetune.examples import PAIR_SEPARATOR, SEGMENTS, largest_id
from megacore.finetune.pretrained import LOCAL_ONLY, quiet
from megacore.finetune.seq2seq import Seq2SeqTask
from megacore.finetune.task import AUTO_CLASSES, FinetuneTask, build_task, rows_of, sample_losses
from megacore.jobs.finetune import FinetuneExportJob
from megacore.redact import redact

_METRICS = """\
Before the first step and of this model (step {iteration}, chosen by {metric} of the validation \
split).

| metric | validation, before | validation | test |
| --- | --- | --- | --- |
{metrics}"""
_PARITY = (
    "Before it was published this directory was loaded with transformers: its loss on {samples} "
    "validation samples is {after:.6g}, where the trained model had {before:.6g} in {precision} (a "
    "difference of {difference:.1e}, {tolerance:g} is allowed)."
)
_LIMITS = (
    "It was fine-tuned from another model and repeats what that and its data hold, mistakes and "
    "biases included."
)
_KINDS = {
    "classification": "A classifier of texts",
    "multiple_choice": "A model that chooses one of several answers",
    "seq2seq": "A model that writes a text for a text",
    "causal_lm": "A language model",
}
_TAGS = {
    "classification": "text-classification",
    "multiple_choice": "multiple-choice",
    "seq2seq": "text2text-generation",
    "causal_lm": "text-generation",
}
_USAGE = {
    "classification": """\
from transformers import pipeline

classifier = pipeline("text-classification", "path/to/this/directory")
print(classifier({example}))""",
    "multiple_choice": """\
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
model = AutoModelForMultipleChoice.from_pretrained("path/to/this/directory")
choices = ["One answer.", "Another one."]
inputs = tokenizer(["A text."] * len(choices), choices, padding=True, return_tensors="pt")
scores = model(**{name: values[None] for name, values in inputs.items()}).logits
print(choices[int(scores.argmax())])""",
    "seq2seq": """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
model = AutoModelForSeq2SeqLM.from_pretrained("path/to/this/directory")
inputs = tokenizer({example}, return_tensors="pt")
written = model.generate(**inputs, max_new_tokens={length}, num_beams={beams})
print(tokenizer.decode(written[0], skip_special_tokens=True))""",
    "causal_lm": """\
from transformers import pipeline

generator = pipeline("text-generation", "path/to/this/directory")
print(generator("Once upon a time", max_new_tokens={length})[0]["generated_text"])""",
}


def finetuned_card(
    config: FinetuneConfig,
    exported: "Exported",
    *,
    version: str,
    recorded: Mapping[str, Any],
    report: Mapping[str, Any],
    facts: Mapping[str, str],
) -> str:
    """Return the model card as Markdown with a YAML header.

    Args:
        config: configuration of the fine-tuning.
        exported: loaded directory.
        version: version of this package.
        recorded: `metrics.json` of the best model.
        report: measurements of the gate.
        facts: additional table rows, such as data and lineage.
    """
    kind, model = config.task.kind, exported.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = (
        {"Fine-tuned from": config.model.path, "Task": _task(config)}
        | _labels(config, model)
        | dict(facts)
    )
    return render_card(
        config.name,
        f"{_KINDS[kind]}: {type(model).__name__} ({AUTO_CLASSES[kind]}) of {parameters:,} "
        f"parameters, fine-tuned by megacore {version}.",
        pipeline_tag=_TAGS[kind],
        tags=["megacore", "fine-tuned", model.config.model_type],
        auto_class=AUTO_CLASSES[kind],
        usage=_usage(config, exported),
        facts={title: redact(value) for title, value in rows.items()},
        sections={
            "Metrics": _METRICS.format(
                iteration=recorded["iteration"],
                metric=recorded["metric"],
                metrics=_metrics(recorded),
            ),
            "Training": _training(config, recorded),
            "Parity": _PARITY.format(
                samples=report["samples"],
                after=report["loss_recomputed"],
                before=report["loss_recorded"],
                precision=recorded["precision"],
                difference=report["relative_difference"],
                tolerance=report["tolerance"],
            ),
            "Limits": _LIMITS,
        },
    )


def _usage(config: FinetuneConfig, exported: "Exported") -> str:
    task, tokenizer = config.task, exported.tokenizer
    used = _USAGE[task.kind]
    # The texts must be those of the samples: `encode_texts` adds what the tokenizer does not.
    end = missing_end(tokenizer, exported.model.config)
    last = "" if end is None else tokenizer.convert_ids_to_tokens(end)
    if task.kind == "classification":
        example: str | dict[str, str] = f"A text.{last}"
        if classification_settings(task).sentence2 is not None:
            begin = "" if tokenizer.num_special_tokens_to_add(pair=True) else PAIR_SEPARATOR
            example = {"text": "A text.", "text_pair": f"{begin}Another one.{last}"}
        return used.replace("{example}", json.dumps(example, ensure_ascii=False))
    if task.kind == "seq2seq":
        used = used.replace("{example}", repr(f"{task.source_prefix}A text to read.{last}"))
        return used.replace("{length}", str(task.max_target_length)).replace(
            "{beams}", str(task.num_beams)
        )
    if task.kind == "causal_lm":
        positions = getattr(exported.model.config, "max_position_embeddings", None)
        return used.replace("{length}", str(example_tokens(positions)))
    return used


def _task(config: FinetuneConfig) -> str:
    task = config.task
    if task.kind == "classification":
        return (
            f"GLUE's {task.glue}"
            if task.glue
            else f"{task.label_column} of {task.sentence1_column}"
        )
    if task.kind == "multiple_choice":
        return f"{task.label_column} among {', '.join(task.choices_columns)}"
    if task.kind == "seq2seq":
        return f"{task.target_column} of {task.source_column}"
    return f"the next token, in blocks of {task.block_size}"


def _labels(config: FinetuneConfig, model: Any) -> dict[str, str]:
    if config.task.kind != "classification" or model.config.num_labels < 2:
        return {}
    return {
        "Labels": ", ".join(
            str(model.config.id2label[number]) for number in range(model.config.num_labels)
        )
    }


def _metrics(recorded: Mapping[str, Any]) -> str:
    columns = (recorded["start_metrics"] or {}, recorded["metrics"], recorded["test_metrics"] or {})
    lines = []
    for name in sorted(recorded["metrics"]):
        cells = [f"{column[name]:.4f}" if name in column else "-" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _training(config: FinetuneConfig, recorded: Mapping[str, Any]) -> str:
    train, optim = config.train, config.optim
    return (
        f"{recorded['iteration']} optimizer steps with micro batches of {train.micro_batch_size} x "
        f"{train.gradient_accumulation_steps}, peak learning rate {optim.lr:g} "
        f"({optim.lr_scheduler}), seed {config.seed}, in {recorded['precision']} with "
        f"{recorded['distributed']}."
    )


TOLERANCES = {"fp32": (1e-3, 0.01), "bf16": (0.05, 1.0), "fp16": (0.05, 1.0)}
"""Tolerance of the mean loss, by the precision of the recorded losses: the largest difference
relative to the recorded mean, and the smallest denominator of that ratio. A 16-bit type rounds
each logit by up to 1/256 of its value."""
_TEXTS = 8
"""Number of validation samples whose text both tokenizers encode."""


@dataclass(frozen=True)
class Exported:
    """A loaded transformers directory."""

    model: Any
    """Model in fp32, in evaluation mode."""
    tokenizer: Any


def load_exported(directory: Path, kind: str) -> Exported:
    """Load a transformers directory with the class for a kind of task.

    Raises ConversionError if a weight is missing, unexpected, empty or not finite, and
    FileAccessError.
    """
    import transformers

    auto = getattr(transformers, AUTO_CLASSES[kind])
    try:
        with quiet():
            model, info = auto.from_pretrained(
                directory,
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                **LOCAL_ONLY,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **LOCAL_ONLY)
    except MemoryError:
        raise
    except Exception as error:  # safetensors and transformers raise plain Exception
        if isinstance(error, OSError) and (fault := access_error(error, directory)) is not None:
            raise fault from error
        raise ConversionError(
            f"the export {directory} cannot be loaded as {AUTO_CLASSES[kind]}: "
            f"{one_line(error, 300)}"
        ) from error
    for key_type in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(key_type):
            names = sorted(map(str, info[key_type]))
            raise ConversionError(
                f"the export {directory} has {len(names)} {key_type.replace('_', ' ')}, {names[0]} "
                "first: its weights are not those of its config.json"
            )
    for name, tensor in model.state_dict().items():
        if tensor.numel() == 0:
            raise ConversionError(
                f"the export {directory} has an empty tensor {name}: the ranks' parts were not put "
                "together"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConversionError(
                f"the export {directory} has values in {name} that are not finite: train again"
            )
    _check_tied(directory, model)
    return Exported(model.eval(), tokenizer)


def _check_tied(directory: Path, model: Any) -> None:
    """Raise ConversionError if a head that is configured as tied differs from the embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(model.config, "tie_word_embeddings", False) and getattr(
        model, "_tied_weights_keys", None
    )
    if not tied or head is None or embedding is None or head.weight.shape != embedding.weight.shape:
        return
    if not torch.equal(head.weight, embedding.weight):
        raise ConversionError(
            f"the export {directory} says that its head is tied to its embedding, and they differ"
        )


def compare_tokenizers(exported: Exported, task: FinetuneTask, directory: Path) -> int:
    """Check that the export's tokenizer is the one that encoded the samples.

    Returns the number of compared texts.

    Raises ConversionError with the first difference.
    """
    loaded, original = exported.tokenizer, task.tokenizer
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(loaded, name) != getattr(original, name):
            raise ConversionError(
                f"the tokenizer of the export {directory} has {name} {getattr(loaded, name)} and "
                f"that of the training {getattr(original, name)}"
            )
    if loaded.get_vocab() != original.get_vocab():
        raise ConversionError(
            f"the tokenizer of the export {directory} has {len(loaded.get_vocab())} entries, and "
            f"not those of the training's ({len(original.get_vocab())})"
        )
    rows = rows_of(task, "valid")
    count = min(_TEXTS, len(rows))
    for number in range(count):
        text = original.decode(rows[number]["input_ids"], skip_special_tokens=True)
        if loaded(text)["input_ids"] != original(text)["input_ids"]:
            raise ConversionError(
                f"the tokenizer of the export {directory} takes {text[:60]!r} apart differently "
                "from the training's"
            )
    embedded = exported.model.get_input_embeddings().weight.shape[0]
    if largest_id(loaded) >= embedded:
        raise ConversionError(
            f"the tokenizer of the export {directory} has ids up to {largest_id(loaded)} and the "
            f"model embeds {embedded}"
        )
    return count


def compare_losses(
    exported: Exported,
    task: FinetuneTask,
    recorded: Mapping[str, Any],
    directory: Path,
    beat: Callable[[str], None] = lambda phase: None,
) -> dict[str, Any]:
    """Recompute the recorded losses of validation samples with the loaded model, in fp32.

    Args:
        exported: loaded directory.
        task: task with the validation samples.
        recorded: `metrics.json` of the best model.
        directory: directory of the export, for error messages.
        beat: callback, called with the current phase before each sample.

    Returns:
        The gate's report: losses, their relative difference and the tolerance.

    Raises ConversionError when the mean differs by more than the precision explains.
    """
    expected = [float(loss) for loss in recorded["sample_losses"]]
    device = next(exported.model.parameters()).device
    losses = sample_losses(task, exported.model, device, len(expected), beat)
    mean_before, mean_after = sum(expected) / len(expected), sum(losses) / len(losses)
    tolerance, least = TOLERANCES[recorded["precision"]]
    difference = abs(mean_after - mean_before) / max(abs(mean_before), least)
    report = {
        "samples": len(expected),
        "loss_recorded": mean_before,
        "loss_recomputed": mean_after,
        "relative_difference": difference,
        "tolerance": tolerance,
    }
    if not difference <= tolerance or len(losses) != len(expected):
        raise ConversionError(
            f"the export {directory} has a loss of {mean_after:.6g} on {len(losses)} validation "
            f"samples, and the model that was trained had {mean_before:.6g} on {len(expected)}, in "
            f"{recorded['precision']}: a difference of {difference:.2g}, beyond the {tolerance:g} "
            "that precision explains"
        )
    return report


_COUNT = 5
_TOKENS = 32
"""Number of new tokens of a continuation."""


def sample_text(config: FinetuneConfig, task: FinetuneTask, exported: Exported) -> str:
    """Return input, target and prediction of the first validation samples as text."""
    rows = rows_of(task, "valid")
    parts = []
    for number in range(min(_COUNT, len(rows))):
        lines = _lines(config, task, exported, rows[number])
        parts.append("\n".join(f"{name}: {' '.join(text.split())}" for name, text in lines))
    return "\n\n".join(parts) + "\n"


def _lines(
    config: FinetuneConfig, task: FinetuneTask, exported: Exported, row: Any
) -> Iterator[tuple[str, str]]:
    model, tokenizer = exported.model, exported.tokenizer
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in task.collate([row]).items()}
    labels = batch.pop("labels")[0]

    def text(ids: torch.Tensor) -> str:
        valid_ids = ids[ids >= 0]
        return str(tokenizer.decode(valid_ids, skip_special_tokens=True))

    with torch.no_grad():
        match config.task.kind:
            case "classification":
                yield "text", text(batch["input_ids"][0])
                logits = model(**batch).logits[0].float()
                names = model.config.id2label
                if len(logits) == 1:  # regression
                    yield "label", f"{float(labels):g}"
                    yield "prediction", f"{float(logits[0]):.3f}"
                else:
                    chosen = int(logits.argmax())
                    yield "label", str(names[int(labels)])
                    yield "prediction", f"{names[chosen]} ({float(logits.softmax(0)[chosen]):.2f})"
            case "multiple_choice":
                scores = model(**batch).logits[0].float()
                for number, ids in enumerate(batch["input_ids"][0]):
                    yield f"choice {number}", text(ids)
                chosen = int(scores.argmax())
                yield "label", str(int(labels))
                yield "prediction", f"{chosen} ({float(scores.softmax(0)[chosen]):.2f})"
            case "seq2seq":
                inputs = {
                    name: batch[name] for name in ("input_ids", "attention_mask") if name in batch
                }
                assert isinstance(task, Seq2SeqTask)
                # The same settings as in the evaluation.
                written = model.generate(**inputs, generation_config=task.generation(model))
                yield "source", text(batch["input_ids"][0])
                yield "target", text(labels)
                yield "prediction", text(written[0])
            case "causal_lm":
                half = max(1, batch["input_ids"].shape[1] // 2)
                prompt = batch["input_ids"][:, :half]
                rest = batch["input_ids"][0, half:][:_TOKENS]
                written = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=max(1, len(rest)),
                    do_sample=False,
                    pad_token_id=tokenizer.pad_token_id
                    if tokenizer.pad_token_id is not None
                    else tokenizer.eos_token_id,
                )
                yield "text", text(prompt[0])
                yield "target", text(rest)
                yield "prediction", text(written[0, half:])


def export(
    job: FinetuneExportJob, device: torch.device, beat: Callable[[str], None] = lambda phase: None
) -> None:
    """Fill `job.output_directory` with `model/`, `parity.json` and `sample.txt`.

    If the gate refuses the model, the reason is also written to `parity.json` in
    `job.exit_directory`, because the output of a failed stage is discarded.

    Raises:
        ConversionError: the directory does not match the trained model.
        CheckpointError: the best model is damaged or incomplete.
        DataFormatError: the validation split has no sample.
        WorkspaceError: the output cannot be written.
    """
    beat("verify")
    task = build_task(job.config, Path(job.examples_directory), Path(job.pretrained_directory))
    try:
        export_best(job, task, device, beat)
    except ConversionError as error:
        directory = Path(job.exit_directory)
        with workspace_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            write_json(directory / PARITY_FILE, {"passed": False, "problem": str(error)})
        raise


def _name_inputs(directory: Path, task: FinetuneTask) -> None:
    """Name segment ids as inputs if the samples have some: best models of old runs lack that."""
    names = task.tokenizer.model_input_names
    if SEGMENTS in names:
        path = directory / "tokenizer_config.json"
        write_json(path, read_object(path) | {"model_input_names": names})


def export_best(
    job: FinetuneExportJob,
    task: FinetuneTask,
    device: torch.device,
    beat: Callable[[str], None] = lambda phase: None,
) -> dict[str, Any]:
    """Run `export` with a task that is already built; return the gate's report."""
    best, output = Path(job.best), Path(job.output_directory)
    directory = output / MODEL_DIRECTORY
    recorded = read_best(best)
    beat("copy")
    copy_tree(best / MODEL_DIRECTORY, directory)
    _name_inputs(directory, task)
    beat("load")
    exported = load_exported(directory, job.config.task.kind)
    exported.model.to(device)
    texts = compare_tokenizers(exported, task, directory)
    report = {
        "passed": True,
        "texts": texts,
        **compare_losses(exported, task, recorded, directory, beat),
    }
    beat("sample")
    with workspace_errors(output):
        sample = sample_text(job.config, task, exported)
        (output / SAMPLE_FILE).write_text(sample, encoding="utf-8")
        card = finetuned_card(
            job.config,
            exported,
            version=megacore.__version__,
            recorded=recorded,
            report=report,
            facts=job.card,
        )
        (directory / "README.md").write_text(card, encoding="utf-8")
        write_json(output / PARITY_FILE, report)
    return report
