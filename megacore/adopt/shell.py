"""Reader of training scripts: follows a shell script's assignments and branches, runs nothing.

Structure comes from tree-sitter's grammar of bash, values from `megacore.adopt.words`. A condition
that depends on the machine (files, hosts, output of programs) counts as false, with a remark.
"""

import contextlib
import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.adopt.conditions import Conditions, source_of
from megacore.adopt.rules import Place, Setting
from megacore.adopt.words import (
    Expander,
    Part,
    Value,
    Variables,
    Word,
    hide_placeholders,
    show_placeholders,
)
from megacore.artifact.files import read_bytes
from megacore.errors import ConfigError
from megacore.foreign.files import nearest
from megacore.paths import is_file

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

SCRIPT_BYTES = 1 << 20
"""Largest script in bytes."""
_MOST_STATEMENTS = 50_000
_MOST_DEPTH = 40
_MOST_ROUNDS = 1000
_NUMBERED = 99
"""Most arguments that are read by their numbers, as `$1`."""
_PREFIXES = frozenset({"nohup", "time", "exec", "sudo", "env", "numactl", "stdbuf"})
_SHELLS = frozenset({"bash", "sh", "zsh"})
_NO_LAUNCH = frozenset(
    {"echo", "printf", "ls", "cp", "cat", "mv", "rm", "mkdir", "touch", "test", "["}
)
"""Commands that start no training, whatever their words are."""
_LITERAL = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\{[^}]*\}", re.DOTALL)
"""Pieces of a word in which braces are not expanded."""
_BRACE_EXPANSION = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_JOINED = re.compile(r"(?<=[\w}\"'/.:,=@+%-])\$([A-Za-z_]\w*)(?=[/.:,@+%-])")
"""Variable inside a word, such as `$B` of `$A/$B/c`, at which tree-sitter divides the word."""
_INLINE_COMMENT = re.compile(r"`[ \t]*#[^`\n]*`")
"""Comment between the lines of a command, at which tree-sitter ends the command."""
_MODULES = frozenset({"torch.distributed.launch", "torch.distributed.run", "deepspeed.launcher"})


@dataclass(frozen=True)
class Launch:
    """Command that starts a Python program."""

    program: str
    """Path of the program as written, or its module after `-m`."""
    place: Place
    launcher: tuple[Word, ...]
    """Words before the program, with the launcher's options."""
    arguments: tuple[Word, ...]
    """Words after the program."""


@dataclass
class Script:
    """Content of a script as far as it is known without running it."""

    file: str
    launches: list[Launch] = field(default_factory=list)
    variables: Variables = field(default_factory=Variables)
    commands: list[str] = field(default_factory=list)
    """Names of all commands, in order, those in branches that are not taken included."""
    text: str = ""
    """Text of the script and of those that it sources or calls."""
    remarks: list[str] = field(default_factory=list)
    given: frozenset[str] = frozenset()
    """Variables with a value from outside, which assignments do not change."""
    hints: dict[str, str] = field(default_factory=dict)
    """Comments at the end of assignments, by variable, such as `<Specify path>`."""


def read_script(path: Path, given: Mapping[str, str] | None = None) -> Script:
    """Read a script and the scripts that it sources or calls.

    Args:
        path: path of the script.
        given: values of variables from outside; `1` is the script's first argument.

    Raises:
        ConfigError: the file cannot be read, or the parser is not installed.
    """
    script = Script(str(path), given=frozenset(given or {}))
    home = os.path.expanduser("~")  # unlike Path.home, it has no error
    script.variables.values["HOME"] = Word((Part(home, Place("HOME", 0)),))
    place = Place("--set", 0)
    for name, value in (given or {}).items():
        script.variables.values[name] = Word((Part(value, place),))
    positional = [
        script.variables.values[str(n)] for n in range(1, _NUMBERED + 1) if str(n) in (given or {})
    ]
    script.variables.values["@"] = [word for word in positional if isinstance(word, Word)]
    _Reader(script, path, script.variables, 0).run(_text_of(path))
    for name in script.given:
        if not name.isdecimal() and not re.search(rf"\b{re.escape(name)}\b", script.text):
            near = nearest(name, sorted(set(re.findall(r"[A-Za-z_]\w+(?==)", script.text))))
            raise ConfigError(f"--set {name}=…: {path} has no variable of this name{near}")
    return script


