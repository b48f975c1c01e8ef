"""Values of words as bash computes them, without execution.

Each part of a word keeps its line.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from megacore.adopt.rules import Place

_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?!$-]")
_TILDE = re.compile(r"~(?=[/\s]|$)")
"""Home directory at the beginning of a word."""
_BRACES = re.compile(
    r"(?P<mark>[!#]?)(?P<name>\w+|[@*#?])(?P<index>\[[^]]*\])?(?P<rest>.*)", re.DOTALL
)
_OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: int(left / right) if abs(left) < 2**53 else left // right,
    ast.Mod: lambda left, right: (-1 if left < 0 else 1) * (abs(left) % abs(right)),
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: lambda value: int(not value),
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_LARGEST = 2**63
_MOST_NUMBERS = 1000
"""Most numbers of `seq`, as of rounds of a loop."""
_TERNARY = re.compile(r"([^?]*)\?([^?:]*):(.*)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
"""Characters after a backslash in `$'…'`; others stay as they are written."""
PLACEHOLDER = re.compile(r"(?<!<)<([A-Za-z][^<>\n]*)>")
OPENING, CLOSING, SPACE = "\ue000", "\ue001", "\ue002"
"""Characters that stand for the brackets and spaces of a placeholder such as `<Specify path>`."""


def hide_placeholders(text: str) -> str:
    """Replace `<Specify path>` by characters that are no shell syntax, on the same line."""
    return PLACEHOLDER.sub(
        lambda match: f"{OPENING}{re.sub(r'[ ,;()&|]', SPACE, match[1])}{CLOSING}", text
    )


def show_placeholders(text: str) -> str:
    """Return text with placeholders as they were written."""
    return text.replace(OPENING, "<").replace(CLOSING, ">").replace(SPACE, " ")


@dataclass(frozen=True)
class Part:
    """Piece of a word from one line."""

    text: str
    place: Place
    unknown: bool = False
    """True if it is an expression without a value, such as `$1`, as written."""


@dataclass(frozen=True)
class Word:
    """Word of a command after expansion."""

    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """Content of the word."""
        return show_placeholders("".join(part.text for part in self.parts))

    @property
    def place(self) -> Place:
        """Line on which the word begins."""
        return self.parts[0].place

    @property
    def unknown(self) -> bool:
        """True if a part has no value."""
        return any(part.unknown or OPENING in part.text for part in self.parts)

    def stripped(self) -> "Word":
        """Return the word without the white space at both ends."""
        known = [at for at, part in enumerate(self.parts) if part.unknown or part.text.strip()]
        if not known:
            return Word((replace(self.parts[0], text=""),))
        parts = list(self.parts[known[0] : known[-1] + 1])
        parts[0] = replace(parts[0], text=parts[0].text.lstrip())
        parts[-1] = replace(parts[-1], text=parts[-1].text.rstrip())
        return Word(tuple(parts))

    def fields(self) -> Iterator["Word"]:
        """Yield the words that an unquoted expansion gives, divided at white space."""
        current: list[Part] = []
        for part in self.parts:
            pieces = [part.text] if part.unknown else re.split(r"(\s+)", part.text)
            for piece in pieces:
                if piece.strip() or part.unknown:
                    current.append(Part(piece, part.place, part.unknown))
                elif piece and current:
                    yield Word(tuple(current))
                    current = []
        if current:
            yield Word(tuple(current))


Value = Word | list[Word]
"""Value of a variable: a text or an array."""


@dataclass
class Variables:
    """Variables of a script, and the texts of files that it writes."""

    values: dict[str, Value] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    unset: dict[str, Place] = field(default_factory=dict)
    """Names without a value that were expanded, with the first place."""

    def copy(self) -> "Variables":
        """Return variables that a child process may change."""
        return Variables(dict(self.values), self.files, self.unset)

    def text(self, name: str) -> Word | None:
        """Return a variable as one word; None if it has no value."""
        value = self.values.get(name)
        if isinstance(value, list):
            return value[0] if value else None
        return value


class Expander:
    """Expansion of the words in a source text.

    Args:
        variables: variables with their values.
        file: name of the script.
        directory: directory of the script, which `pwd` and `dirname $0` give.
    """

    def __init__(self, variables: Variables, file: str, directory: str) -> None:
        self.variables, self.file, self.directory = variables, file, directory

    def words(self, text: str, line: int) -> list[Word]:
        """Return the words of a source text, divided where bash divides them."""
        return [
            word
            for quoted, parts in self._scan(text, line)
            for word in self._divided(parts, quoted=quoted)
        ]

    def one(self, text: str, line: int) -> Word:
        """Return a source text as one word, as in an assignment."""
        space = Part(" ", Place(self.file, line))
        parts: list[Part] = []
        for number, (_, pieces) in enumerate(self._scan(text, line)):
            parts += [space] if number else []
            parts += [space if piece is None else piece for piece, _ in pieces]
        return Word(tuple(parts) or (Part("", Place(self.file, line)),))

    def document(self, text: str, line: int) -> Word:
        """Return the text of a here-document as one word."""
        return Word(tuple(self._quoted(text, line)) or (Part("", Place(self.file, line)),))

    def plain_document(self, text: str, line: int) -> Word:
        """Return the text of a here-document whose end is quoted, so that nothing is expanded."""
        return Word(tuple(_lines(text, line, self.file)) or (Part("", Place(self.file, line)),))

    def again(self, word: Word) -> list[Word]:
        """Return the words of a text that bash reads a second time, as `eval` and `sh -c` do."""
        pieces: list[_Piece] = []
        quote = ""
        for part in word.parts:
            text, position = part.text, 0
            if part.unknown:
                pieces.append((part, True))
                continue
            while position < len(text):
                char, end = text[position], position + 1
                if char == quote or (not quote and char in "'\""):
                    quote = "" if quote else char
                    pieces.append((Part("", part.place), True))  # an empty word is one in quotes
                elif char == "\\" and quote != "'" and end < len(text):
                    end += 1
                    kept = "" if not quote or text[position + 1] in '$"\\`\n' else char
                    if text[position + 1] != "\n":
                        pieces.append((Part(kept + text[position + 1], part.place), True))
                elif char in "$`" and quote != "'":
                    end = max(end, expansion_end(text, position))
                    for piece, safe in self._expansion(text[position:end], part.place):
                        pieces.append((piece, safe or (bool(quote) and piece is not None)))
                else:
                    pieces.append((Part(char, part.place), bool(quote)))
                position = end
        words = []
        for each in self._divided(pieces, quoted=False):
            joined: list[Part] = []
            for part in each.parts:
                last = joined[-1] if joined else None
                known = last is not None and not last.unknown and not part.unknown
                if last is not None and known and last.place == part.place:
                    joined[-1] = Part(last.text + part.text, last.place)
                else:
                    joined.append(part)
            words.append(Word(tuple(joined)))
        return words

    def _divided(self, parts: "list[_Piece]", *, quoted: bool) -> Iterator[Word]:
        """Yield the words of pieces: None ends a word, as does white space that is unquoted."""
        current: list[Part] = []
        for piece, protected in parts:
            if piece is None:
                if current:
                    yield Word(tuple(current))
                current = []
            elif protected or piece.unknown:
                current.append(piece)
            else:
                for chunk in re.split(r"(\s+)", piece.text):
                    if chunk.strip():
                        current.append(Part(chunk, piece.place))
                    elif chunk:
                        if current:
                            yield Word(tuple(current))
                        current = []
        if current or quoted:
            yield Word(tuple(current) or (Part("", Place(self.file, 0)),))

    def _scan(self, text: str, line: int) -> "Iterator[tuple[bool, list[_Piece]]]":
        """Yield each source word: True if a part of it is quoted, and its pieces."""
        pieces: list[_Piece] = []
        quoted, position = False, 0
        while position < len(text):
            char, here = text[position], line + text.count("\n", 0, position)
            place = Place(self.file, here)
            if text.startswith("\\\n", position):
                position += 2
            elif char.isspace():
                if pieces or quoted:
                    yield quoted, pieces
                pieces, quoted, position = [], False, position + 1
            elif char == "\\":
                pieces.append((Part(text[position + 1 : position + 2], place), True))
                position += 2
            elif char == "'":
                end = text.find("'", position + 1)
                end = len(text) if end < 0 else end
                pieces += [
                    (part, True) for part in _lines(text[position + 1 : end], here, self.file)
                ]
                quoted, position = True, end + 1
            elif char == '"':
                end = closing_quote(text, position)
                inner = text[position + 1 : end]
                array = re.fullmatch(r"\$\{(\w+)\[@\](.*)\}", inner, re.DOTALL) or re.fullmatch(
                    r"\$(@)()", inner
                )
                if array is not None and expansion_end(inner, 0) == len(inner):
                    pieces += self._elements(array[1], array[2], inner, place, protected=True)
                else:
                    quoted = True
                    pieces += [(part, True) for part in self._quoted(inner, here)]
                position = end + 1
            elif text.startswith("$'", position):
                end, plain = _ansi_c(text, position + 2)
                pieces += [(part, True) for part in _lines(plain, here, self.file)]
                quoted, position = True, end
            elif char in "$`":
                end = expansion_end(text, position)
                pieces += self._expansion(text[position:end], place)
                position = end
            else:
                end = position + 1
                while end < len(text) and text[end] not in "\\'\"$` \t\n":
                    end += 1
                plain = text[position:end]
                starts = not pieces and not quoted
                if starts and _TILDE.match(text, position) and (home := self._home()):
                    pieces.append((Part(home, place), True))
                    plain = plain[1:]
                pieces.append((Part(plain, place), True))
                position = end
        if pieces or quoted:
            yield quoted, pieces

    def _home(self) -> str:
        """Return the directory that `~` stands for, empty if HOME has no value."""
        home = self.variables.text("HOME")
        return "" if home is None or home.unknown else home.text

    def _quoted(self, text: str, line: int) -> list[Part]:
        """Return the parts of a text in double quotes."""
        parts: list[Part] = []
        position, plain = 0, ""
        start = line

        def flush() -> None:
            nonlocal plain
            if plain:
                parts.extend(_lines(plain, start, self.file))
            plain = ""

        while position < len(text):
            char = text[position]
            here = line + text.count("\n", 0, position)
            if not plain:
                start = here
            if char == "\\" and text[position + 1 : position + 2] in ("\n", "$", '"', "\\", "`"):
                following = text[position + 1]
                if following == "\n":
                    flush()
                else:
                    plain += following
                position += 2
            elif char in "$`" and expansion_end(text, position) > position + 1:
                flush()
                end = expansion_end(text, position)
                place = Place(self.file, here)
                for piece, _ in self._expansion(text[position:end], place):
                    parts.append(Part(" ", place) if piece is None else piece)
                position = end
            else:
                plain += char
                position += 1
        flush()
        return parts

    def _expansion(self, text: str, place: Place) -> "list[_Piece]":
        """Return the pieces that an expression such as `${X:-1}` stands for."""
        if text.startswith("$(("):
            number = self.number(text[3:-2])
            return [(_unknown(text, place) if number is None else Part(str(number), place), True)]
        if text.startswith(("$(", "`")):
            return [(self._command(text, place), False)]
        if not text.startswith("${"):
            return self._variable(text[1:], text, place)
        match = _BRACES.fullmatch(text[2:-1])
        if match is None:
            return [(_unknown(text, place), False)]
        name, rest = match["name"], match["rest"]
        if match["mark"] == "#":
            value = self.variables.values.get(name)
            size = len(value) if isinstance(value, list) else len(value.text) if value else 0
            return [(Part(str(size), place), True)]
        if match["mark"] == "!":
            target = self.variables.text(name)
            return (
                [(_unknown(text, place), False)]
                if target is None
                else self._variable(target.text, text, place)
            )
        if match["index"] in ("[@]", "[*]"):
            return self._elements(name, rest, text, place, protected=False)
        if match["index"]:
            value, index = self.variables.values.get(name), self.number(match["index"][1:-1])
            if isinstance(value, list) and index is not None and -len(value) <= index < len(value):
                return [(part, False) for part in value[index].parts]
            return [(_unknown(text, place), False)]
        return self._modified(name, rest, text, place)

    def _pieces(self, text: str, place: Place) -> "list[_Piece]":
        """Return the pieces of the text inside `${NAME:-text}`, with its own quotes."""
        pieces: list[_Piece] = []
        for number, (_, word) in enumerate(self._scan(text, place.line)):
            pieces += [(Part(" ", place), False)] if number else []
            pieces += [(piece, safe) for piece, safe in word if piece is None or piece.text]
        return pieces

    def _modified(self, name: str, rest: str, text: str, place: Place) -> "list[_Piece]":
        """Return the pieces of `${NAME rest}`: a default, a removed affix, or a replacement."""
        value = self.variables.text(name)
        empty = value is None or not value.text
        if not rest:
            return self._variable(name, text, place)
        for mark, applies in (
            (":-", empty),
            (":=", empty),
            ("-", value is None),
            ("=", value is None),
        ):
            if rest.startswith(mark):
                if not applies:
                    return self._variable(name, text, place)
                default = rest[len(mark) :]
                if "=" in mark:
                    self.variables.values[name] = self.one(default, place.line)
                return self._pieces(default, place)
        if rest.startswith((":+", "+")):
            absent = empty if rest[0] == ":" else value is None
            return [] if absent else self._pieces(rest.lstrip(":")[1:], place)
        if rest.startswith((":?", "?")) or value is None or value.unknown:
            return self._variable(name, text, place)
        if rest.startswith(":") and name not in ("@", "*"):
            bounds = [self.number(bound or "0") for bound in rest[1:].split(":")]
            changed = _substring(value.text, bounds)
        else:
            changed = _changed(value.text, rest)
        return [(_unknown(text, place) if changed is None else Part(changed, place), False)]

    def _variable(self, name: str, text: str, place: Place) -> "list[_Piece]":
        if name == "@" or name == "*":
            return self._array("@", place, protected=False)
        if name == "#":
            value = self.variables.values.get("@")
            return [(Part(str(len(value) if isinstance(value, list) else 0), place), True)]
        if name == "PWD" and name not in self.variables.values:
            return [(Part(self.directory, place), False)]
        if name == "0":
            return [(Part(self.file, place), False)]
        value = self.variables.text(name)
        if value is None:
            self.variables.unset.setdefault(name, place)
            return [(_unknown(text, place), False)]
        return [(part, False) for part in value.parts if part.text]

    def _elements(
        self, name: str, rest: str, text: str, place: Place, *, protected: bool
    ) -> "list[_Piece]":
        """Return the pieces of `${NAME[@] rest}`: all elements, a slice, or an alternative."""
        value = self.variables.values.get(name)
        pieces = self._array(name, place, protected=protected)
        if not rest:
            return pieces
        if rest.startswith((":+", "+")):
            same = rest.lstrip(":+").strip('"') == f"${{{name}[@]}}"
            return pieces if same or not value else [(_unknown(text, place), False)]
        if rest.startswith((":-", "-")):
            default = self.one(rest.lstrip(":")[1:], place.line)
            return pieces if value else [(part, protected) for part in default.parts if part.text]
        bounds = [self.number(bound) for bound in rest[1:].split(":")]
        if not isinstance(value, list) or rest[0] != ":" or None in bounds or len(bounds) > 2:
            return [(_unknown(text, place), False)]
        first, count = (bounds[0] or 0), bounds[1] if len(bounds) == 2 else len(value)
        if name == "@" or first < 0 or count is None or count < 0:
            return [(_unknown(text, place), False)]
        part = Variables({name: value[first : first + count]})
        return Expander(part, self.file, self.directory)._array(name, place, protected=protected)

    def _array(self, name: str, place: Place, *, protected: bool) -> "list[_Piece]":
        value = self.variables.values.get(name)
        if value is None:
            if name != "@":
                self.variables.unset.setdefault(name, place)
            return []
        elements = value if isinstance(value, list) else [value]
        pieces: list[_Piece] = []
        for number, word in enumerate(elements):
            pieces += [(None, False)] if number else []
            pieces += [(part, protected) for part in word.parts]
        return pieces

    def _command(self, text: str, place: Place) -> Part:
        """Return the output of the few commands whose output is known, such as pwd and seq."""
        inner = text[1:-1] if text.startswith("`") else text[2:-1]
        words = self.words(inner, place.line)
        names = [word.text for word in words]
        if names[:1] == ["pwd"] or (names[:1] == ["cd"] and names[-1:] == ["pwd"]):
            return Part(self.directory, place)
        if names[:1] == ["dirname"] and len(names) == 2 and not words[1].unknown:
            directory = names[1].rpartition("/")[0]
            return Part(directory or self.directory, place)
        if names[:1] in (["realpath"], ["readlink"]) and not words[-1].unknown:
            return Part(names[-1], place)
        if names[:1] == ["basename"] and len(names) == 2 and not words[1].unknown:
            return Part(names[1].rpartition("/")[2], place)
        if names[:1] == ["seq"] and (numbers := _sequence(names[1:])) is not None:
            return Part("\n".join(map(str, numbers)), place)
        if names[:1] == ["echo"] and not any(word.unknown for word in words):
            plain = [name for name in names[1:] if name not in ("-n", "-e")]
            if not any(each in ("|", "||", "&&") or each.endswith(";") for each in plain):
                return Part(" ".join(plain), place)
        return _unknown(text, place)

    def number(self, text: str) -> int | None:
        """Return the value of an arithmetic expression; None if it has no value or is too large."""
        choice = _TERNARY.fullmatch(text)
        if choice is not None and choice[1].count("(") == choice[1].count(")"):
            condition = self.number(choice[1])
            return None if condition is None else self.number(choice[2 if condition else 3])
        names = re.sub(r"(?<![\w$}{])(?<!\{[#!])([A-Za-z_]\w*)", r"$\1", text)
        if re.search(r"\d#", text):  # a base, as in 10#08
            return None
        word = self.one(f'"{names}"', 0)
        octal = re.sub(r"\b0+([0-7]+)\b", r"0o\1", word.text)
        plain = octal.replace("&&", " and ").replace("||", " or ").replace("/", "//")
        if word.unknown:
            return None
        try:
            return _calculate(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


_Piece = tuple[Part | None, bool]
"""Part with True if its white space does not divide words; None ends a word of an array."""


def _unknown(text: str, place: Place) -> Part:
    return Part(" ".join(text.split()), place, unknown=True)


def _lines(text: str, line: int, file: str) -> list[Part]:
    """Return a text as one part per line."""
    return [
        Part(piece, Place(file, line + number))
        for number, piece in enumerate(text.splitlines(keepends=True))
    ]


def _ansi_c(text: str, start: int) -> tuple[int, str]:
    """Return the position after the quotes `$'…'` and their text; `start` is after the first."""
    plain, position = "", start
    while position < len(text) and text[position] != "'":
        char = text[position]
        if char == "\\":
            position += 1
            char = text[position : position + 1]
            char = _ESCAPES.get(char, f"\\{char}")
        plain += char
        position += 1
    return position + 1, plain


def _changed(text: str, rest: str) -> str | None:
    """Return a value with an affix removed, a pattern replaced or its case changed."""
    if rest in ("^^", ",,"):
        return text.upper() if rest == "^^" else text.lower()
    for mark, ends, longest in (
        ("##", False, True),
        ("#", False, False),
        ("%%", True, True),
        ("%", True, False),
    ):
        if rest.startswith(mark):
            pattern = rest[len(mark) :].strip("\"'")
            if set("$`\\") & set(pattern):
                return None
            sizes = range(len(text) + 1)
            for size in reversed(sizes) if longest else sizes:
                affix = text[len(text) - size :] if ends else text[:size]
                if fnmatch.fnmatchcase(affix, pattern):
                    return text[: len(text) - size] if ends else text[size:]
            return text
    if rest.startswith("/"):
        everywhere = rest.startswith("//")
        old, _, new = rest.lstrip("/").partition("/")
        if set("$`\\*?[\"'") & set(rest) or old[:1] in ("#", "%"):
            return None
        return text.replace(old, new) if everywhere else text.replace(old, new, 1)
    return None


def _substring(text: str, bounds: list[int | None]) -> str | None:
    """Return the part of `${NAME:FIRST:LENGTH}`; None if bash refuses it or a bound is unknown."""
    first, length = bounds[0], bounds[1] if len(bounds) == 2 else len(text)
    if first is None or length is None or len(bounds) > 2:
        return None
    first += len(text) if first < 0 else 0
    if not 0 <= first <= len(text):
        return ""
    end = first + length if length >= 0 else len(text) + length
    return None if end < first else text[first:end]


def _sequence(bounds: list[str]) -> range | None:
    """Return the integers of `seq LAST`, `seq FIRST LAST` or `seq FIRST STEP LAST`."""
    if not 1 <= len(bounds) <= 3 or any(re.fullmatch(r"-?\d+", each) is None for each in bounds):
        return None
    first, last = int(bounds[0]) if len(bounds) > 1 else 1, int(bounds[-1])
    step = int(bounds[1]) if len(bounds) == 3 else 1
    numbers = range(first, last + (1 if step > 0 else -1), step) if step else None
    return None if numbers is None or len(numbers) > _MOST_NUMBERS else numbers


def _calculate(node: ast.AST) -> int:
    """Return the value of integers, arithmetic and comparisons. Raises ValueError for others."""
    match node:
        case ast.Constant(value=int() as value):
            result = int(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first, second = _calculate(left), _calculate(right)
            most = {ast.Pow: 64, ast.LShift: 63, ast.RShift: 63}.get(type(op))
            if most is not None and not 0 <= second <= most:
                raise ValueError(second)
            result = int(_OPERATORS[type(op)](first, second))
        case ast.UnaryOp(op=unary, operand=operand) if type(unary) in _OPERATORS:
            result = int(_OPERATORS[type(unary)](_calculate(operand)))
        case ast.Compare(left=left, ops=[compare], comparators=[right]):
            if type(compare) not in _OPERATORS:
                raise ValueError(compare)
            result = int(_OPERATORS[type(compare)](_calculate(left), _calculate(right)))
        case ast.BoolOp(op=ast.And(), values=values):
            result = int(all(_calculate(value) for value in values))
        case ast.BoolOp(op=ast.Or(), values=values):
            result = int(any(_calculate(value) for value in values))
        case _:
            raise ValueError(node)
    if abs(result) >= _LARGEST:
        raise ValueError(result)
    return result


def closing_quote(text: str, start: int) -> int:
    """Return the position of the double quote that closes the one at `start`."""
    position = start + 1
    while position < len(text) and text[position] != '"':
        if text[position] == "\\":
            position += 2
        elif text[position] in "$`":
            position = max(expansion_end(text, position), position + 1)
        else:
            position += 1
    return min(position, len(text))


def expansion_end(text: str, start: int) -> int:
    """Return the position after the expansion that begins at `start`; start + 1 if none does."""
    if text[start] == "`":
        end = text.find("`", start + 1)
        return len(text) if end < 0 else end + 1
    following = text[start + 1 : start + 2]
    if following in ("{", "("):
        opening, closing = following, {"{": "}", "(": ")"}[following]
        depth, position = 0, start + 1
        while position < len(text):
            char = text[position]
            if char == "\\":
                position += 1
            elif char == "'" and opening == "(":
                position = max(position, text.find("'", position + 1))
            elif char == '"':
                position = closing_quote(text, position)
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if depth == 0:
                    return position + 1
            position += 1
        return len(text)
    match = _NAME.match(text, start + 1)
    return start + 1 if match is None else match.end()
