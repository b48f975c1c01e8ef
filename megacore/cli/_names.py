"""What a configuration's key is called on the command line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from megacore.errors import MegacoreError

_OPTIONS = {
    "data.source.files": "--input",
    "data.source.key": "--json-key",
    "data.source": "--input",
    "data.tokenizer.vocab_file": "--vocab-file",
    "data.tokenizer.merge_file": "--merge-file",
    "data.tokenizer.model_file": "--tokenizer-file",
    "data.tokenizer.name": "--tokenizer-file",
    "data.tokenizer": "--tokenizer",
    "data.sentence_splitter": "--sentence-splitter",
    "data.language": "--language",
    "data.split": "--split",
    "data.seq_length": "--seq-length",
    "data.index_style": "--index-style",
    "data.packing": "--packing",
    "data.add_extra_token": "--add-extra-token",
    "data.drop_last_partial": "--drop-last-partial",
}
_KEYS = re.compile("|".join(map(re.escape, sorted(_OPTIONS, key=len, reverse=True))))


@contextmanager
def options_named() -> Iterator[None]:
    """Let errors speak of options: those who call a command on files have no configuration."""
    try:
        yield
    except MegacoreError as error:
        raise type(error)(with_options(str(error))) from error


def with_options(text: str) -> str:
    """The text with the option in place of each configuration key that has one."""
    return _KEYS.sub(lambda key: _OPTIONS[key.group()], text)
