"""Model card (`README.md`) of an export, with the metadata of a hub page."""

import math
from collections.abc import Mapping, Sequence

import yaml

import megacore
from megacore.config.model import Family
from megacore.config.optim import OptimizerName
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.convert.hf.forms import hf_form_of
from megacore.convert.report import ParityReport

_CARD = """\
---
{header}---

# {name}

{summary}

## How to use

```python
{usage}
```
{publish}
## Facts

| | |
| --- | --- |
{facts}

{sections}
"""
_PUBLISH = """
To publish it under your name on the Hugging Face hub:

```python
from transformers import {auto_class}, AutoTokenizer

for part in ({auto_class}, AutoTokenizer):
    part.from_pretrained("path/to/this/directory").push_to_hub("your-name/{name}")
```
"""
_SUMMARY = (
    "{kind} of {parameters:,} parameters ({layers}, hidden size {hidden}, {heads} heads, "
    "{positions} positions, vocabulary {vocab_size}), written by megacore {version}."
)
_OPTIMIZERS: dict[OptimizerName, str] = {"adam": "AdamW", "muon": "Muon and AdamW"}
_KINDS: dict[Family, str] = {
    "gpt": "A {class_name} language model",
    "bert": "A {class_name} encoder, trained to predict masked tokens{binary},",
    "t5": "A {class_name} encoder-decoder, trained to write the spans that sentinels stand for,",
}
_NAMES = {"GPT2LMHeadModel": "GPT-2"}
"""Common names of classes, where the class name is less well known."""
_TAGS: dict[Family, str] = {
    "gpt": "text-generation",
    "bert": "fill-mask",
    "t5": "text2text-generation",
}
_AUTO_CLASSES: dict[Family, str] = {
    "gpt": "AutoModelForCausalLM",
    "bert": "AutoModelForPreTraining",
    "t5": "AutoModelForSeq2SeqLM",
}
_USAGE: dict[Family, str] = {
    "gpt": """\
from transformers import pipeline

generator = pipeline("text-generation", "path/to/this/directory")
print(generator(PROMPT, max_new_tokens=NEW_TOKENS)[0]["generated_text"])""",
    "bert": """\
from transformers import pipeline

filler = pipeline("fill-mask", "path/to/this/directory")
print(filler(f"{filler.tokenizer.mask_token} is what it predicts best."))""",
    "t5": """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
model = AutoModelForSeq2SeqLM.from_pretrained("path/to/this/directory")
text = "The <extra_id_0> walks in <extra_id_1> park" + tokenizer.eos_token
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
written = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], \
max_new_tokens=32)
print(tokenizer.decode(written[0]))""",
}
_NEW_TOKENS = 64
"""Most tokens that the example of a decoder writes."""
_LIMITS: dict[Family, str] = {
    "gpt": (
        "This is a base model: it continues text and repeats what its data holds, mistakes and "
        "biases included."
    ),
    "bert": (
        "This is a base model: it fills in masks as its data does, mistakes and biases included; "
        "other tasks need fine-tuning."
    ),
    "t5": (
        "This is a base model: it fills in spans as its data does, mistakes and biases included; "
        "other tasks need fine-tuning."
    ),
}
_WEIGHTS = {
    "float32": (
        "The weights are the fp32 main weights of training, stored in float32 whatever precision "
        "training "
        'computed in; load\nthem with `dtype="bfloat16"` for half the memory.'
    ),
    "bfloat16": "The weights are the fp32 main weights of training, rounded to bfloat16.",
}


_COMPARED = """\
Before it was published this directory was loaded with transformers and compared with the trained \
model: {report}."""
_NOT_COMPARED = "This directory was written without comparing it with the checkpoint."


