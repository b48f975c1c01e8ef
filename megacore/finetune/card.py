"""`README.md` of a fine-tuned model: what a hub page and a stranger need to know."""

from collections.abc import Mapping
from typing import Any

from megacore.config.finetune import FinetuneConfig
from megacore.convert.model_card import render_card
from megacore.redact import redact

AUTO_CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal_lm": "AutoModelForCausalLM",
}
"""Class of transformers that loads the model, by `task.kind`."""
_METRICS = """\
Before the first step and of this model (step {iteration}, chosen by {metric} of the validation split).

| metric | validation, before | validation | test |
| --- | --- | --- | --- |
{metrics}"""
_PARITY = (
    "Before it was published this directory was loaded with transformers: its loss on {samples} validation samples is "
    "{after:.6g}, where the trained model had {before:.6g} in {precision} (a difference of {difference:.1e}, "
    "{tolerance:g} is allowed)."
)
_LIMITS = "It was fine-tuned from another model and repeats what that and its data hold, mistakes and biases included."
_KINDS = {
    "classification": "A classifier of texts",
    "seq2seq": "A model that writes a text for a text",
    "causal_lm": "A language model",
}
_TAGS = {"classification": "text-classification", "seq2seq": "text2text-generation", "causal_lm": "text-generation"}
_USAGE = {
    "classification": """\
from transformers import pipeline

classifier = pipeline("text-classification", "path/to/this/directory")
print(classifier({example}))""",
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
print(generator("Once upon a time", max_new_tokens=64)[0]["generated_text"])""",
}


def finetuned_card(
    config: FinetuneConfig,
    model: Any,
    *,
    version: str,
    recorded: Mapping[str, Any],
    report: Mapping[str, Any],
    facts: Mapping[str, str],
) -> str:
    """The card as Markdown with a YAML header.

    Args:
        config: the fine-tuning.
        model: the loaded model.
        version: of this package.
        recorded: `metrics.json` of the best model.
        report: what the gate measured.
        facts: data, lineage, one row each.
    """
    kind = config.task.kind
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = {"Fine-tuned from": config.model.path, "Task": _task(config)} | _labels(config, model) | dict(facts)
    return render_card(
        config.name,
        f"{_KINDS[kind]}: {type(model).__name__} ({AUTO_CLASSES[kind]}) of {parameters:,} parameters, fine-tuned by "
        f"megacore {version}.",
        pipeline_tag=_TAGS[kind],
        tags=["megacore", "fine-tuned", model.config.model_type],
        auto_class=AUTO_CLASSES[kind],
        usage=_usage(config),
        facts={title: redact(value) for title, value in rows.items()},
        sections={
            "Metrics": _METRICS.format(
                iteration=recorded["iteration"], metric=recorded["metric"], metrics=_metrics(recorded)
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


def _usage(config: FinetuneConfig) -> str:
    task = config.task
    if task.kind == "classification":
        pair = task.sentence2_column is not None or task.glue not in (None, "cola", "sst2")
        example = '{"text": "A text.", "text_pair": "Another one."}' if pair else '"A text."'
        return _USAGE[task.kind].replace("{example}", example)
    if task.kind == "seq2seq":
        used = _USAGE[task.kind].replace("{example}", repr(f"{task.source_prefix}A text to read."))
        return used.replace("{length}", str(task.max_target_length)).replace("{beams}", str(task.num_beams))
    return _USAGE[task.kind]


def _task(config: FinetuneConfig) -> str:
    task = config.task
    if task.kind == "classification":
        return f"GLUE's {task.glue}" if task.glue else f"{task.label_column} of {task.sentence1_column}"
    if task.kind == "seq2seq":
        return f"{task.target_column} of {task.source_column}"
    return f"the next token, in blocks of {task.block_size}"


def _labels(config: FinetuneConfig, model: Any) -> dict[str, str]:
    if config.task.kind != "classification" or model.config.num_labels < 2:
        return {}
    return {"Labels": ", ".join(str(model.config.id2label[number]) for number in range(model.config.num_labels))}


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
        f"{train.gradient_accumulation_steps}, peak learning rate {optim.lr:g} ({optim.lr_scheduler}), seed "
        f"{config.seed}, in {recorded['precision']} with {recorded['distributed']}."
    )
