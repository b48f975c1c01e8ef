"""Outcomes of `[ … ]`, `[[ … ]]`, `test` and `(( … ))` as in bash, without execution."""

import fnmatch
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.adopt.words import Expander, closing_quote, expansion_end

if TYPE_CHECKING:
    from tree_sitter import Node

_VARIABLE = re.compile(r"\$\{?\w+(?:\[[@*\d]\])?\}?")
_DOUBLE = re.compile(r"\[\[(?:(?!\]\]).)*\]\]", re.DOTALL)
"""A single `[[ … ]]`, of which tree-sitter makes a list after some patterns."""
_BINARY = frozenset(
    {"=", "==", "!=", "=~", "<", ">", "\\<", "\\>", "-eq", "-ne", "-gt", "-lt", "-ge", "-le"}
)


def source_of(node: "Node") -> str:
    """Return the text of a node."""
    return (node.text or b"").decode("utf-8", errors="replace")


class Conditions:
    """Evaluation of conditions: a variable without a value is empty.

    What depends on the machine has no outcome.
    """

    def __init__(self, expander: Expander) -> None:
        self.expander = expander

    def plain(self, node: "Node") -> str | None:
        """Return the text of a word; None if it depends on the machine, "" if it is unset."""
        return _value(self.expander, source_of(node), node.start_point[0] + 1)

    def outcome(self, node: "Node") -> bool | None:
        """Return the outcome of a condition; None if it depends on the machine."""
        text, line = source_of(node), node.start_point[0] + 1
        match node.type:
            case "test_command" | "compound_statement" if text.startswith("(("):
                number = self.expander.number(text[2:-2])
                return None if number is None else bool(number)
            case "test_command" | "list" if _DOUBLE.fullmatch(text):
                return _Test(self.expander, text[2:-2], line, double=True).outcome()
            case "test_command" if text.endswith("]") and not text.startswith("[["):
                return _Test(self.expander, text[1:-1], line, double=False).outcome()
            case "negated_command":
                outcome = self.outcome(node.named_children[0])
                return None if outcome is None else not outcome
            case "list":
                sides = [self.outcome(child) for child in node.named_children]
                return _joined(sides, all_of="&&" in (child.type for child in node.children))
            case "command":
                name, *rest = _source_words(text, double=False) or [""]
                if name == "test":
                    return _Test(self.expander, text[len(name) :], line, double=False).outcome()
                program = None if rest and name[:1] == "$" else _value(self.expander, name, line)
                return {"true": True, "false": False, ":": True}.get(program or "")
        return None


