"""The style rules of CONTRIBUTING.md that a program can check."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.architecture._source import ROOT, python_files, repository_files, tree

_CODE = ("megacore", "tasks", "flows", "scripts", "benchmarks", "tests")
_QUESTION = re.compile(r"\s*(What|Whether|Where|How|Which|Why|When|Who|Whose)\b")
_UNCLEAR = {
    "only": re.compile(r"(?<!stand-)(?<!left )\balone\b", re.I),
    "our …, their …": re.compile(r"\bof (ours|theirs)\b", re.I),
    "next to, in addition to, compared with": re.compile(r"\bbeside\b", re.I),
    "continue, resume": re.compile(r"\b(go|goes|gone|going|went) on (with|from|to)\b", re.I),
    "does not have": re.compile(r"\b(has|have) it not\b", re.I),
    "lack of, missing": re.compile(r"\b(for want of|was wanting)\b", re.I),
    "again": re.compile(r"\banew\b", re.I),
    "what, that": re.compile(r"\bthat which\b", re.I),
    "is reported as": re.compile(r"\bis told as\b", re.I),
}
"""Patterns to avoid, by what to write instead."""


def test_docstrings_do_not_begin_with_a_question_word() -> None:
    openings = [
        f"{path}:{line}: {text.split('.')[0]}"
        for path in python_files(*_CODE)
        for line, text in _docstrings(path)
        if _QUESTION.match(text)
    ]
    assert not openings, "\n".join(["begin with a verb or a noun:", *openings])


def test_docstrings_and_comments_avoid_unclear_words() -> None:
    unclear = [
        f"{path}:{problem}"
        for path in python_files(*_CODE)
        if path != Path(__file__).relative_to(ROOT)
        for problem in _unclear([*_docstrings(path), *_comments(path)])
    ]
    assert not unclear, "\n".join(unclear)


def test_pages_avoid_unclear_words() -> None:
    unclear = [
        f"{path}:{problem}"
        for path in repository_files()
        if path.suffix == ".md"
        for problem in _unclear(enumerate((ROOT / path).read_text("utf-8").splitlines(), 1))
    ]
    assert not unclear, "\n".join(unclear)


def _unclear(texts: Iterable[tuple[int, str]]) -> Iterator[str]:
    for line, text in texts:
        for plain, pattern in _UNCLEAR.items():
            for match in pattern.finditer(text):
                yield f"{line}: {match.group()!r}: write {plain}"


@cache
def _docstrings(path: Path) -> list[tuple[int, str]]:
    """Return line and text of every string that is a statement: docstrings of all kinds."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def _comments(path: Path) -> list[tuple[int, str]]:
    source = (ROOT / path).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
