"""A small model with random weights, a text to learn, and the artifacts of its fine-tuning."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.config.finetune import FinetuneConfig
from megacore.config.load import parse_finetune_config
from megacore.finetune.dataset import collect_rows
from megacore.finetune.examples import build_examples
from megacore.finetune.pretrained import collect_pretrained, local_directory
from megacore.jobs.finetune import FinetuneJob

MODELS = ("deberta", "gpt2")
SAMPLES = 512
VALIDATION_SAMPLES = 32
_LAYERS, _HIDDEN, _HEADS = 4, 128, 4
_WORDS = tuple(f"word{number}" for number in range(2000))
_TASKS: dict[str, dict[str, Any]] = {
    "deberta": {
        "kind": "classification",
        "sentence1_column": "first",
        "sentence2_column": "second",
        "max_length": 64,
    },
    "gpt2": {"kind": "causal_lm", "block_size": 64},
}


@dataclass(frozen=True)
class Prepared:
    """Artifacts of one model."""

    config: FinetuneConfig
    pretrained: Path
    examples: Path
    samples: int

    def job(self, config: FinetuneConfig, directory: Path, ranks: int, threads: int) -> FinetuneJob:
        """Build a fine-tuning job in a new directory."""
        directory.mkdir(parents=True)
        return FinetuneJob(
            config=config,
            pretrained_directory=str(self.pretrained),
            examples_directory=str(self.examples),
            run_directory=str(directory),
            exit_directory=str(directory / "exit"),
            ranks=ranks,
            threads_per_rank=threads,
        )


def prepare(root: Path, model: str, **sections: dict[str, Any]) -> Prepared:
    """Create all inputs below `root`; `sections` are added to those of the configuration."""
    _write_model(root / "source", model)
    for split, count in (("train", SAMPLES), ("valid", VALIDATION_SAMPLES)):
        lines = [json.dumps(row) for row in _rows(model, count)]
        (root / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = {
        "kind": "files",
        "train": [str(root / "train.jsonl")],
        "valid": [str(root / "valid.jsonl")],
    }
    values: dict[str, Any] = {
        "name": model,
        "model": {"path": str(root / "source")},
        "data": {"source": source},
        "task": _TASKS[model],
        "optim": {"lr": 1e-4},
        "train": {"micro_batch_size": 8, "precision": "fp32"},
    }
    config = parse_finetune_config(
        values | {name: values.get(name, {}) | section for name, section in sections.items()},
        origin="benchmark",
    )
    folders = {name: root / name for name in ("pretrained", "rows", "examples", "cache")}
    for folder in folders.values():
        folder.mkdir()
    local = local_directory(config.model.path)
    collect_pretrained(config.model, folders["pretrained"], folders["cache"], local=local)
    collect_rows(config.data, folders["rows"], folders["cache"], seed=config.seed)
    counts = build_examples(config, folders["rows"], folders["pretrained"], folders["examples"])
    return Prepared(config, folders["pretrained"], folders["examples"], counts["train"])


def _rows(model: str, count: int) -> list[dict[str, Any]]:
    """Return pairs of sentences or texts, about as long as a sample may be.

    The class of a pair is the half of the words from which it is drawn.
    """
    generator = random.Random(count)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        label = generator.randrange(2)
        words = [generator.choice(_WORDS[label::2]) for _ in range(64)]
        if model == "gpt2":
            rows.append({"text": " ".join(words)})
        else:
            half = generator.randrange(16, 30)
            rows.append(
                {
                    "first": " ".join(words[:half]),
                    "second": " ".join(words[half : half + 24]),
                    "label": label,
                }
            )
    return rows


def _write_model(directory: Path, model: str) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if model == "deberta":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(directory)
    torch.manual_seed(1)
    network: Any
    if model == "deberta":
        config = transformers.DebertaV2Config(
            vocab_size=len(vocabulary),
            hidden_size=_HIDDEN,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            intermediate_size=4 * _HIDDEN,
            max_position_embeddings=128,
            type_vocab_size=0,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
        )
        network = transformers.DebertaV2ForMaskedLM(config)
    else:
        network = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=len(vocabulary),
                n_positions=128,
                n_embd=_HIDDEN,
                n_layer=_LAYERS,
                n_head=_HEADS,
                bos_token_id=2,
                eos_token_id=3,
            )
        )
    network.save_pretrained(directory)
