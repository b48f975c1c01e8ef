"""BERT's WordPiece (Devlin et al. 2018) from its vocab.txt."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from megacore.errors import DataFormatError

BERT_ROLES = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
"""The special tokens of a BERT vocabulary. A document ends with [SEP], as with Megatron-LM."""


def read_wordpiece(vocab_file: Path, *, lower_case: bool) -> tokenizers.Tokenizer:
    """BERT's tokenizer from a vocab.txt, one token a line. Raises DataFormatError.

    `lower_case` is for the uncased vocabularies, and also strips accents.
    """
    vocab = _read_vocab(vocab_file)
    missing = [token for token in BERT_ROLES.values() if token not in vocab]
    if missing:
        raise DataFormatError(
            f"{vocab_file} has no {', '.join(missing)} among its {len(vocab)} lines: it is not BERT's vocab.txt"
        )
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=BERT_ROLES["unk_token"]))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    ends = [(token, vocab[token]) for token in (BERT_ROLES["cls_token"], BERT_ROLES["sep_token"])]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    backend.add_special_tokens(list(BERT_ROLES.values()))
    return backend


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            tokens = [line.removesuffix("\n").removesuffix("\r") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise DataFormatError(f"{path} cannot be read ({error}): set data.tokenizer.vocab_file") from error
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens, 1):
        if vocab.setdefault(token, number - 1) != number - 1:
            raise DataFormatError(f"{path}:{number} repeats the token {token!r} of line {vocab[token] + 1}")
    return vocab