def flags_of(words: tuple[Word, ...], booleans: frozenset[str] = frozenset()) -> Iterator[Setting]:
    """Yield the flags of a command line with their values.

    A word that follows a flag in `booleans` is no value of it. Words without a flag before them
    are yielded with the name "" if they hold text.
    """
    name, place, values, unknown = "", Place("", 0), list[str](), False
    for word in words:
        text = word.text
        is_flag = re.match(r"--?[A-Za-z]", text) and not (word.unknown and text.startswith("-$"))
        if is_flag:
            if name or values:
                yield Setting(name, values, place, unknown)
            name, sign, value = text.partition("=")
            place, values = word.place, [value] if sign else []
            unknown = word.unknown and bool(sign)
        elif name in booleans or not name:
            if name:
                yield Setting(name, values, place, unknown)
            name, values, unknown, place = "", [text], word.unknown, word.place
            yield Setting(name, values, place, unknown)
            values = []
        else:
            values.append(text)
            unknown = unknown or word.unknown
    if name or values:
        yield Setting(name, values, place, unknown)


def _text_of(path: Path) -> str:
    try:
        content = read_bytes(path, SCRIPT_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}: give another file") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as a script: {error}") from error
    if b"\0" in content:
        raise ConfigError(f"{path} cannot be read as a script: it is no text: give another file")
    return content.decode("utf-8", errors="replace")


def _parser() -> "Parser":
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError as error:
        raise ConfigError(
            "tree-sitter and tree-sitter-bash are not installed, which read shell scripts: "
            "pip install megacore[adopt]"
        ) from error
    return Parser(Language(tree_sitter_bash.language()))


class _ExitError(Exception):
    """End of a script by `exit`."""


class _ReturnError(Exception):
    """End of a function or of a sourced script by `return`."""


class _LoopError(Exception):
    """End of a round of a loop by `continue`, or of the loop by `break`."""

    def __init__(self, *, ends: bool, levels: int) -> None:
        super().__init__()
        self.ends = ends
        self.levels = levels
        """Number of nested loops that end, the innermost first."""


