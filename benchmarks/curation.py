"""Perplexity with and without duplicates in the corpus, after the same number of training tokens.

    python -m benchmarks.curation [--seeds 1 2 3] [--iterations 900] [--folder DIR] [--plot FILE]

The training's corpus are Python sources of the installed packages, cut into documents of at most
8,000 characters, to which copies are added as they occur on the web: few documents have many (a
Zipf distribution), every other copy has 5% of its lines changed, and half of the documents are
copies. The flow `pretrain` trains on it as it is, and after `exact_dedup` and `minhash_dedup`,
which also find the duplicates that the sources have already. Tokenizer, model, number of tokens and
the validation texts (the standard library without near duplicates, in neither corpus) are the same.
The perplexities are `valid_ppl` of each checkpoint.
"""

import argparse
import json
import random
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks._verdict import Check, table, verdict
from benchmarks.orchestration import started
from megacore.compare.run_record import read_run
from megacore.observe.runs import named_directory
from megacore.tokenizer.build import train_bpe

CHARACTERS = 8000
"""Most characters of a document."""
CHANGED = 0.05
"""Share of the lines that differ in a near duplicate."""
SHORT = 10
"""Most characters of a line that says nothing about duplicates."""
CHECKPOINTS = 6
MEMBERS = ("raw", "curated")
STEPS = [{"step": "exact_dedup"}, {"step": "minhash_dedup"}]
_FOREIGN = ("site-packages", "dist-packages", "test", "idlelib", "__pycache__")
"""Parts of the standard library's tree that are left out of the validation texts."""


@dataclass(frozen=True)
class Corpus:
    """Files that all runs of the comparison read."""

    train: Path
    valid: Path
    vocab: Path
    merges: Path


def documents(folder: Path, left_out: Sequence[str], limit: int) -> list[str]:
    """Return beginnings of the Python sources below a folder, together about `limit` characters."""
    texts, size = [], 0
    paths = sorted(folder.rglob("*.py"))
    random.Random(0).shuffle(paths)
    for path in paths:
        if not set(path.relative_to(folder).parts).isdisjoint(left_out):
            continue
        try:
            text = path.read_text(encoding="utf-8")[:CHARACTERS]
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) >= 500:
            texts.append(text)
            size += len(text)
        if size >= limit:
            break
    return texts


