"""Labelled text for conf/finetune/bert-tiny.yaml, from Python's library.

conf/bert-tiny.yaml was pretrained on the same library.

    python scripts/code_pairs.py [directory]

writes train.jsonl, valid.jsonl and test.jsonl (default: pairs/ in the workspace), always with the
same content. A sample is a statement whose first word is replaced by [MASK], and the label is that
word:

    {"statement": "[MASK] os.path.join(self.root, name)", "keyword": "return"}

Few samples are labelled: with 128 of them, a model must already have learned the language. The
directory corpus/ has enough text for a small model to learn it in a minute: the whole statements of
the training files. All statements of a file belong to the same split.
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

from megacore.artifact.workspace import workspace_root

BLOCKS = ("class", "def", "elif", "for", "if")
"""Keywords whose statement ends with a colon."""
KEYWORDS = (*BLOCKS, "from", "raise", "return")
COUNTS = {"train": 128, "valid": 400, "test": 400}
"""Samples of each split, divided equally among the keywords."""
MASK = "[MASK]"
_OWN = ".code_pairs"
"""Name of the file that marks a directory whose content may be replaced."""
_FEWEST, _MOST = 20, 200
"""Least and most statements of a file of the corpus."""
_SHORTEST = 12
"""Least number of characters after the keyword."""


def main(arguments: list[str]) -> int:
    """Write the corpus and the three files of samples."""
    if len(arguments) > 1:
        print("usage: code_pairs.py [directory]", file=sys.stderr)
        return 2
    default = workspace_root() / "pairs"
    directory = Path(arguments[0]) if arguments else default
    names = ("corpus", *(f"{split}.jsonl" for split in COUNTS))
    taken = next((name for name in names if (directory / name).exists()), None)
    if taken is not None and directory != default and not (directory / _OWN).exists():
        print(
            f"error: {directory} has {taken}, which this script did not write: name another "
            "directory",
            file=sys.stderr,
        )
        return 2
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _OWN).touch()
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
    """Return the split of a file's statements, determined by its name."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 4
    return ("train", "train", "valid", "test")[share]


def files(library: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file of the standard library, in a stable order."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if "site-packages/" not in name:
            yield name, path


def by_split(library: Path) -> dict[str, dict[str, list[str]]]:
    """Return the statements after each keyword, by split, without those of Python's tests."""
    statements: dict[str, dict[str, list[str]]] = {
        split: {word: [] for word in KEYWORDS} for split in COUNTS
    }
    for name, path in files(library):
        if "/test/" not in f"/{name}":
            for keyword, rest in statements_of(path):
                statements[split_of(name)][keyword].append(rest)
    return statements


def write_corpus(library: Path, directory: Path) -> int:
    """Write the statements of the training files as unlabelled text for pretraining.

    Returns the number of statements.
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
            selected = lines[:_MOST]
            (temporary / name.replace("/", "_")).write_text(
                "\n".join(selected) + "\n", encoding="utf-8"
            )
            total += len(selected)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)
    return total


def statements_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield keyword and rest of each line that looks like a statement.

    A file that is not text yields nothing.
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
    """Yield statements drawn without repetition, alternating between the keywords."""
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
