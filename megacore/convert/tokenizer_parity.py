"""Whether an exported tokenizer, as transformers loads it, is ours."""

from collections.abc import Sequence
from typing import Any

from megacore.config.spec import SpecialTokens
from megacore.convert.report import ParityReport
from megacore.tokenizer import Tokenizer
from megacore.tokenizer.load import JsonTokenizer

_ROLES = ("pad", "cls", "sep", "mask")


def compare_tokenizers(
    report: ParityReport, ours: Tokenizer, theirs: Any, special: SpecialTokens, samples: Sequence[Sequence[int]]
) -> None:
    """End of document, size, roles, and both directions on the validation texts of which `samples` are the ids."""
    if theirs.eos_token_id != ours.eod_id:
        report.problems.append(f"its tokenizer ends documents with id {theirs.eos_token_id}, ours with {ours.eod_id}")
    for role in _ROLES:
        wanted, given = getattr(special, role), getattr(theirs, f"{role}_token_id")
        if given is not None and wanted is not None and given != wanted:
            report.problems.append(f"its tokenizer has id {given} for {role}, ours {wanted}")
    vocab_size = max(theirs.get_vocab().values()) + 1
    if vocab_size != ours.vocab_size:
        report.problems.append(f"its tokenizer has a vocabulary of {vocab_size}, ours of {ours.vocab_size}")
    if not isinstance(ours, JsonTokenizer):
        samples = [_words(ours, special, sample) for sample in samples]
    texts = [ours.decode(sample) for sample in samples]
    encoded = decoded = 0
    for text, sample, expected in zip(texts, samples, ours.encode_batch(texts), strict=True):
        same = theirs(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"] == expected.tolist()
        encoded += same
        report.tokenizer_tokens += len(expected) if same else 0
        decoded += theirs.decode(list(sample)) == text
    if encoded < len(texts):
        report.problems.append(
            f"its tokenizer encodes {len(texts) - encoded} of {len(texts)} validation texts to other ids"
        )
    if decoded < len(texts):
        report.problems.append(f"its tokenizer decodes {len(texts) - decoded} of {len(texts)} samples to another text")


def _words(ours: Tokenizer, special: SpecialTokens, sample: Sequence[int]) -> list[int]:
    """What is no special token: a SentencePiece model has no text for its control symbols, transformers has one."""
    roles = {ours.eod_id, *special.sentinels, *(getattr(special, role) for role in (*_ROLES, "unk", "eod"))}
    return [token for token in sample if token not in roles]
