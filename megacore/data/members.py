"""The token files that a tokens directory stands for: its own pair, or those of the members of a blend."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacore.artifact.files import write_json
from megacore.data.indexed_dataset import idx_path
from megacore.errors import DataFormatError

VERSION = 1
"""Of the blend stage; raised when it produces something else."""
MEMBERS_NAME = "members.json"
TOKENS_NAMES = ("tokens_text_document", "tokens_text_sentence")
"""Names of a pair of token files without .bin/.idx: a sequence per document, or per sentence."""


def write_members(directory: Path, members: Sequence[Path]) -> None:
    """Make `directory` stand for the token files of several tokens directories, in this order."""
    write_json(directory / MEMBERS_NAME, {"members": [os.path.relpath(member, directory) for member in members]})


def token_prefixes(directory: str | Path) -> tuple[str, ...]:
    """Paths of the token files without .bin/.idx. Raises DataFormatError when there are none."""
    listing = Path(directory, MEMBERS_NAME)
    if listing.exists():
        return tuple(prefix for member in _members(listing) for prefix in token_prefixes(member))
    for name in TOKENS_NAMES:
        prefix = Path(directory, name)
        if idx_path(prefix).exists():
            return (str(prefix),)
    raise DataFormatError(f"{directory} has neither token files nor {MEMBERS_NAME}: run the tokenize stage again")


def _members(listing: Path) -> list[Path]:
    try:
        values: Any = json.loads(listing.read_text(encoding="utf-8"))
        return [Path(os.path.normpath(listing.parent / str(member))) for member in values["members"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFormatError(f"{listing} is damaged ({error}): run the flow again") from error
