"""Tiny models of the real classes with their tokenizers, and rows for them, written in a second."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import torch

from megacore.config.finetune import FinetuneConfig

_TEXT = (
    "the a small big red blue old new cat dog bird fish house tree river road runs sleeps sees "
    "finds eats likes near under over with and then it was is not very good bad happy sad quick "
    "slow"
)
WORDS = tuple(_TEXT.split())
POSITIONS = 64
_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def write_tokenizer(directory: Path, kind: str) -> Any:
    """Write a tokenizer of words like save_pretrained, and return it.

    Args:
        directory: directory of the model.
        kind: `encoder` writes [CLS] A [SEP] B [SEP] with segments, `seq2seq` ends with </s>,
            `decoder` adds nothing and has no padding.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    first = {"encoder": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], "seq2seq": ["<pad>", "<unk>", "</s>"]}
    special = first.get(kind, ["<|endoftext|>"])
    # A line break is a separate word: it divides the two texts of a pair if the tokenizer puts
    # nothing between them.
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS, ".", "\n"])}
    unknown = special[0] if kind == "decoder" else special[1]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    roles = {"unk_token": unknown}
    if kind == "encoder":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
        )
        roles = _SPECIAL
    elif kind == "seq2seq":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", vocabulary["</s>"])]
        )
        roles |= {"pad_token": "<pad>", "eos_token": "</s>"}
    else:
        roles |= {"eos_token": "<|endoftext|>"}
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **roles)
    saved.save_pretrained(directory)
    return saved


def write_model(directory: Path, kind: str, **values: Any) -> Path:
    """Write a model with random weights and its tokenizer; return the directory.

    Kinds are `deberta`, `bert`, `xlnet`, `blenderbot`, `t5` and `gpt2`.
    """
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    encoder = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": POSITIONS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
    }
    form = {"blenderbot": "seq2seq", "t5": "seq2seq", "gpt2": "decoder"}.get(kind, "encoder")
    size = len(write_tokenizer(directory, form))
    torch.manual_seed(3)
    match kind:
        case "deberta":
            config = transformers.DebertaV2Config(
                vocab_size=size, type_vocab_size=0, **(encoder | values)
            )
            model = transformers.DebertaV2ForMaskedLM(config)
        case "bert":
            config = transformers.BertConfig(vocab_size=size, **(encoder | values))
            model = transformers.BertForPreTraining(config)
        case "xlnet":
            model = _xlnet(size, **values)
        case "blenderbot":
            sizes = {
                "d_model": 32,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "max_position_embeddings": POSITIONS,
                "dropout": 0.0,
                "encoder_no_repeat_ngram_size": 0,
                "forced_eos_token_id": None,
                "pad_token_id": 0,
                "bos_token_id": 0,
                "eos_token_id": 2,
                "decoder_start_token_id": 0,
            }
            config = transformers.BlenderbotConfig(vocab_size=size, **(sizes | values))
            model = transformers.BlenderbotForConditionalGeneration(config)
        case "t5":
            sizes = {
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 4,
                "dropout_rate": 0.0,
            }
            ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
            config = transformers.T5Config(vocab_size=size, **(sizes | ends | values))
            model = transformers.T5ForConditionalGeneration(config)
        case _:
            sizes = {"n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4}
            no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            config = transformers.GPT2Config(
                vocab_size=size, **(sizes | no_dropout | ends | values)
            )
            model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(directory)
    return directory


def _xlnet(size: int, **values: Any) -> Any:
    import transformers

    sizes = {
        "d_model": 32,
        "n_layer": 2,
        "n_head": 4,
        "d_inner": 64,
        "dropout": 0.0,
        "pad_token_id": 0,
    }
    return transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(vocab_size=size, **(sizes | values))
    )


def write_mbart(directory: Path) -> Any:
    """Write an mBART with random weights, and its tokenizer, which is returned.

    Sources end with </s> and en_XX, targets with </s> and ro_RO.
    """
    import transformers

    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"\u2581{word}", -1.0) for word in WORDS]
    tokenizer = transformers.MBartTokenizer(
        vocab=[*special, *words], src_lang="en_XX", tgt_lang="ro_RO"
    )
    start = tokenizer.convert_tokens_to_ids("ro_RO")
    sizes = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 16)
    counts = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    model = transformers.MBartForConditionalGeneration(
        transformers.MBartConfig(
            vocab_size=len(tokenizer), decoder_start_token_id=start, **sizes, **counts, **heads
        )
    )
    for each in (model, tokenizer):
        each.save_pretrained(directory)
    return tokenizer


def sentence(generator: random.Random, words: int = 5) -> str:
    """Return random words of the vocabulary."""
    return " ".join(generator.choice(WORDS) for _ in range(words))


def pair_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return sentence pairs with a learnable label.

    The label is 1 if the second sentence begins with the first's first word.
    """
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        first, second = sentence(generator, 3 + number % 3), sentence(generator, 4)
        label = generator.randrange(2)
        word = (
            first.split()[0]
            if label
            else generator.choice([word for word in WORDS if word not in first])
        )
        rows.append({"sentence1": first, "sentence2": f"{word} {second}", "label": label})
    return rows


def word_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return sentences labelled by whether they contain `good` or `bad`; quickly learned."""
    generator = random.Random(seed)
    others = [word for word in WORDS if word not in ("good", "bad")]
    rows = []
    for _ in range(count):
        label = generator.randrange(2)
        words = [generator.choice(others) for _ in range(5)]
        words[generator.randrange(5)] = ("bad", "good")[label]
        rows.append({"sentence": " ".join(words), "label": label})
    return rows


