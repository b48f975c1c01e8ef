"""Key and options of a corpus's tokens, shared by the stages that write them whole or in shards."""

from typing import TYPE_CHECKING

from megacore.artifact import Artifact, Manifest, StageKey
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.plan.epochs import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from megacore.tokenizer.tokenize import TokenizeOptions

_TEXT_KINDS = ("source_tree", "text", "hub")
"""Kinds of sources whose `bytes` are those of their text."""


def tokenize_key(
    config: RunConfig, corpus: Artifact, tokenizer: Artifact, punkt: Artifact | None = None
) -> StageKey:
    """Return the key of one source's token files, which does not depend on the use of shards."""
    from megacore.tokenizer.tokenize import VERSION

    resolved = {"shuffle_seed": config.seed if config.data.shuffle_documents else None}
    parameters = key_parameters(config, "tokenize", resolved)
    if not config.data.split_sentences:
        del parameters["sentences"]
    inputs = {"corpus": corpus, "tokenizer": tokenizer} | (
        {} if punkt is None else {"punkt": punkt}
    )
    return StageKey.of("tokenize", VERSION, parameters, **inputs)


def written_bytes(config: RunConfig, corpus: Artifact, tokenizer: Artifact, *, shards: bool) -> int:
    """Return about how many bytes are written for the tokens, or 0 if the text is not measured.

    Files that the corpus only refers to may be compressed, or hold more than the text. The tokens
    are there up to three times at once: in shards, joined, and shuffled.
    """
    from megacore.token_files.indexed_dataset import UINT16_LIMIT

    kind = Manifest.read(corpus.directory).parameters.get("kind")
    if corpus.stage not in ("curate", "decontaminate") and kind not in _TEXT_KINDS:
        return 0
    wide = tokenizer.counts["vocab_size"] >= UINT16_LIMIT
    copies = 1 + config.data.shuffle_documents + shards
    tokens = int(corpus.counts["bytes"] // BYTES_PER_TOKEN)
    return copies * tokens * (4 if wide else 2)


def tokenize_options(config: RunConfig, punkt: Artifact | None) -> "TokenizeOptions":
    """Return the options that determine the tokens, in addition to corpus and tokenizer."""
    from megacore.tokenizer.tokenize import TokenizeOptions

    data = config.data
    return TokenizeOptions(
        append_eod=data.append_eod,
        shuffle_seed=config.seed if data.shuffle_documents else None,
        split_sentences=data.split_sentences,
        keep_newlines=data.keep_newlines,
        sentence_splitter=data.sentence_splitter,
        language=data.language,
        on_bad_line=data.on_bad_line,
        sentence_data=None if punkt is None else punkt.directory,
    )