class _Test:
    """The words between the brackets of a test.

    tree-sitter's grammar gives `=`, `!` and `||` another precedence than bash, so its structure is
    not used.
    """

    def __init__(self, expander: Expander, text: str, line: int, *, double: bool) -> None:
        self._expander = expander
        self._line = line
        self._double = double
        """True for `[[ … ]]`: words are not divided, and the right side of `==` is a pattern."""
        words = _source_words(text, double=double)
        if not double:  # an empty variable without quotes is no word
            words = [word for word in words if {*word} & {"'", '"'} or self._value(word) != ""]
        self._words = words
        self._position = 0

    def outcome(self) -> bool | None:
        """Return the outcome; None if it depends on the machine, or is not understood.

        A syntax error in `[ … ]`, as after an empty variable, is false.
        """
        outcome = self._any()
        if self._position == len(self._words):
            return outcome
        return None if self._double else False

    def _any(self) -> bool | None:
        return _joined(self._sides("||" if self._double else "-o", self._all), all_of=False)

    def _all(self) -> bool | None:
        return _joined(self._sides("&&" if self._double else "-a", self._one), all_of=True)

    def _sides(self, sign: str, side: Callable[[], bool | None]) -> list[bool | None]:
        sides = [side()]
        while self._words[self._position : self._position + 1] == [sign]:
            self._position += 1
            sides.append(side())
        return sides

    def _one(self) -> bool | None:
        left = self._words[self._position :]
        if not left:
            return False
        if left[0] == "!" and len(left) > 1:
            self._position += 1
            outcome = self._one()
            return None if outcome is None else not outcome
        if left[0] in ("(", "\\("):
            self._position += 1
            outcome = self._any()
            self._position += 1
            return outcome
        if len(left) > 2 and left[1] in _BINARY:
            self._position += 3
            return self._compare(*left[:3])
        if len(left) > 1 and re.fullmatch(r"-[a-zA-Z]", left[0]):
            self._position += 2
            return self._unary(*left[:2])
        self._position += 1
        value = self._value(left[0])
        return None if value is None else bool(value)

    def _compare(self, left: str, sign: str, right: str) -> bool | None:
        first, second = self._value(left), self._value(right)
        if first is None or second is None or sign == "=~":
            return None
        if sign in ("=", "==", "!="):
            same = self._matches(first, second, right)
            return None if same is None else same == (sign != "!=")
        if sign in ("<", ">", "\\<", "\\>"):
            return first < second if sign.endswith("<") else first > second
        numbers = [self._expander.number(text) if text else 0 for text in (first, second)]
        if numbers[0] is None or numbers[1] is None:
            return None
        a, b = numbers[0], numbers[1]
        outcomes = {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-lt": a < b}
        return (outcomes | {"-ge": a >= b, "-le": a <= b}).get(sign)

    def _matches(self, text: str, pattern: str, source: str) -> bool | None:
        """Return True if a text matches the pattern that is written as `source`."""
        if not self._double or (source[0] in "'\"" and source[0] == source[-1]):
            return text == pattern
        if "(" in source:  # *(a|b)
            return None
        quoted = "'" in source or '"' in source
        return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]") if quoted else pattern)

    def _unary(self, sign: str, operand: str) -> bool | None:
        text = self._value(operand)
        if sign in ("-n", "-z"):
            return None if text is None else bool(text) == (sign == "-n")
        if sign in ("-f", "-e", "-s"):
            return True if text and Path(text).name in self._expander.variables.files else None
        return None

    def _value(self, source: str) -> str | None:
        return _value(self._expander, source, self._line)


def _value(expander: Expander, source: str, line: int) -> str | None:
    """Return the text of a word; None if it depends on the machine, "" if it is unset."""
    texts = []
    for part in expander.one(source, line).parts:
        if part.unknown and not _VARIABLE.fullmatch(part.text):
            return None
        texts.append("" if part.unknown else part.text)
    return "".join(texts)


def _source_words(text: str, *, double: bool) -> list[str]:
    """Return the words of a source text as they are written, with quotes and expansions.

    In `[[ … ]]` (`double`) `&&`, `||` and the parentheses of groups need no space around them.
    """
    text = text.replace("\\\n", "")
    words, current, position = list[str](), "", 0
    while position < len(text):
        char, end = text[position], position + 1
        sign = (
            text[position : position + 2] if text[position : position + 2] in ("&&", "||") else ""
        )
        if (char == "(" and not current) or (char == ")" and "(" not in current):
            sign = char
        if char.isspace() or (double and sign):
            words += [word for word in (current, sign) if word]
            current, position = "", position + (len(sign) or 1)
            continue
        if char == "\\":
            end += 1
        elif char == "'":
            end = text.find("'", end) + 1 or len(text)
        elif char == '"':
            end = closing_quote(text, position) + 1
        elif char in "$`":
            end = max(end, expansion_end(text, position))
        current += text[position:end]
        position = end
    return [*words, current] if current else words


def _joined(sides: Sequence[bool | None], *, all_of: bool) -> bool | None:
    """Return the outcome of sides of which all, or any one, must be true."""
    decided = not all_of
    if decided in sides:
        return decided
    return None if None in sides else not decided
