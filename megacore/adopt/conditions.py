"""Conditions of shell scripts, as far as they are known without the machine."""

import fnmatch
import re
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.adopt.words import Expander

if TYPE_CHECKING:
    from tree_sitter import Node

_VARIABLE = re.compile(r"\$\{?\w+(?:\[[@*\d]\])?\}?")


def source_of(node: "Node") -> str:
    """Return the text of a node."""
    return (node.text or b"").decode("utf-8", errors="replace")


class Conditions:
    """Evaluation of `[ … ]`, `[[ … ]]` and `(( … ))`: a variable without a value is empty."""

    def __init__(self, expander: Expander) -> None:
        self.expander = expander

    def plain(self, node: "Node") -> str | None:
        """Return an operand of a test; None if it depends on the machine, "" if it is unset."""
        word = self.expander.one(source_of(node), node.start_point[0] + 1)
        texts = []
        for part in word.parts:
            if part.unknown and not _VARIABLE.fullmatch(part.text):
                return None
            texts.append("" if part.unknown else part.text)
        return "".join(texts)

    def outcome(self, node: "Node") -> bool | None:
        """Return the outcome of a condition; None if it depends on the machine."""
        match node.type:
            case "test_command" | "parenthesized_expression":
                if source_of(node).startswith("(("):
                    number = self.expander.number(source_of(node)[2:-2])
                    return None if number is None else bool(number)
                inner = node.named_children
                return self.outcome(inner[0]) if inner else False
            case "binary_expression":
                return self._compare(node)
            case "unary_expression":
                return self._unary(node)
            case "negated_command":
                outcome = self.outcome(node.named_children[0])
                return None if outcome is None else not outcome
            case "list":
                sides = [self.outcome(child) for child in node.named_children]
                return _joined("&&" if any(c.type == "&&" for c in node.children) else "||", sides)
            case "command":
                words = source_of(node).split()
                return {"true": True, "false": False, ":": True}.get(words[0]) if words else None
            case "compound_statement" if source_of(node).startswith("(("):
                number = self.expander.number(source_of(node)[2:-2])
                return None if number is None else bool(number)
            case "word" | "string" | "simple_expansion" | "expansion" | "concatenation" | "number":
                text = self.plain(node)
                return None if text is None else bool(text)
        return None

    def _compare(self, node: "Node") -> bool | None:
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        sign = node.child_by_field_name("operator")
        if left is None or right is None or sign is None:
            return None
        name = source_of(sign)
        if name in ("&&", "||", "-a", "-o"):
            sides = [self.outcome(left), self.outcome(right)]
            return _joined({"-a": "&&", "-o": "||"}.get(name, name), sides)
        first, second = self.plain(left), self.plain(right)
        if first is None or second is None:
            return None
        if name in ("=", "==", "!="):
            same = fnmatch.fnmatchcase(first, second.replace("[", "[[]"))
            return same == (name != "!=")
        numbers = [self.expander.number(text) if text else 0 for text in (first, second)]
        if numbers[0] is None or numbers[1] is None:
            return None
        a, b = numbers[0], numbers[1]
        outcomes = {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-lt": a < b}
        outcomes |= {"-ge": a >= b, "-le": a <= b, ">": a > b, "<": a < b}
        return outcomes.get(name)

    def _unary(self, node: "Node") -> bool | None:
        sign, operand = node.child_by_field_name("operator"), node.named_children[-1]
        name = source_of(sign) if sign is not None else source_of(node)[:1]
        if name == "!":
            outcome = self.outcome(operand)
            return None if outcome is None else not outcome
        if name in ("-n", "-z"):
            text = "" if operand is sign else self.plain(operand)
            return None if text is None else bool(text) == (name == "-n")
        if name in ("-f", "-e", "-s"):
            text = self.plain(operand)
            return True if text and Path(text).name in self.expander.variables.files else None
        return None


def _joined(sign: str, sides: list[bool | None]) -> bool | None:
    decided = sign != "&&"
    if decided in sides:
        return decided
    return None if None in sides else not decided
