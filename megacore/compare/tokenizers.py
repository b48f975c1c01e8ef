"""Comparison of two tokenizers: vocabulary, merges, added tokens, roles, and sample texts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacore.artifact.files import read_json, reason_of
from megacore.compare.report import Finding
from megacore.convert.tokenizers import read_tokenizer
from megacore.errors import ConfigError, DataFormatError, MegacoreError, listed
from megacore.paths import is_file
from megacore.tokenizer import Tokenizer
from megacore.tokenizer.load import TOKENIZER_NAME

SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    " leading and  double   spaces\tand tabs\n\n  indented lines\n",
    "Größe, naïve café, Ελληνικά, русский, 中文字符, 日本語, 💡🚀",
    "def f(x: int) -> int:\n    return x * 2 + 10_000  # comment\n",
    "MixedCase UPPER lower 0123456789 3.14159 1,000,000 e-mail@example.org",
    "don't can't I'll we've \u201cquoted\u201d \u2014 dash\u2026 \ufb01 \u00bd \u2460",
)
"""Texts that both tokenizers encode."""
_ROLES = (
    "eos_token",
    "bos_token",
    "pad_token",
    "unk_token",
    "cls_token",
    "sep_token",
    "mask_token",
)
_SECTIONS = {
    "normalizer": "tokenizer_normalizer",
    "pre_tokenizer": "tokenizer_pretokenizer",
    "decoder": "tokenizer_decoder",
}


def compare_tokenizers(a: Path | None, b: Path | None) -> tuple[list[Finding], bool]:
    """Compare the tokenizers in two directories.

    Returns the findings, and True if both could be read.
    """
    if a is None or b is None:
        if (a is None) == (b is None):
            return [], False
        lacking = "A" if a is None else "B"
        sentence = f"{lacking} comes without a tokenizer; the other has one"
        return [Finding("tokenizer", "tokenizer_missing", sentence, differs=False)], False
    if a.resolve() == b.resolve():
        return [], True
    sides = []
    for directory, name in ((a, "A"), (b, "B")):
        try:
            tokenizer, settings = read_tokenizer(directory)
        except MegacoreError as error:
            sentence = f"the tokenizer of {name} cannot be read: {error}"
            return [Finding("tokenizer", "tokenizer_damaged", sentence)], False
        if tokenizer is None:
            return [], False
        sides.append((tokenizer, settings, _json(directory)))
    (ours, our_settings, our_json), (theirs, their_settings, their_json) = sides
    findings = _vocabulary(ours, theirs)
    findings += _added(our_json, their_json) + _merges(our_json, their_json)
    findings += _roles(ours, our_settings, theirs, their_settings)
    sections = _sections(our_json, their_json)
    findings += sections
    findings += _texts(ours, theirs, explained=bool(findings))
    return findings, True


def encode(directory: Path | None, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts.

    Raises:
        ConfigError: if there is no tokenizer.
    """
    tokenizer = None if directory is None else read_tokenizer(directory)[0]
    if tokenizer is None:
        raise ConfigError(
            "neither model comes with a tokenizer for --text: give --tokens the ids instead"
        )
    return [ids.tolist() for ids in tokenizer.encode_batch(list(texts))]


def _json(directory: Path) -> dict[str, Any]:
    path = directory / TOKENIZER_NAME
    if not is_file(path):
        return {}
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise DataFormatError(
            f"{path} cannot be read ({reason_of(error)}): copy it again"
        ) from error
    return values if isinstance(values, dict) else {}


def _vocabulary(a: Tokenizer, b: Tokenizer) -> list[Finding]:
    ours, theirs = a.tokens(), b.tokens()
    if ours == theirs:
        return []
    differing = [
        index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]
    ]
    size = f"{len(ours):,} entries in A, {len(theirs):,} in B"
    if not differing:
        longer, more = ("A", ours) if len(ours) > len(theirs) else ("B", theirs)
        extra = [repr(token) for token in more[min(len(ours), len(theirs)) :]]
        sentence = f"vocabulary: {size}; only {longer} has {listed(extra, 3)}"
        return [Finding("tokenizer", "tokenizer_vocabulary", sentence, (), len(ours), len(theirs))]
    first = differing[0]
    moved = _moved(ours, theirs, differing)
    sentence = (
        f"vocabulary: {size}; {len(differing):,} ids mean another token, first {first}: "
        f"{ours[first]!r} in A, {theirs[first]!r} in B{moved}"
    )
    where = tuple(str(index) for index in differing[:20])
    return [
        Finding("tokenizer", "tokenizer_vocabulary", sentence, where, ours[first], theirs[first])
    ]


def _moved(ours: list[str], theirs: list[str], differing: list[int]) -> str:
    places = {token: index for index, token in enumerate(ours) if token}
    shifts = {index - places[theirs[index]] for index in differing if theirs[index] in places}
    if len(shifts) == 1:
        return f" (ids shifted by {shifts.pop()})"
    return " (the same tokens in another order)" if sorted(ours) == sorted(theirs) else ""