class _Reader:
    """Walk over the statements of one script."""

    def __init__(self, script: Script, path: Path, variables: Variables, depth: int) -> None:
        self.script, self.path, self.depth = script, path, depth
        self.variables = variables
        self.expander = Expander(variables, str(path), str(path.parent))
        self.conditions = Conditions(self.expander)
        self.functions: dict[str, Node] = {}
        self.steps = 0
        self.integers: set[str] = set()
        """Variables of `declare -i`, whose assignments are arithmetic."""
        self.input: Word | None = None
        """Here-document of the command that is walked over."""
        self.local: list[dict[str, Value | None]] = []
        """Values that the local variables of the running functions had before, innermost last."""

    def run(self, text: str) -> None:
        """Walk over a script's text; its `exit` ends the walk."""
        self.script.text += text
        text = _INLINE_COMMENT.sub("", text.replace("\r\n", "\n"))
        hidden = _JOINED.sub(r"${\1}", hide_placeholders(text))
        for match in re.finditer(
            r"^\s*(?:export\s+)?(\w+)=\S*[ \t]+#[ \t]*(.*\S)", hidden, re.MULTILINE
        ):
            self.script.hints.setdefault(match[1], show_placeholders(match[2]))
        tree = _parser().parse(hidden.encode("utf-8"))
        with contextlib.suppress(_ExitError, _ReturnError, _LoopError):
            self._all(tree.root_node.named_children)

    def _all(self, nodes: "list[Node]") -> None:
        for node in nodes:
            self._statement(node)

    def _statement(self, node: "Node") -> None:
        self.steps += 1
        if self.steps > _MOST_STATEMENTS:
            raise ConfigError(
                f"{self.path} has loops of more than {_MOST_STATEMENTS:,} statements: give a "
                "script that only sets variables and starts a training"
            )
        match node.type:
            case "variable_assignment":
                self._assign(node)
            case "variable_assignments" | "declaration_command":
                if self.local and source_of(node).startswith(("local", "declare", "typeset")):
                    for local in _declared(node):
                        self.local[-1].setdefault(local, self.variables.values.get(local))
                integer = re.match(
                    r"(?:local|declare|typeset)(?:\s+[-+]\w+)*?\s+([-+])\w*i", source_of(node)
                )
                if integer is not None:
                    declared = set(_declared(node))
                    change = set.union if integer[1] == "-" else set.difference
                    self.integers = change(self.integers, declared)
                self._all([c for c in node.named_children if c.type == "variable_assignment"])
            case "unset_command":
                for unset in source_of(node).split()[1:]:
                    if "[" in unset:
                        self._unread(node)
                    elif unset not in self.script.given:
                        self.variables.values.pop(unset, None)
                        self.integers.discard(unset)
            case "command":
                self._command(node)
            case "redirected_statement":
                self._redirected(node)
            case "pipeline":
                self._all(node.named_children)
            case "list":
                self._list(node)
            case "if_statement":
                self._if(node)
            case "case_statement":
                self._case(node)
            case "for_statement":
                self._for(node)
            case "while_statement":
                self._while(node)
            case "function_definition":
                name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
                if name is not None and body is not None:
                    self.functions[source_of(name)] = body
            case "subshell":
                before = dict(self.variables.values)
                with contextlib.suppress(_ExitError):
                    self._all(node.named_children)
                self.variables.values.clear()
                self.variables.values.update(before)
            case "ERROR":
                if source_of(node).strip(" \t\n\\"):
                    self._unread(node, source_of(node).strip(" \t\n\\").split("\n")[0])
                self._all(node.named_children)
            case "compound_statement" | "do_group" | "program":
                if source_of(node).startswith("(("):
                    self._arithmetic(source_of(node)[2:-2])
                else:
                    self._all(node.named_children)
            case "negated_command":
                self._all(node.named_children)
            case _:
                if _changes(node):
                    self._unread(node)

    def _unread(self, node: "Node", shown: str = "") -> None:
        """Remark once that a statement, or the part `shown` of it, is not read as bash reads it."""
        shown = shown or source_of(node).split("\n")[0]
        line = node.start_point[0] + 1
        remark = f"{self.path.name}:{line}: {show_placeholders(shown)} is not read"
        if remark not in self.script.remarks:
            self.script.remarks.append(remark)

    def _expanded(self, node: "Node") -> list[Word]:
        """Return the words of a node; braces such as `{a,b}` stay, with a remark."""
        source = source_of(node)
        braces = _BRACE_EXPANSION.search(_LITERAL.sub('""', source)) if "{" in source else None
        if braces is not None:
            self._unread(node, f"the brace expansion {source}")
        return self.expander.words(source, node.start_point[0] + 1)

    def _assign(self, node: "Node") -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return
        if source_of(target) in self.script.given:
            return
        name, appends = source_of(target), any(child.type == "+=" for child in node.children)
        if name == "IFS":
            self._unread(node)
        line = node.start_point[0] + 1
        values = self.variables.values
        if value is not None and value.type == "array":
            words = [
                word
                for child in value.named_children
                if child.type != "comment"
                for word in self._expanded(child)
            ]
            if any(re.match(r"\[[^]]*\]=", source_of(child)) for child in value.named_children):
                self._unread(node)
            old = values.get(name, [])
            values[name] = (
                [*(old if isinstance(old, list) else [old]), *words] if appends else words
            )
            return
        empty = Word((Part("", Place(str(self.path), line)),))
        text = (
            empty
            if value is None
            else self.expander.one(source_of(value), value.start_point[0] + 1)
        )
        if target.type == "subscript":
            if not self._element(source_of(target), text):
                self._unread(node)
            return
        if name in self.integers:
            self._arithmetic(f"{name}{'+=' if appends else '='}{text.text}")
            return
        if appends:
            before = values.get(name)
            if isinstance(before, list):
                values[name] = [*before, text]
                return
            text = Word((*(before.parts if before is not None else ()), *text.parts))
        values[name] = text

    def _element(self, target: str, word: Word) -> bool:
        """Set an element of an array; return False if that would leave a gap.

        Other arrays, whose keys are texts, have no values.
        """
        name, _, index = target.rstrip("]").partition("[")
        old, number = self.variables.values.get(name), self.expander.number(index)
        if old is None and number == 0:
            old = []
        if isinstance(old, list) and number is not None and 0 <= number <= len(old):
            self.variables.values[name] = [*old[:number], word, *old[number + 1 :]]
            return True
        self.variables.values.pop(name, None)
        return not isinstance(old, list)

    def _arithmetic(self, text: str) -> None:
        """Apply an assignment of `(( … ))` or `let`; other expressions change nothing."""
        match = re.fullmatch(r"\s*(\w+)\s*(\+\+|--|[-+*/]?=(?!=))\s*(.*)", text, re.DOTALL)
        if match is None:
            return
        name, sign, rest = match.groups()
        expression = {"++": f"{name}+1", "--": f"{name}-1", "=": rest}.get(
            sign, f"{name}{sign[0]}({rest})"
        )
        number = self.expander.number(expression)
        place = Place(str(self.path), 0)
        self.variables.values[name] = Word(
            (Part(f"$(({expression}))" if number is None else str(number), place, number is None),)
        )

    def _list(self, node: "Node") -> None:
        """Walk over `A && B` and `A || B`: a side that depends on the machine is walked over."""
        children = node.children
        first = children[0]
        outcome = self.conditions.outcome(first)
        self._statement(first)
        for position in range(1, len(children) - 1, 2):
            sign, following = children[position].type, children[position + 1]
            if outcome is None and _is_test(first) and _changes(following):
                self._left_out(first, f"what follows {sign} is left out")
            skipped = outcome is False or (outcome is None and _is_test(first))
            if (sign == "&&" and skipped) or (sign == "||" and outcome is not False):
                continue
            self._statement(following)

    def _left_out(self, condition: "Node", consequence: str) -> None:
        shown = " ".join(source_of(condition).split())
        self.script.remarks.append(
            f"{self.path.name}:{condition.start_point[0] + 1}: the condition "
            f"{show_placeholders(shown)} depends on the machine: {consequence}"
        )

    def _if(self, node: "Node") -> None:
        branches = _branches(node)
        for conditions, body in branches:
            for condition in conditions:
                self._names(condition)
            self._names_of_all(body)
        for conditions, body in branches:
            self._all([condition for condition in conditions if not _is_test(condition)])
            outcome = self.conditions.outcome(conditions[-1]) if conditions else True
            if outcome is None:
                if any(_changes(child) for child in body):
                    shown = " ".join(source_of(conditions[-1]).split())
                    line = conditions[-1].start_point[0] + 1
                    self.script.remarks.append(
                        f"{self.path.name}:{line}: the condition {show_placeholders(shown)} "
                        "depends on the machine and is taken as false"
                    )
                continue
            if outcome:
                self._all(body)
                return

    def _case(self, node: "Node") -> None:
        subject = node.child_by_field_name("value")
        if subject is None:
            return
        word = self.conditions.plain(subject)
        if word is None and _changes(node):
            self._left_out(subject, "no branch is taken")
        falls = False  # `;&` walks over the next branch too, `;;&` tries the following patterns
        for item in node.named_children:
            if item.type != "case_item" or word is None:
                continue
            values = item.children_by_field_name("value")
            patterns = [self.expander.one(source_of(child), 0) for child in values]
            if any(pattern.unknown for pattern in patterns) and _changes(item):
                self._unread(item)
            if falls or any(fnmatch.fnmatchcase(word, pattern.text) for pattern in patterns):
                self._all([child for child in item.named_children if child not in values])
                ending = item.children[-1].type
                falls = ending == ";&"
                if ending not in (";&", ";;&"):
                    return

    def _for(self, node: "Node") -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is None or body is None:
            return
        words = [
            word for child in node.children_by_field_name("value") for word in self._expanded(child)
        ]
        for word in words[:_MOST_ROUNDS]:
            if not word.unknown:
                self.variables.values[source_of(variable)] = word
                if self._round(body):
                    return

    def _while(self, node: "Node") -> None:
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        if condition is None or body is None:
            return
        ending = node.children[0].type == "until"
        for _ in range(_MOST_ROUNDS):
            if not _is_test(condition):
                self._statement(condition)
            outcome = self.conditions.outcome(condition)
            if outcome is None and _changes(body):
                taken = "the loop has one round" if ending else "the loop has no round"
                self._left_out(condition, taken)
            if outcome is ending or (outcome is None and not ending) or self._round(body):
                return
            if outcome is None:
                return

    def _round(self, body: "Node") -> bool:
        """Walk over a round of a loop; return True if it ends the loop."""
        try:
            self._statement(body)
        except _LoopError as end:
            if end.levels > 1:
                raise _LoopError(ends=end.ends, levels=end.levels - 1) from None
            return end.ends
        return False

    def _redirected(self, node: "Node") -> None:
        """Walk over a command, and keep the text of a file that it writes."""
        body = node.child_by_field_name("body")
        target, document = None, None
        here: Word | None = None
        for redirect in node.children_by_field_name("redirect"):
            if redirect.type == "heredoc_redirect":
                here = self._heredoc(redirect)
                document = None if here is None else here.text
                inner = redirect.children_by_field_name("redirect")
            else:
                inner = [redirect]
            for each in inner:
                place = each.child_by_field_name("destination")
                if place is not None and source_of(each).lstrip("&12").startswith((">", ">|")):
                    target = self.expander.one(source_of(place), place.start_point[0] + 1).text
        if body is not None:
            caller = source_of(body).split()[:1]
            if document is not None and caller in (["sbatch"], ["bash"], ["sh"]) and target is None:
                _Reader(self.script, self.path, self.variables.copy(), self.depth + 1).run(document)
                return
            document = self._output(body) if document is None else document
            self.input = here if body.type == "command" else None
            self._statement(body)
            self.input = None
        if target is not None and document is not None:
            self.variables.files[Path(target).name] = document

    def _heredoc(self, redirect: "Node") -> Word | None:
        parts = {child.type: child for child in redirect.children}
        start, body = parts.get("heredoc_start"), parts.get("heredoc_body")
        if start is None or body is None:
            return None
        text = source_of(body)
        if "'" in source_of(start) or '"' in source_of(start):
            return self.expander.plain_document(text, body.start_point[0] + 1)
        return self.expander.document(text, body.start_point[0] + 1)

    def _output(self, body: "Node") -> str | None:
        """Return the output of `sed s/…/…/` on a template, and of `echo`; None for others."""
        commands = body.named_children if body.type == "pipeline" else [body]
        text: str | None = None
        for command in commands:
            words = self._words(command)
            names = [word.text for word in words]
            if names[:1] == ["echo"]:
                text = " ".join(name for name in names[1:] if name not in ("-e", "-n"))
            elif names[:1] == ["cat"] and len(names) == 2:
                text = self._file(names[1])
            elif names[:1] == ["sed"]:
                edits = [name for name in names[1:] if re.match(r"s(\W).*\1.*\1g?$", name)]
                files = [name for name in names[1:] if name not in edits and name[:1] != "-"]
                text = self._file(files[0]) if files else text
                for edit in edits:
                    old, new = edit.rstrip("g")[2:-1].split(edit[1], 1)
                    text = None if text is None else _replaced(text, old, new, edit.endswith("g"))
            else:
                return None
        return text

    def _file(self, name: str) -> str | None:
        """Return the text of a file that the script wrote or that lies next to it."""
        written = self.variables.files.get(Path(name).name)
        if written is not None:
            return written
        path = self._nearby(name)
        return None if path is None else _text_of(path)

    def _nearby(self, name: str) -> Path | None:
        """Return a file by a path relative to the script's directory, or by its name there."""
        clean = re.sub(r"\$\{?\w+\}?|\$\(.*?\)|`.*?`", "", name).lstrip("/")
        for candidate in (Path(name), self.path.parent / clean, self.path.parent / Path(name).name):
            with contextlib.suppress(OSError, ValueError):
                if is_file(candidate):
                    return candidate
        return None

    def _words(self, node: "Node") -> list[Word]:
        name = node.child_by_field_name("name")
        is_plain = name is not None and source_of(name) in _NO_LAUNCH
        return [
            word
            for child in node.named_children
            if child.type
            not in ("variable_assignment", "file_redirect", "herestring_redirect", "comment")
            for word in (
                self.expander.words(source_of(child), child.start_point[0] + 1)
                if is_plain
                else self._expanded(child)
            )
        ]

    def _read(self, node: "Node", prefixes: "list[Node]") -> None:
        """Set the variables of `read A B <<< TEXT`, `read -a ARRAY <<< TEXT` and of here-documents.

        Of a here-document `read -d '' A` takes the whole, and others take the first line.
        """
        text = self.input
        for child in node.named_children:
            if child.type == "herestring_redirect":
                text = self.expander.one(source_of(child)[3:].strip(), child.start_point[0] + 1)
        words = [word.text for word in self._words(node)][1:]
        whole = any(re.fullmatch(r"-r?d", word) and not end for word, end in pairwise(words))
        if whole:
            words = [word for word in words if word not in ("", "-d", "-rd")]
        names = [word for word in words if not word.startswith("-")]
        if text is None or not names:
            return
        is_array = any(word.startswith("-") and "a" in word for word in words)
        if whole and len(names) == 1 and not is_array:
            keeps = any(source_of(each) == "IFS=" for each in prefixes)
            self.variables.values[names[0]] = text if keeps else text.stripped()
            return
        if text is self.input and not whole:
            first_place = text.place
            first_line = takewhile(lambda part: part.place == first_place, text.parts)
            text = Word(tuple(first_line))
        if any(re.fullmatch(r"-[aers]+", word) is None for word in words if word[:1] == "-"):
            self._unread(node)
        signs = "".join(source_of(each)[4:] for each in prefixes if source_of(each)[:4] == "IFS=")
        signs = self.expander.one(signs, 0).text
        if signs.strip():
            if len(signs) > 1 or re.search(r"\s", text.text.strip()):
                self._unread(node)
            parts = [replace(part, text=part.text.replace(signs, " ")) for part in text.parts]
            text = Word(tuple(parts))
        fields = list(text.fields())
        if is_array:
            self.variables.values[names[0]] = [*fields]
            return
        space = Part(signs or " ", text.place)
        for number, name in enumerate(names):
            rest = fields[number:] if name is names[-1] else fields[number : number + 1]
            joined = [part for word in rest for part in (space, *word.parts)][1:]
            empty = Part("", text.place)
            self.variables.values[name] = Word(tuple(joined) or (empty,))

    def _command(self, node: "Node") -> None:
        self._names(node)
        name = node.child_by_field_name("name")
        prefixes = [child for child in node.named_children if child.type == "variable_assignment"]
        for prefix in [*prefixes]:
            # tree-sitter joins a line of several assignments to the command on the next line
            between = "" if name is None else self._between(node, prefix, name)
            if re.search(r"(?<!\\)\n", between):
                self._assign(prefix)
                prefixes.remove(prefix)
        words = self._words(node)
        if name is not None and source_of(name) == "read":
            self._read(node, prefixes)
            return
        if name is not None and source_of(name) in ("mapfile", "readarray"):
            self._unread(node)
        before = dict(self.variables.values)
        for prefix in prefixes:
            self._assign(prefix)
        changed = {key for key, value in self.variables.values.items() if before.get(key) != value}
        self._call(words)
        for key in changed:
            self._restore(key, before.get(key))

    def _restore(self, name: str, value: Value | None) -> None:
        """Set a variable to an earlier value; without one it is unset."""
        if value is None:
            self.variables.values.pop(name, None)
        else:
            self.variables.values[name] = value

    @staticmethod
    def _between(node: "Node", left: "Node", right: "Node") -> str:
        """Return the text between two nodes within a third."""
        text = node.text or b""
        start = left.end_byte - node.start_byte
        return text[start : right.start_byte - node.start_byte].decode("utf-8", errors="replace")

    def _call(self, words: list[Word]) -> None:
        """Follow a command: another script, a function, or the start of a Python program."""
        environment = list[Word]()
        while words and (words[0].text in _PREFIXES or _ASSIGNMENT.match(words[0].text)):
            environment.append(words[0])
            words = words[1:]
        if not words:
            return
        name = words[0].text
        if name.startswith("--"):
            self.script.remarks.append(
                f"{words[0].place}: {' '.join(word.text for word in words)} belongs to no command: "
                "end the line before it with \\, without a space or a comment after it"
            )
        if name == "exit":
            raise _ExitError
        if name in ("source", ".") and len(words) > 1:
            self._source_file(words[1].text)
        elif name == "let":
            self._arithmetic(" ".join(word.text for word in words[1:]))
        elif name == "shift":
            self._shift(self.expander.number(words[1].text) if len(words) > 1 else 1)
        elif name == "set":
            self._set(words[1:], words[0].place.line)
        elif name == "return":
            raise _ReturnError
        elif name in ("break", "continue"):
            levels = self.expander.number(words[1].text) if len(words) > 1 else 1
            raise _LoopError(ends=name == "break", levels=levels or 1)
        elif name == "eval":
            self._line(words[1:])
        elif name in self.functions and self.depth < _MOST_DEPTH:
            self._function(name, words[1:])
        elif not self._shell(words, environment):
            launch = _launch(words)
            if launch is not None:
                self.script.launches.append(launch)

    def _shift(self, count: int | None) -> None:
        """Drop the first arguments: the others get smaller numbers."""
        values = self.variables.values
        arguments = values.get("@")
        if not isinstance(arguments, list) or count is None or count < 0:
            return
        self._number(arguments[count:])

    def _set(self, words: list[Word], line: int) -> None:
        """Replace the arguments; after options there may be a command of the next line."""
        while words and words[0].text[:1] in ("-", "+") and words[0].text not in ("-", "--"):
            words = words[2 if "o" in words[0].text else 1 :]
        if words and words[0].place.line > line:
            self._call(words)
        elif words and words[0].text == "--":
            self._number(words[1:])
        elif words:
            self._number(words[1:] if words[0].text == "-" else words)

    def _number(self, arguments: list[Word]) -> None:
        """Set the arguments of the script."""
        values = self.variables.values
        values["@"] = arguments
        for number in range(1, _NUMBERED + 1):
            values.pop(str(number), None)
        values |= {str(n + 1): word for n, word in enumerate(arguments[:_NUMBERED])}

    def _shell(self, words: list[Word], environment: list[Word]) -> bool:
        """Follow `bash FILE`, `sbatch FILE` and `sh -c TEXT`; return True if it was one.

        Args:
            words: words of the command.
            environment: words of `env` before the command, such as `A=1`.
        """
        for position, word in enumerate(words[:-1]):
            if word.text.rpartition("/")[2] not in _SHELLS:
                continue
            for number, option in enumerate(words[position + 1 :], position + 1):
                if not option.text.startswith("-"):
                    break
                if re.fullmatch(r"-\w*c", option.text):
                    self._line(words[number + 1 :])
                    return True
        scripts = [w for w in words if w.text.endswith((".sh", ".slurm", ".sbatch"))]
        caller = words[0].text.rpartition("/")[2]
        if scripts and (caller in (*_SHELLS, "sbatch", "srun") or words[0] is scripts[0]):
            arguments = words[words.index(scripts[0]) + 1 :]
            path = self._nearby(scripts[0].text)
            if path is not None and self.depth < 8 and path.resolve() != self.path.resolve():
                child = self.variables.copy()
                for word in (*environment, *words[: words.index(scripts[0])]):
                    for pair in word.text.removeprefix("--export=").split(","):
                        if _ASSIGNMENT.match(pair):
                            name, _, value = pair.partition("=")
                            child.values[name] = Word((Part(value, word.place, word.unknown),))
                child.values["@"] = list(arguments)
                child.values |= {str(n + 1): word for n, word in enumerate(arguments)}
                _Reader(self.script, path, child, self.depth + 1).run(_text_of(path))
            return True
        return False

    def _line(self, words: list[Word]) -> None:
        """Follow the commands in the text of `eval` or `sh -c`, divided at `;`, `&&` and `||`."""
        command: list[Word] = []
        is_target = False
        text = [part for each in words for part in (*each.parts, Part(" ", each.place))]
        for word in self.expander.again(Word(tuple(text))):
            redirects = re.fullmatch(r"[12&]?>{1,2}(.*)", word.text)
            if word.text in (";", "&&", "||", "|", "&"):
                self._call(command)
                command = []
            elif redirects is None and not is_target:
                command.append(word)
            is_target = redirects is not None and not redirects[1]
        self._call(command)

    def _function(self, name: str, arguments: list[Word]) -> None:
        values = self.variables.values
        saved = {key: values.get(key) for key in ("@", *map(str, range(1, _NUMBERED + 1)))}
        self._number(arguments)
        self.depth += 1
        self.local.append({})
        integers = set(self.integers)
        with contextlib.suppress(_ReturnError):
            self._statement(self.functions[name])
        self.depth -= 1
        self.integers = integers
        for key, value in (saved | self.local.pop()).items():
            self._restore(key, value)

    def _source_file(self, name: str) -> None:
        path = self._nearby(name)
        if path is None or self.depth >= _MOST_DEPTH:
            self.script.remarks.append(
                f"{self.path.name}: {name} is sourced and was not found: give its values with --set"
            )
            return
        reader = _Reader(self.script, path, self.variables, self.depth + 1)
        reader.functions = self.functions
        reader.run(_text_of(path))

    def _names(self, node: "Node") -> None:
        name = node.child_by_field_name("name") if node.type == "command" else None
        if name is not None:
            words = [source_of(child) for child in node.named_children]
            self.script.commands.append(show_placeholders(" ".join(words))[:300])

    def _names_of_all(self, nodes: "list[Node]") -> None:
        for node in nodes:
            self._names(node)
            self._names_of_all(node.named_children)