def choice_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return questions with three choices, of which the right one is `good`; quickly learned."""
    generator = random.Random(seed)
    others = [word for word in WORDS if word != "good"]
    rows = []
    for number in range(count):
        label, choices = generator.randrange(3), generator.sample(others, 3)
        choices[label] = "good"
        question = ("the dog is", "the _ cat")[number % 2]
        context = sentence(generator, 2 + number % 3)
        rows.append(
            {"context": context, "question": question, "choices": choices, "label": "ABC"[label]}
        )
    return rows


def copy_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return sources with their first words as targets."""
    generator = random.Random(seed)
    sources = [sentence(generator, 4) for _ in range(count)]
    return [{"source": source, "target": " ".join(source.split()[:2])} for source in sources]


def text_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return texts in which each word follows the previous one in WORDS, which can be learned."""
    generator = random.Random(seed)
    starts = [generator.randrange(len(WORDS)) for _ in range(count)]
    return [
        {"text": " ".join(WORDS[(start + place) % len(WORDS)] for place in range(12))}
        for start in starts
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as .jsonl, .csv or .tsv; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(
            file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ","
        )
        writer.writeheader()
        writer.writerows(rows)
    return path


TASKS: dict[str, dict[str, Any]] = {
    "classification": {
        "kind": "classification",
        "sentence1_column": "sentence1",
        "sentence2_column": "sentence2",
        "max_length": 16,
    },
    "multiple_choice": {
        "kind": "multiple_choice",
        "question_column": "question",
        "max_length": 16,
    },
    "seq2seq": {
        "kind": "seq2seq",
        "source_column": "source",
        "target_column": "target",
        "max_source_length": 8,
        "max_target_length": 6,
        "num_beams": 2,
    },
    "causal_lm": {"kind": "causal_lm", "block_size": 16},
}
_ROWS = {
    "classification": pair_rows,
    "multiple_choice": choice_rows,
    "seq2seq": copy_rows,
    "causal_lm": text_rows,
}


def tiny_config(
    model: Path | str, data: Path, kind: str, /, **sections: dict[str, Any]
) -> FinetuneConfig:
    """Return a configuration for `train.jsonl` and `valid.jsonl` in `data`.

    Each section's values are added to the defaults.
    """
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "data": {
            "source": {
                "kind": "files",
                "train": [str(data / "train.jsonl")],
                "valid": [str(data / "valid.jsonl")],
            },
            "workers": 1,
        },
        "task": TASKS[kind],
        "optim": {"lr": 3e-3},
        "train": {
            "num_epochs": 1,
            "micro_batch_size": 4,
            "eval_batch_size": 4,
            "precision": "fp32",
        },
    }
    merged = {
        name: {**values.get(name, {}), **sections.get(name, {})} for name in {**values, **sections}
    }
    return FinetuneConfig.model_validate({"name": "tiny", **merged})


def write_data(directory: Path, kind: str, train: int = 24, valid: int = 9) -> Path:
    """Write `train.jsonl` and `valid.jsonl` of a task of TASKS; return the directory."""
    write_rows(directory / "train.jsonl", _ROWS[kind](train, 1))
    write_rows(directory / "valid.jsonl", _ROWS[kind](valid, 2))
    return directory


def prepare(config: FinetuneConfig, root: Path) -> tuple[Path, Path]:
    """Run the stages `pretrained`, `dataset` and `examples` below `root`.

    Return the directories of examples and model.
    """
    from megacore.finetune.dataset import collect_rows
    from megacore.finetune.examples import build_examples
    from megacore.finetune.pretrained import collect_pretrained, local_directory

    folders = {name: root / name for name in ("pretrained", "rows", "examples", "cache")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    collect_pretrained(
        config.model,
        folders["pretrained"],
        folders["cache"],
        local=local_directory(config.model.path),
    )
    collect_rows(config.data, folders["rows"], folders["cache"], seed=config.seed)
    build_examples(config, folders["rows"], folders["pretrained"], folders["examples"])
    return folders["examples"], folders["pretrained"]


def write_export(root: Path, family: str) -> Path:
    """Write the export of a random `gpt`, `bert` or `t5` model and its manifest.

    Return its directory.
    """
    from megacore.artifact.build import StageKey, seal
    from megacore.convert.export import write_export
    from megacore.convert.source import CheckpointTensors
    from tests.convert._family_jobs import family_config, family_job
    from tests.convert._tiny import tiny_config as gpt_config
    from tests.convert._tiny import tiny_job

    job = (
        tiny_job(root, gpt_config())[0]
        if family == "gpt"
        else family_job(root, family_config(family))
    )
    write_export(Path(job.output_directory) / "model", job, CheckpointTensors(Path(job.checkpoint)))
    seal(Path(job.output_directory), StageKey("convert", 1, {"name": family}, {}), {}, 1.0)
    return Path(job.output_directory)


def scores(task: Any, model: Any, accelerator: Any, split: str = "valid") -> dict[str, float]:
    """Return the metrics of a complete split."""
    scorer = task.scorer(accelerator, model.eval())
    for batch in accelerator.prepare(
        torch.utils.data.DataLoader(task.split(split), 4, collate_fn=task.collate)
    ):
        scorer.add(batch)
    metrics: dict[str, float] = scorer.metrics()
    return metrics


def learn(task: Any, model: Any, epochs: int, lr: float = 3e-3) -> None:
    """Train with Adam in batches of 8."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    loader = torch.utils.data.DataLoader(task.split("train"), 8, collate_fn=task.collate)
    model.train()
    for _ in range(epochs):
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
