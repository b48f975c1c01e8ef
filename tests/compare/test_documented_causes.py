"""docs/compare.md lists exactly the causes that a comparison can name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import megacore.compare
from megacore.compare import fields, runs, side, tokenizers
from megacore.compare.report import UNEXPLAINED

_PAGE = Path(__file__).parents[2] / "docs" / "compare.md"
_TABLES = (
    fields._BY_PART,
    fields._FIELDS,
    runs._ENVIRONMENT,
    side._CAUSE_OF_KEY,
    tokenizers._SECTIONS,
)
_FIRST_ARGUMENT = ("Named", "_Cause", "logits_finding")
_VARIABLES = {"cause", "causes", "key", "without_reason"}
_COMPUTED = {"not_finite"}
"""Causes whose name is made of a relation's kind."""


def _leading(node: ast.AST | None) -> Iterator[str]:
    """Yield the texts that an expression can be; of a tuple, its first."""
    match node:
        case ast.Constant(value=str() as text):
            yield text
        case ast.Tuple(elts=[first, *_]):
            yield from _leading(first)
        case ast.IfExp(body=one, orelse=other):
            yield from (*_leading(one), *_leading(other))
        case ast.BoolOp(values=values) | ast.Dict(values=values):
            for value in values:
                yield from _leading(value)


def _named_by(node: ast.AST) -> Iterator[str]:
    """Yield the causes that one statement or call names."""
    match node:
        case ast.Call(func=ast.Name(id="Finding"), args=[_, cause, *_]):
            yield from _leading(cause)
        case ast.Call(func=ast.Name(id=name), args=[cause, *_]) if name in _FIRST_ARGUMENT:
            yield from _leading(cause)
        case ast.Assign(targets=[target]):
            first = target.elts[0] if isinstance(target, ast.Tuple) else target
            named = isinstance(first, ast.Name) and first.id in _VARIABLES
            if named and (first.id != "key" or isinstance(node.value, ast.Tuple)):
                yield from _leading(node.value)
        case ast.For(target=ast.Tuple(elts=[_, ast.Name(id="cause")]), iter=ast.Tuple() as pairs):
            yield from (text for pair in pairs.elts for text in _leading(pair.elts[-1]))
        case ast.FunctionDef(name=name) if re.search("cause|^_name|^_scaled|_part", name):
            returned = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            yield from (text for each in returned for text in _leading(each.value))


def test_each_cause_is_documented_and_each_documented_cause_exists() -> None:
    causes = {cause for table in _TABLES for cause in table.values()} | _COMPUTED | {UNEXPLAINED}
    for path in Path(megacore.compare.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            causes.update(_named_by(node))
    tables = re.findall(r"^\| (`.*?) \|", _PAGE.read_text(encoding="utf-8"), re.M)
    documented = {cause for row in tables for cause in re.findall(r"`(\w+)`", row)}
    assert documented == causes - {"remark"}