def model_card(
    config: RunConfig,
    spec: ModelSpec,
    *,
    iterations: int,
    facts: Mapping[str, str],
    report: ParityReport,
) -> str:
    """Return the card of a run's export in Markdown with a YAML header.

    Args:
        config: configuration of the run.
        spec: spec of the model.
        iterations: number of optimizer steps.
        facts: data, perplexities and lineage, one row each.
        report: report of the gate.
    """
    training = (
        f"{iterations} iterations of {config.train.global_batch_size} sequences of "
        f"{config.data.seq_length} tokens, {_OPTIMIZERS[config.optim.name]} with peak "
        f"learning rate {config.optim.lr:g}, seed {config.seed}."
    )
    if config.train.pretrained_checkpoint is not None:
        training += f" The first weights are those of {config.train.pretrained_checkpoint}."
    return _card(
        config.name,
        spec,
        training=training,
        facts=facts,
        dtype=config.export.dtype,
        prompt=config.export.sample_prompt,
        parity=_COMPARED.format(report=report.sentence()),
    )


def bare_card(
    name: str,
    spec: ModelSpec,
    *,
    iterations: int,
    dtype: str,
    facts: Mapping[str, str],
) -> str:
    """Return the card of a checkpoint's export; the arguments are those of `model_card`."""
    return _card(
        name,
        spec,
        training=f"{iterations} iterations."
        if iterations
        else "Not trained further since it was imported.",
        facts=facts,
        dtype=dtype,
        prompt="Once upon a time",
        parity=_NOT_COMPARED,
    )


def _card(
    name: str,
    spec: ModelSpec,
    *,
    training: str,
    facts: Mapping[str, str],
    dtype: str,
    prompt: str,
    parity: str,
) -> str:
    family, model = spec.family, spec.model
    hf_class, form = hf_form_of(spec)
    shapes = form.key_map(spec).their_shapes.values()
    decoder = f" + {model.decoder_layers}" if family == "t5" else ""
    head = "is apart from" if model.untie_embeddings_and_output_weights else "is tied to"
    # AutoModelForPreTraining would add a binary head with random weights
    masked_only = family == "bert" and not model.bert_binary_head
    return render_card(
        name,
        _SUMMARY.format(
            kind=_KINDS[family].format(
                class_name=_NAMES.get(hf_class.architecture, hf_class.architecture),
                binary="" if masked_only else " and how two segments belong together",
            ),
            version=megacore.__version__,
            parameters=sum(map(math.prod, shapes)),
            layers=f"{model.num_layers}{decoder} layers",
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            positions=spec.max_position_embeddings,
            vocab_size=spec.vocab_size,
        ),
        pipeline_tag=_TAGS[family],
        tags=[hf_class.tag, "megacore", "pretraining"],
        auto_class="AutoModelForMaskedLM" if masked_only else _AUTO_CLASSES[family],
        usage=_USAGE[family]
        .replace("NEW_TOKENS", str(example_tokens(spec.max_position_embeddings)))
        .replace("PROMPT", repr(prompt)),
        facts=facts,
        sections={
            "Training": training,
            "Weights": (
                f"{_WEIGHTS[dtype]} Rows that padded the vocabulary are cut; the output head "
                f"{head} the token embedding."
            ),
            "Parity": parity,
            "Limits": _LIMITS[family],
        },
    )


def example_tokens(positions: int | None) -> int:
    """Return the number of tokens that a card's example writes, half of a small position table."""
    return _NEW_TOKENS if positions is None else min(_NEW_TOKENS, max(1, positions // 2))


def render_card(
    name: str,
    summary: str,
    *,
    pipeline_tag: str,
    tags: Sequence[str],
    usage: str,
    facts: Mapping[str, str],
    sections: Mapping[str, str],
    auto_class: str,
) -> str:
    """Return a model's card as Markdown with a YAML header.

    Args:
        name: name of the model.
        summary: one sentence that describes the model.
        pipeline_tag: the hub's name of the model's task.
        tags: search tags on the hub.
        usage: Python code that loads the model.
        facts: rows of a table, by title.
        sections: further text, by title.
        auto_class: class of transformers that loads the model.
    """
    header = {
        "model_name": name,
        "library_name": "transformers",
        "pipeline_tag": pipeline_tag,
        "tags": list(tags),
    }
    return _CARD.format(
        header=yaml.safe_dump(header, sort_keys=False),
        name=name,
        summary=summary,
        usage=usage,
        publish=_PUBLISH.format(auto_class=auto_class, name=name),
        facts="\n".join(f"| {_cell(title)} | {_cell(value)} |" for title, value in facts.items()),
        sections="\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items()),
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