def _merges(a: dict[str, Any], b: dict[str, Any]) -> list[Finding]:
    ours, theirs = _merge_list(a), _merge_list(b)
    if ours == theirs or ours is None or theirs is None:
        return []
    first = next(
        (index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    cut = first == min(len(ours), len(theirs))
    text = "the rest is missing" if cut else f"{ours[first]} in A, {theirs[first]} in B"
    sentence = (
        f"merges: {len(ours):,} in A, {len(theirs):,} in B, different from number {first + 1}: "
        f"{text}"
    )
    return [Finding("tokenizer", "tokenizer_merges", sentence, (), len(ours), len(theirs))]


def _merge_list(values: dict[str, Any]) -> list[str] | None:
    merges = values.get("model", {}).get("merges")
    if not isinstance(merges, list):
        return None
    return [each if isinstance(each, str) else " ".join(map(str, each)) for each in merges]


def _added(a: dict[str, Any], b: dict[str, Any]) -> list[Finding]:
    if not a or not b:
        return []
    ours, theirs = (
        {
            token["content"]: {
                key: token.get(key)
                for key in ("id", "special", "lstrip", "rstrip", "normalized", "single_word")
            }
            for token in values.get("added_tokens", [])
        }
        for values in (a, b)
    )
    if ours == theirs:
        return []
    lacking = [f"only A has {token!r}" for token in ours if token not in theirs]
    lacking += [f"only B has {token!r}" for token in theirs if token not in ours]
    lacking += [
        f"{token!r} is {_changed(ours[token], theirs[token])}"
        for token in ours
        if token in theirs and ours[token] != theirs[token]
    ]
    return [Finding("tokenizer", "added_tokens", f"added tokens: {listed(lacking)}")]


def _changed(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    keys = [key for key in ours if ours[key] != theirs[key]]
    return ", ".join(f"{key} {ours[key]} in A and {theirs[key]} in B" for key in keys)


def _roles(
    a: Tokenizer, our_settings: dict[str, Any], b: Tokenizer, their_settings: dict[str, Any]
) -> list[Finding]:
    findings = []
    if a.eod_id != b.eod_id:
        sentence = (
            f"a text ends with {a.eod_token!r} (id {a.eod_id}) in A, {b.eod_token!r} (id "
            f"{b.eod_id}) in B"
        )
        findings.append(
            Finding("tokenizer", "special_tokens", sentence, ("eos_token",), a.eod_id, b.eod_id)
        )
    for role in _ROLES[1:]:
        ours, theirs = _content(our_settings.get(role)), _content(their_settings.get(role))
        if ours is None or theirs is None or ours == theirs:
            continue
        sentence = f"{role} is {ours!r} in A, {theirs!r} in B"
        findings.append(Finding("tokenizer", "special_tokens", sentence, (role,), ours, theirs))
    return findings


def _content(token: Any) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _sections(a: dict[str, Any], b: dict[str, Any]) -> list[Finding]:
    if not a or not b:
        return []
    findings = []
    for section, cause in _SECTIONS.items():
        ours, theirs = a.get(section), b.get(section)
        if ours != theirs:
            sentence = f"{section} of tokenizer.json: {_kind(ours)} in A, {_kind(theirs)} in B"
            findings.append(Finding("tokenizer", cause, sentence, (section,)))
    return findings + _models(a.get("model") or {}, b.get("model") or {})


def _models(a: dict[str, Any], b: dict[str, Any]) -> list[Finding]:
    """Compare the models of tokenizer.json without what `_vocabulary` and `_merges` compare."""
    findings = []
    for key in {**a, **b}:
        ours, theirs = _set(a.get(key)), _set(b.get(key))
        if key in ("vocab", "merges") or ours == theirs:
            continue
        sentence = f"model.{key} of tokenizer.json: {_kind(ours)} in A, {_kind(theirs)} in B"
        findings.append(
            Finding("tokenizer", "tokenizer_vocabulary", sentence, ("model",), ours, theirs)
        )
    return findings + _scores(a.get("vocab"), b.get("vocab"))


def _set(value: Any) -> Any:
    """Return an option's value, None for the values that versions write where none is set."""
    return None if value is False or value == "" else value


def _scores(a: Any, b: Any) -> list[Finding]:
    """Compare the scores of two Unigram vocabularies, lists of pairs, of the same tokens."""
    if not (isinstance(a, list) and isinstance(b, list)) or [t for t, _ in a] != [t for t, _ in b]:
        return []
    differing = [
        index
        for index, ((_, ours), (_, theirs)) in enumerate(zip(a, b, strict=True))
        if not math.isclose(ours, theirs, rel_tol=1e-6)  # of fp32, written with other digits
    ]
    if not differing:
        return []
    first = differing[0]
    (token, ours), (_, theirs) = a[first], b[first]
    sentence = (
        f"vocabulary: {len(differing):,} tokens have other scores, first {first} ({token!r}): "
        f"{ours:g} in A, {theirs:g} in B"
    )
    where = tuple(map(str, differing[:20]))
    return [Finding("tokenizer", "tokenizer_vocabulary", sentence, where, ours, theirs)]


def _kind(section: Any) -> str:
    text = str(section)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _texts(a: Tokenizer, b: Tokenizer, *, explained: bool) -> list[Finding]:
    """Compare the ids and the decoded texts of the samples."""
    differing = [
        (text, first, second)
        for text, first, second in zip(
            SAMPLES, a.encode_batch(SAMPLES), b.encode_batch(SAMPLES), strict=True
        )
        if first.tolist() != second.tolist() or a.decode(first) != b.decode(second)
    ]
    if not differing:
        return []
    text, first, second = differing[0]
    place = next(
        (
            index
            for index, pair in enumerate(zip(first.tolist(), second.tolist(), strict=False))
            if pair[0] != pair[1]
        ),
        min(len(first), len(second)),
    )
    sentence = (
        f"{len(differing)} of {len(SAMPLES)} sample texts have other ids, first {text[:30]!r} from "
        f"token {place + 1}: {first[place : place + 4].tolist()} in A, "
        f"{second[place : place + 4].tolist()} in B"
    )
    cause = "tokenizer_texts"
    return [Finding("tokenizer", cause, sentence, differs=not explained)]
