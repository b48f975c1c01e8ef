"""`README.md` of an export: what a hub page and a stranger need to know."""

from collections.abc import Mapping

import yaml

from megacore.config.run import RunConfig
from megacore.convert.report import ParityReport

_CARD = """\
---
{header}---

# {name}

A GPT-2 language model of {parameters:,} parameters ({layers} layers, hidden size {hidden}, {heads} heads, {positions} \
positions, vocabulary {vocab_size}), pretrained with megacore {version}.

## How to use

```python
from transformers import pipeline

generator = pipeline("text-generation", "path/to/this/directory")
print(generator({prompt!r}, max_new_tokens=64)[0]["generated_text"])
```

To publish it under your name on the Hugging Face hub:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

for part in (AutoModelForCausalLM, AutoTokenizer):
    part.from_pretrained("path/to/this/directory").push_to_hub("your-name/{name}")
```

## Facts

| | |
| --- | --- |
{facts}

## Training

{iterations} iterations of {batch} sequences of {seq_length} tokens, AdamW with peak learning rate {lr:g}, seed {seed}.

## Weights

The weights are the fp32 main weights of training, stored in float32 whatever precision training computed in; load
them with `dtype="bfloat16"` for half the memory. Rows that padded the vocabulary are cut; the output head is tied to
the token embedding.

## Parity

Before it was published this directory was loaded with transformers and compared with the trained model: {parity}.

## Limits

This is a base model: it continues text and repeats what its data holds, mistakes and biases included.
"""


def model_card(
    config: RunConfig,
    *,
    version: str,
    vocab_size: int,
    parameters: int,
    iterations: int,
    facts: Mapping[str, str],
    report: ParityReport,
) -> str:
    """The card as Markdown with a YAML header.

    Args:
        config: the run.
        version: of this package.
        vocab_size: entries, without padding.
        parameters: of the export.
        iterations: optimizer steps behind the weights.
        facts: data, perplexities and lineage, one row each.
        report: what the gate measured.
    """
    return _CARD.format(
        header=yaml.safe_dump(_header(config.name), sort_keys=False),
        name=config.name,
        version=version,
        parameters=parameters,
        layers=config.model.num_layers,
        hidden=config.model.hidden_size,
        heads=config.model.num_attention_heads,
        positions=config.max_position_embeddings,
        vocab_size=vocab_size,
        prompt=config.export.sample_prompt,
        facts="\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items()),
        iterations=iterations,
        batch=config.train.global_batch_size,
        seq_length=config.data.seq_length,
        lr=config.optim.lr,
        seed=config.seed,
        parity=report.sentence(),
    )


def _header(name: str) -> dict[str, object]:
    return {
        "model_name": name,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gpt2", "megacore", "pretraining"],
    }


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