def _branches(node: "Node") -> "list[tuple[list[Node], list[Node]]]":
    """Return the branches of an if: conditions and body; else has no conditions."""
    branches: list[tuple[list[Node], list[Node]]] = [([], [])]
    in_body = False
    for child in node.children:
        if child.type == "then":
            in_body = True
        elif child.type in ("elif_clause", "else_clause"):
            branches += _branches(child)
        elif child.is_named:
            branches[0][1 if in_body or node.type == "else_clause" else 0].append(child)
    return branches


def _changes(node: "Node") -> bool:
    """Return True if a statement assigns variables or starts a Python program."""
    if node.type in ("variable_assignment", "declaration_command"):
        return True
    if node.type == "command" and ".py" in source_of(node):
        return True
    return any(_changes(child) for child in node.named_children)


def _declared(node: "Node") -> list[str]:
    """Return the names in a command such as `local A=1 B`."""
    names = [child.child_by_field_name("name") or child for child in node.named_children]
    return [source_of(name) for name in names if name.type == "variable_name"]


def _is_test(node: "Node") -> bool:
    """Return True if a side of `&&` is a test, and no program that is expected to succeed."""
    if node.type in ("list", "negated_command"):
        return _is_test(node.named_children[0])
    return node.type == "test_command" or source_of(node).startswith("test ")


def _replaced(text: str, old: str, new: str, everywhere: bool) -> str:
    """Return a text with `old` replaced in each line, as sed does it for plain patterns."""
    if everywhere:
        return text.replace(old, new)
    return "\n".join(line.replace(old, new, 1) for line in text.split("\n"))


def _launch(words: list[Word]) -> Launch | None:
    """Return the start of a Python program in a command; None if there is none."""
    texts = [word.text for word in words]
    if texts[:1] and texts[0] in _NO_LAUNCH:
        return None
    for position, text in enumerate(texts):
        if text.endswith(".py") and not text.startswith("-"):
            return Launch(
                text, words[position].place, tuple(words[:position]), tuple(words[position + 1 :])
            )
        if text == "-m" and position + 1 < len(texts) and texts[position + 1] not in _MODULES:
            return Launch(
                texts[position + 1],
                words[position].place,
                tuple(words[:position]),
                tuple(words[position + 2 :]),
            )
    return None
