"""Labelled text for conf/finetune/bert-tiny.yaml: Python's library.

conf/bert-tiny.yaml was pretrained on it.

    python scripts/code_pairs.py [directory]

writes train.jsonl, valid.jsonl and test.jsonl (default: workspace/pairs), the same ones each time.
A sample is a statement whose first word is hidden by [MASK], and the label is that word:

    {"statement": "[MASK] os.path.join(self.root, name)", "keyword": "return"}

Few are labelled: with 128 a model has to know the language already. What a small one can learn of
it in a minute is in corpus/: the whole statements of the training files. No file gives statements
to two splits.
"""

import hashlib
import json
import os
import random
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

BLOCKS = ("class", "def", "elif", "for", "if")
"""Keywords whose statement ends with a colon."""
KEYWORDS = (*BLOCKS, "from", "raise", "return")
COUNTS = {"train": 128, "valid": 400, "test": 400}
"""Samples of each split, of every keyword as many."""
MASK = "[MASK]"
_FEWEST, _MOST = 20, 200
"""Statements of a file of the corpus."""
_SHORTEST = 12
"""Characters behind the keyword."""


def main(arguments: list[str]) -> int:
    """Write the three files."""
    if len(arguments) > 1:
        print("usage: code_pairs.py [directory]", file=sys.stderr)
        return 2
    directory = Path(arguments[0] if arguments else "workspace/pairs")
    directory.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    print(f"{directory / 'corpus'}: {write_corpus(library, directory / 'corpus')} statements")
    statements = by_split(library)
    for split, count in COUNTS.items():
        rows = list(samples(statements[split], count, split))
        temporary = directory / f"{split}.jsonl.tmp-{os.getpid()}"
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        temporary.replace(directory / f"{split}.jsonl")
        print(f"{directory / f'{split}.jsonl'}: {len(rows)} statements")
    return 0


def split_of(name: str) -> str:
    """The split that a file's statements belong to; its name decides."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 4
    return ("train", "train", "valid", "test")[share]


def files(library: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of each file of the library itself, in a stable order."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if "site-packages/" not in name:
            yield name, path


def by_split(library: Path) -> dict[str, dict[str, list[str]]]:
    """The statements behind each keyword, by split; those of Python's own tests are left out."""
    found: dict[str, dict[str, list[str]]] = {
        split: {word: [] for word in KEYWORDS} for split in COUNTS
    }
    for name, path in files(library):
        if "/test/" not in f"/{name}":
            for keyword, rest in statements_of(path):
                found[split_of(name)][keyword].append(rest)
    return found


def write_corpus(library: Path, directory: Path) -> int:
    """The training files' statements, nothing hidden or labelled, as text to pretrain on.

    Returns how many.
    """
    temporary, total = directory.with_name(f"{directory.name}.tmp-{os.getpid()}"), 0
    temporary.mkdir()
    for name, path in files(library):
        lines = (
            [f"{keyword} {rest}" for keyword, rest in statements_of(path)]
            if split_of(name) == "train"
            else []
        )
        if len(lines) >= _FEWEST:
            kept = lines[:_MOST]
            (temporary / name.replace("/", "_")).write_text(
                "\n".join(kept) + "\n", encoding="utf-8"
            )
            total += len(kept)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)
    return total


def statements_of(path: Path) -> Iterator[tuple[str, str]]:
    """Keyword and rest of each line that reads like a statement.

    Of a file that is no text nothing.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        keyword, _, rest = line.strip().partition(" ")
        prose = rest.endswith(".") or any(
            f" {word} " in f" {rest} " for word in ("a", "an", "the", "is not a")
        )
        if (
            keyword in KEYWORDS
            and len(rest) >= _SHORTEST
            and not prose
            and rest.endswith(":") == (keyword in BLOCKS)
        ):
            yield keyword, rest


def samples(statements: dict[str, list[str]], count: int, split: str) -> Iterator[dict[str, str]]:
    """Statements drawn without repetition, the keywords in turn."""
    generator = random.Random(split)
    drawn = {
        word: generator.sample(sorted(set(rests)), count // len(KEYWORDS))
        for word, rests in statements.items()
    }
    for number in range(count // len(KEYWORDS)):
        for word in KEYWORDS:
            yield {"statement": f"{MASK} {drawn[word][number]}", "keyword": word}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