def with_copies(texts: Sequence[str]) -> Iterator[str]:
    """Yield the texts with copies of some, in random order; copies are half of the result.

    The text of rank r among the copied ones has a number of copies proportional to 1 / r.
    """
    chosen = random.Random(1)
    copied = chosen.sample(range(len(texts)), len(texts) // 10)
    result = list(texts)
    weights = [1 / rank for rank in range(1, len(copied) + 1)]
    for index, number in enumerate(chosen.choices(copied, weights, k=len(texts))):
        result.append(texts[number] if index % 2 == 0 else _changed(texts[number], chosen))
    chosen.shuffle(result)
    yield from result


def _changed(text: str, chosen: random.Random) -> str:
    """Return a text in which some lines come from another place of it."""
    lines = text.split("\n")
    for number in chosen.sample(range(len(lines)), max(1, round(CHANGED * len(lines)))):
        lines[number] = chosen.choice(lines)
    return "\n".join(lines)


def distinct(texts: Sequence[str]) -> Iterator[str]:
    """Yield the texts of which earlier ones have at most a quarter of the longer lines."""
    known: set[str] = set()
    for text in texts:
        lines = [line for line in text.split("\n") if len(line.strip()) > SHORT]
        if sum(line in known for line in lines) <= len(lines) / 4:
            yield text
        known.update(lines)


def make_corpus(folder: Path, characters: int) -> Corpus:
    """Write the documents of training and validation, and train the tokenizer of all runs."""
    packages = documents(Path(sysconfig.get_path("purelib")), (), characters)
    library = documents(Path(sysconfig.get_path("stdlib")), _FOREIGN, characters // 10)
    for name, texts in (("train", with_copies(packages)), ("valid", distinct(library))):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    train_bpe(packages, 4096).model.save(str(folder))
    return Corpus(
        folder / "train.jsonl",
        folder / "valid.jsonl",
        folder / "vocab.json",
        folder / "merges.txt",
    )


def configuration(corpus: Corpus, member: str, seed: int, iterations: int) -> dict[str, Any]:
    """Return the configuration of a run of `conf/mixture-tiny.yaml`'s model."""
    source = {"kind": "jsonl"}
    valid = [{"weight": 1.0, "source": source | {"files": [str(corpus.valid)]}}]
    return {
        "name": f"{member}-{seed}",
        "seed": seed,
        "data": {
            "split_blends": {
                "train": [{"weight": 1.0, "source": source | {"files": [str(corpus.train)]}}],
                "valid": valid,
                "test": valid,
            },
            "curate": STEPS if member == "curated" else [],
            "tokenizer": {
                "kind": "gpt2-bpe",
                "vocab_file": str(corpus.vocab),
                "merge_file": str(corpus.merges),
            },
            "seq_length": 128,
        },
        "model": {
            "num_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "optim": {
            "lr": 2e-3,
            "min_lr": 1e-4,
            "lr_decay_iters": iterations,
            "lr_warmup_fraction": 0.1,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "clip_grad": 1.0,
        },
        "train": {
            "micro_batch_size": 16,
            "global_batch_size": 32,
            "train_iters": iterations,
            "eval_interval": iterations,
            "eval_iters": 1,
        },
        "checkpoint": {"save_interval": iterations // CHECKPOINTS, "keep_last": 1},
        "evaluate": {"max_samples": 1024},
        "launch": {"nproc_per_node": 2},
    }


def curve(values: dict[str, Any], folder: Path, workspace: Path) -> dict[int, float]:
    """Run the flow; return `valid_ppl` by the number of training tokens."""
    conf = folder / f"{values['name']}.yaml"
    conf.write_text(yaml.safe_dump(values), encoding="utf-8")
    with started("flows.pretrain", conf, workspace) as flow:
        output, _ = flow.communicate()
    if flow.returncode:
        raise SystemExit(f"the flow ended with {flow.returncode}:\n{output[-3000:]}")
    directory = named_directory(values["name"], workspace)
    return {
        int(event["consumed_tokens"]): float(event["valid_ppl"])
        for event in read_run(directory).evaluations.values()
        if "valid_ppl" in event
    }


def kept_documents(workspace: Path) -> list[str]:
    """Return a sentence about each curation in a workspace."""
    manifests = [
        json.loads(path.read_text(encoding="utf-8")) for path in workspace.glob("*/*/manifest.json")
    ]
    counts = [each["counts"] for each in manifests if each["stage"] == "curate"]
    return [
        f"kept {each['documents']:,} of {each['documents_read']:,} documents, "
        f"{each['bytes']:,} of {each['bytes_read']:,} bytes\n"
        for each in counts
    ]


def plot(curves: dict[str, list[dict[int, float]]], path: Path) -> None:
    """Draw the perplexity of each run over its training tokens."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (member, runs) in zip(("tab:red", "tab:blue"), curves.items(), strict=True):
        for number, run in enumerate(runs):
            label = member if number == 0 else None
            tokens = [count / 1e6 for count in run]
            axes.plot(tokens, list(run.values()), "o-", color=color, alpha=0.7, label=label)
    axes.set(xlabel="training tokens in millions", ylabel="valid_ppl", yscale="log")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Train every member with every seed, print the table, draw the plot, and give the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=900, help="of 4,096 tokens")
    parser.add_argument("--characters", type=int, default=6_000_000, help="without copies")
    parser.add_argument("--folder", help="where to write")
    parser.add_argument("--plot", type=Path, help="image of the perplexities to write")
    options = parser.parse_args()
    curves: dict[str, list[dict[int, float]]] = {member: [] for member in MEMBERS}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        workspace = folder / "workspace"
        corpus = make_corpus(folder, options.characters)
        for seed in options.seeds:
            for member, runs in curves.items():
                values = configuration(corpus, member, seed, options.iterations)
                runs.append(curve(values, folder, workspace))
                sys.stderr.write(f"{values['name']}: {list(runs[-1].values())[-1]:.2f}\n")
        sys.stdout.writelines([*kept_documents(workspace), "\n"])
    header = ["tokens", *(f"{member}, seed {seed}" for member in MEMBERS for seed in options.seeds)]
    sys.stdout.write(
        table(
            header,
            [
                [f"{tokens:,}", *(f"{run[tokens]:.1f}" for runs in curves.values() for run in runs)]
                for tokens in curves["raw"][0]
            ],
        )
    )
    if options.plot:
        plot(curves, options.plot)
    last = {
        member: statistics.mean(list(run.values())[-1] for run in runs)
        for member, runs in curves.items()
    }
    check = Check("valid_ppl, curated to raw", last["curated"] / last["raw"], 1.0, at_most=True)
    return verdict("curation", [check])


if __name__ == "__main__":
    sys.exit(main())
