"""WordPiece tokenizers of BERT (Devlin et al. 2018), read from a vocab.txt or trained."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megacore.artifact.files import access_errors, reason_of, regular
from megacore.config.data import SPELLINGS
from megacore.errors import DataFormatError
from megacore.tokenizer.load import TOKENIZER_BYTES, grouped

BERT_ROLES = {f"{role}_token": SPELLINGS[role][0] for role in ("unk", "sep", "pad", "cls", "mask")}
"""Special tokens of a BERT vocabulary. A document ends with [SEP], as in Megatron-LM."""
SPECIAL = tuple(SPELLINGS[role][0] for role in ("pad", "unk", "cls", "sep", "mask"))
"""Special tokens in the order in which they begin a trained vocabulary."""
ALPHABET = 1000
"""Maximum number of characters in a trained vocabulary."""
CONTINUING = "##"
"""Prefix of pieces that continue a word."""


def read_wordpiece(
    vocab_file: Path,
    *,
    lower_case: bool,
    strip_accents: bool | None = None,
    divide_chinese: bool = True,
) -> tokenizers.Tokenizer:
    """Read BERT's tokenizer from a vocab.txt with one token per line.

    Args:
        vocab_file: the file.
        lower_case: True for uncased vocabularies.
        strip_accents: True to strip accents; None means `lower_case`.
        divide_chinese: True if each Chinese character is a word.

    Raises:
        DataFormatError: the file is not BERT's vocab.txt.
    """
    vocab = _read_vocab(vocab_file)
    missing = [token for token in BERT_ROLES.values() if token not in vocab]
    if missing:
        raise DataFormatError(
            f"{vocab_file} has no {', '.join(missing)} among its {len(vocab)} lines: it is not "
            "BERT's vocab.txt"
        )
    backend = _backend(vocab, lower_case=lower_case)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lower_case, strip_accents=strip_accents, handle_chinese_chars=divide_chinese
    )
    return backend


def train_wordpiece(
    texts: Callable[[], Iterable[str]], vocab_size: int, *, lower_case: bool
) -> tokenizers.Tokenizer:
    """Train a WordPiece tokenizer with exactly `vocab_size` entries.

    The entries are BERT's special tokens, characters and pieces of words.

    Each call of `texts` returns all texts; the result depends only on them. All but the ALPHABET
    most frequent characters become [UNK]. Raises DataFormatError if the texts have too few distinct
    pairs for that many entries, or if `vocab_size` is too small for the characters.
    """
    special = list(SPECIAL)
    alphabet = _alphabet(texts(), lower_case=lower_case)
    # The trainer numbers continuing characters in the order of a hash table. Passing them as
    # special tokens makes the result deterministic.
    continuing = [CONTINUING + letter for letter in alphabet if _continues(letter)]
    least = len(special) + len(continuing) + len(alphabet)
    if vocab_size < least:
        raise DataFormatError(
            f"data.tokenizer.vocab_size {vocab_size} has no room for {len(special)} special tokens "
            f"and the {len(continuing) + len(alphabet)} pieces of one character that the corpus "
            f"has: raise it to at least {least}"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special, *continuing],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained = _backend(
        {token: number for number, token in enumerate(special)}, lower_case=lower_case
    )
    trained.train_from_iterator(grouped(texts()), trainer)
    vocab: dict[str, int] = trained.get_vocab(with_added_tokens=False)
    if len(vocab) != vocab_size:
        raise DataFormatError(
            f"the corpus yields a vocabulary of {len(vocab)} entries, not the {vocab_size} of "
            f"data.tokenizer.vocab_size: lower it to at most {len(vocab)}, or use more text"
        )
    return _backend(vocab, lower_case=lower_case)


def _backend(vocab: dict[str, int], *, lower_case: bool) -> tokenizers.Tokenizer:
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


def _alphabet(texts: Iterable[str], *, lower_case: bool) -> list[str]:
    """Return the most frequent characters after normalization, in the order of code points.

    White space is excluded.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    letters = [letter for letter in counts if not letter.isspace()]
    letters.sort(key=lambda letter: (-counts[letter], letter))
    return sorted(letters[:ALPHABET])


def _continues(letter: str) -> bool:
    """Return True if this character can continue a word instead of starting a new one."""
    # The normaliser puts spaces around Chinese characters.
    text = normalizers.BertNormalizer().normalize_str(f"a{letter}")
    return len(pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)) == 1


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        with (
            access_errors(path),
            open(regular(path, TOKENIZER_BYTES), encoding="utf-8", newline="\n") as file,
        ):
            tokens = [line.removesuffix("\n").removesuffix("\r") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise DataFormatError(
            f"{path} cannot be read ({reason_of(error)}): set data.tokenizer.vocab_file"
        ) from error
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens, 1):
        if vocab.setdefault(token, number - 1) != number - 1:
            raise DataFormatError(
                f"{path}:{number} repeats the token {token!r} of line {vocab[token] + 1}"
            )
    return vocab
