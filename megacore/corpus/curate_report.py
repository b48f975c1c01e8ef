"""Report of a curation: what each step removed, duplicates, lengths and languages."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megacore.config.curate import CurateStep, MinhashDedupStep
from megacore.observe.logging import counted
from megacore.paths import glob

_EXAMPLES = 3
"""Number of removed documents that are shown of each rule."""
_EXAMPLE_CHARACTERS = 200


@dataclass
class Tally:
    """Counts of one shard: what was read, removed and written."""

    read: Counter[str] = field(default_factory=Counter)
    """Numbers of documents, words and bytes read from the source."""
    kept: Counter[str] = field(default_factory=Counter)
    skipped_lines: int = 0
    lengths_read: Counter[int] = field(default_factory=Counter)
    """Documents by the binary digits of their number of words."""
    lengths_kept: Counter[int] = field(default_factory=Counter)
    languages_read: Counter[str] = field(default_factory=Counter)
    languages_kept: Counter[str] = field(default_factory=Counter)
    removed: dict[str, Counter[str]] = field(default_factory=dict)
    """Removed documents by step and reason."""
    changed: Counter[str] = field(default_factory=Counter)
    """Documents whose text a step changed."""
    examples: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    """Removed documents by step and reason: source, and the beginning of the text."""

    def note_read(self, document: Any) -> None:
        """Count a document of the source."""
        _count(document, self.read, self.lengths_read)

    def note_kept(self, document: Any) -> None:
        """Count a document that is kept."""
        _count(document, self.kept, self.lengths_kept)
        # A field of the source may have this name; the report shows it only if a step counted.
        if isinstance(language := document.metadata.get("language"), str):
            self.languages_kept[language] += 1

    def note_removed(self, step: str, reason: str, document: Any) -> None:
        """Count a document that a step removed."""
        self.removed.setdefault(step, Counter())[reason] += 1
        examples = self.examples.setdefault(step, {}).setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            cluster = document.metadata.get("minhash_cluster_id")
            examples.append(
                {"source": document.id, "text": document.text[:_EXAMPLE_CHARACTERS]}
                | ({} if cluster is None else {"cluster": cluster})
            )

    def content(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return dict(vars(self))


def _count(document: Any, counts: Counter[str], lengths: Counter[int]) -> None:
    words = len(document.text.split())
    counts["documents"] += 1
    counts["words"] += words
    counts["bytes"] += len(document.text.encode("utf-8", "surrogatepass"))
    lengths[words.bit_length()] += 1


def summarize_clusters(folder: Path, step: CurateStep) -> dict[str, Any]:
    """Return the number of clusters of duplicates by their size, from datatrove's files."""
    sizes: Counter[int] = Counter()
    near = isinstance(step, MinhashDedupStep)
    # Pairs of a document and the size of its cluster; or of the document that is kept and the
    # number of its duplicates.
    for path in glob(folder, "remove/*.sizes" if near else "duplicates/*/*.c4_counts"):
        second = np.fromfile(path, "<u4").reshape(-1, 2)[:, 1]
        values, counts = np.unique(second, return_counts=True)
        sizes.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    if near:
        clusters = {size: documents // size for size, documents in sizes.items()}
    else:
        clusters = {duplicates + 1: count for duplicates, count in sizes.items()}
    return {
        "clusters": sum(clusters.values()),
        "documents": sum(size * count for size, count in clusters.items()),
        "largest": max(clusters, default=0),
        "sizes": {str(size): clusters[size] for size in sorted(clusters)},
    }


def merged_report(
    labels: Sequence[str],
    tallies: Sequence[Mapping[str, Any]],
    clusters: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the report of a curation from the counts of its tasks, in the order of the corpus."""

    def total(name: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for tally in tallies:
            counts.update(tally[name])
        return counts

    read, kept, changed = total("read"), total("kept"), total("changed")
    languages = total("languages_read")
    rows = []
    for label in ("empty", *labels):
        reasons: Counter[str] = Counter()
        examples: dict[str, list[Any]] = {}
        for tally in tallies:
            reasons.update(tally["removed"].get(label, {}))
            for reason, documents in tally["examples"].get(label, {}).items():
                shown = examples.setdefault(reason, [])
                shown += documents[: _EXAMPLES - len(shown)]
        if label == "empty" and not reasons:
            continue
        rows.append(
            {
                "step": label,
                "removed": reasons.total(),
                "reasons": dict(sorted(reasons.items())),
                "changed": changed[label],
                "examples": dict(sorted(examples.items())),
            }
            | ({"duplicates": dict(clusters[label])} if label in clusters else {})
        )
    return {
        **{
            name: {"read": read[name], "kept": kept[name]}
            for name in ("documents", "words", "bytes")
        },
        "skipped_lines": sum(tally["skipped_lines"] for tally in tallies),
        "steps": rows,
        "words_per_document": _lengths(total("lengths_read"), total("lengths_kept")),
        "languages": {
            "read": dict(languages.most_common()),
            "kept": dict(total("languages_kept").most_common()) if languages else {},
        },
    }


def _lengths(read: Counter[str], kept: Counter[str]) -> list[dict[str, Any]]:
    """Return the histogram: the range of words of each bin, and the documents in it."""
    return [
        {
            "words": "0" if digits == 0 else f"{1 << (digits - 1)}-{(1 << digits) - 1}",
            "read": read[str(digits)],
            "kept": kept[str(digits)],
        }
        for digits in sorted(map(int, read | kept))
    ]


def report_text(report: Mapping[str, Any]) -> str:
    """Return a report as markdown."""
    lines = ["| | read | kept | share |", "| --- | ---: | ---: | ---: |"]
    for name in ("documents", "words", "bytes"):
        read, kept = report[name]["read"], report[name]["kept"]
        lines.append(f"| {name} | {read:,} | {kept:,} | {kept / max(1, read):.1%} |")
    lines += ["", "| step | removed | changed | reasons |", "| --- | ---: | ---: | --- |"]
    for row in report["steps"]:
        reasons = ", ".join(
            f"{_cell(reason)} {count:,}"
            for reason, count in sorted(row["reasons"].items(), key=lambda item: -item[1])
        )
        if "duplicates" in row:
            duplicates = row["duplicates"]
            others = [f"{count:,} {each}" for each, count in row["reasons"].items() if "of" in each]
            clusters = counted(duplicates["clusters"], "cluster")
            reasons = ", ".join([f"{clusters}, the largest of {duplicates['largest']:,}", *others])
        lines.append(f"| {row['step']} | {row['removed']:,} | {row['changed']:,} | {reasons} |")
    lines += ["", "| words per document | read | kept |", "| --- | ---: | ---: |"]
    for row in report["words_per_document"]:
        lines.append(f"| {row['words']} | {row['read']:,} | {row['kept']:,} |")
    if report["languages"]["read"]:
        lines += ["", "| language | read | kept |", "| --- | ---: | ---: |"]
        kept_languages = report["languages"]["kept"]
        for name, count in Counter(report["languages"]["read"]).most_common(20):
            lines.append(f"| {_cell(name)} | {count:,} | {kept_languages.get(name, 0):,} |")
    examples = [
        f"- {row['step']}, {_cell(reason)}: `{_cell(document['source'])}`: "
        f"{_cell(json.dumps(document['text'][:100], ensure_ascii=False))}"
        for row in report["steps"]
        for reason, documents in row["examples"].items()
        for document in documents[:1]
    ]
    return "\n".join([*lines, "", *(["Removed, for example:", "", *examples] if examples else [])])


def _cell(text: object) -> str:
    """Return text without characters that end a cell or begin markup."""
    return "".join("\\" + char if char in "\\|`*_<>[]" else char for char in str(text))
