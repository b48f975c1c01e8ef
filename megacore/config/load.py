"""Loading of configurations: YAML and dotted overrides become a RunConfig or FinetuneConfig.

A file may extend others with `extends: NAME`: its values are merged over theirs.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from megacore.artifact.files import MAX_DEPTH, nests_too_deep, read_json, reason_of
from megacore.artifact.workspace import workspace_root
from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_files import ACCELERATE, DEEPSPEED, FILES, read_files
from megacore.config.run import RunConfig
from megacore.config.train import KernelsConfig
from megacore.config.validate import DISCRIMINATORS, Location, sections_at, validated
from megacore.errors import ConfigError, dotted
from megacore.foreign.files import (
    first_file,
    nearest,
    parse_yaml,
    read_settings_json,
    read_yaml,
    shortened,
)
from megacore.paths import glob

CONF_DIR = Path("conf")
FINETUNE_DIR = Path("conf/finetune")
_KERNELS = ("train", "kernels")
_LAUNCH = ("launch",)
WORKSPACE = "${workspace}"
"""Placeholder in files and overrides for the path of the workspace."""
_WITHOUT_PATHS = {"export", "task"}
"""Sections whose texts are no paths, such as the prompt of a sample and the prefix of a source."""
_UNUSABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""Characters that no path has, or UTF-8 cannot encode; an escape of YAML or JSON can name them.

U+DC80 to U+DCFF stand for the bytes of a path that is not UTF-8."""
_EXTENDS = "extends"
"""Key of a file for the configurations that it extends."""
_LONGEST_CHAIN = 32
"""Most files that extend one another."""


class _Kind(NamedTuple):
    """Kind of configuration."""

    schema: type[BaseModel]
    flow: str
    """Name of the flow that uses it."""
    example: str
    sign: str
    """Dotted name that only this kind of configuration has."""


_PRETRAINING = _Kind(RunConfig, "pretrain", "conf/gpt2-tiny.yaml", "model.num_layers")
_FINE_TUNING = _Kind(FinetuneConfig, "finetune", "conf/finetune/mrpc.yaml", "task")


class _File(NamedTuple):
    """YAML file and the values that it contains itself."""

    path: Path
    values: dict[str, Any]


class _Merged(NamedTuple):
    """Values of a configuration and the files they come from."""

    values: dict[str, Any]
    files: tuple[_File, ...]
    """Files in the order in which they were last merged: the named file is the last one."""
    overrides: tuple[str, ...] = ()
    """Dotted keys that were overridden."""
    levels: int = 1
    """Number of files in the longest chain from the named file to one that extends none."""

    @property
    def path(self) -> Path:
        """File that the user named."""
        return self.files[-1].path

    @property
    def origin(self) -> str:
        """Name of the values in messages."""
        bases = dict.fromkeys(str(file.path) for file in reversed(self.files[:-1]))
        return f"{self.path} (extends {', '.join(bases)})" if bases else str(self.path)

    def is_overridden(self, key: str) -> bool:
        """Return True if an override gives the value `key`, or a section that contains it."""
        key = key.partition("[")[0]
        return any(f"{key}.".startswith(f"{override}.") for override in self.overrides)

    def place_of(self, key: str) -> str:
        """Return what a message says on the origin of the value `key`, if not the named file."""
        if self.is_overridden(key):
            return " (in an override)"
        file = self.file_of(key)
        return "" if file == self.path else f" (in {file})"

    def file_of(self, key: str) -> Path:
        """Return the file that gives the value `key`; the named file if an override or none does.

        A relative path in a configuration is relative to the directory of that file.
        """
        if self.is_overridden(key):
            return self.path
        key = key.partition("[")[0]
        if not _has(self.values, key):
            return self.path
        return next(
            (file.path for file in reversed(self.files) if _has(file.values, key)), self.path
        )


def load_config(
    conf: str, overrides: Mapping[str, Any] | None = None, *, conf_dir: Path = CONF_DIR
) -> RunConfig:
    """Read a YAML file, apply dotted overrides and validate the result.

    An override is, for example, `{"train.train_iters": 50}`. Raises ConfigError with one clause per
    wrong value: its key, the value, what to do, and the extended file or the override that the
    value comes from.
    """
    merged = _read_values(conf, overrides, conf_dir, _PRETRAINING)
    _read_deepspeed_json(merged, conf_dir)
    return validated(RunConfig, merged.values, merged.origin, place_of=merged.place_of)


def load_finetune_config(
    conf: str, overrides: Mapping[str, Any] | None = None, *, conf_dir: Path = FINETUNE_DIR
) -> FinetuneConfig:
    """Read a YAML file of the flow finetune, as `load_config` does for the flow pretrain.

    The files named by `launch.accelerate_config` and `launch.deepspeed_config` are read too. The
    configuration contains their content, so that other processes need not read them.
    """
    merged = _read_values(conf, overrides, conf_dir, _FINE_TUNING)
    clone = conf_dir.absolute().parent.parent
    roots = {key: (Path(), merged.file_of(key).parent, clone) for key in (ACCELERATE, DEEPSPEED)}
    context = {FILES: read_files(merged.values, roots)}
    return validated(
        FinetuneConfig, merged.values, merged.origin, context=context, place_of=merged.place_of
    )


def name_of(path: Path) -> str:
    """Return the name of a run after a file: its stem in lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", path.stem.lower()).strip("-.") or "model"


def read_config(path: Path) -> RunConfig:
    """Read and validate a configuration that was saved as JSON. Raises ConfigError."""
    try:
        return parse_config(read_json(path), origin=str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a configuration: {reason_of(error)}"
        ) from error


def parse_config(values: Mapping[str, Any], *, origin: str) -> RunConfig:
    """Validate plain values; `origin` names them in messages. Raises ConfigError."""
    return validated(RunConfig, values, origin)


def parse_finetune_config(values: Mapping[str, Any], *, origin: str) -> FinetuneConfig:
    """Validate plain values of a fine-tuning; `origin` names them in messages.

    Raises ConfigError.
    """
    return validated(FinetuneConfig, values, origin)


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Return overrides such as `["train.train_iters=50"]` as a mapping; values are parsed as YAML.

    Raises ConfigError.
    """
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        key = key.strip()
        if not sign or not key:
            raise ConfigError(f"override {pair!r} is not key=value, as in train.train_iters=50")
        overrides[key] = parse_yaml(text, f"override {pair[:100]!r}: its value")
    return overrides


def conf_path(conf: str, conf_dir: Path = CONF_DIR, *, kind: _Kind = _PRETRAINING) -> Path:
    """Return the file that `conf` names: a path, or the stem of a file in `conf_dir`.

    Raises ConfigError with the most similar name if there is no such file.
    """
    path = first_file((Path(conf), conf_dir / f"{conf}.yaml"))
    if path is not None:
        return path
    other = _other(kind)
    other_path = (
        conf_dir.parent if kind is _FINE_TUNING else conf_dir / FINETUNE_DIR.name
    ) / f"{conf}.yaml"
    if first_file((other_path,)) is not None and other_path.parent != conf_dir:
        hint = f"; {other_path} is one of the flow {other.flow}"
    else:
        hint = nearest(conf, sorted(path.stem for path in glob(conf_dir, "*.yaml")))
    raise ConfigError(
        f"no configuration named {shortened(repr(conf))}: neither that file nor "
        f"{shortened(str(conf_dir / conf))}.yaml exists{hint}"
    )


def _read_values(
    conf: str, overrides: Mapping[str, Any] | None, conf_dir: Path, kind: _Kind
) -> _Merged:
    """Return the values of the configuration file with the overrides applied, and their files."""
    if not isinstance(conf, str) or not isinstance(overrides or {}, Mapping):
        raise ConfigError(
            f"conf is {conf!r} and overrides are {overrides!r}: give a name or path, and a mapping "
            "of dotted keys"
        )
    overrides = overrides or {}
    if _EXTENDS in overrides:
        raise ConfigError(
            f"override extends={overrides[_EXTENDS]}: only a file extends others; write "
            f"`extends: {overrides[_EXTENDS]}` in one"
        )
    deep = next((key for key in overrides if key.count(".") >= MAX_DEPTH), None)
    if deep is not None or nests_too_deep(dict(overrides)):
        raise ConfigError(
            f"override {shortened(deep or str(overrides))!r} nests more than {MAX_DEPTH} levels "
            "deep: give a key of docs/reference.md"
        )
    _refuse_replaced(tuple(overrides))
    merged = _read_extended(conf_path(conf, conf_dir, kind=kind), (), conf_dir, kind, {})
    if isinstance(launch := merged.values.get("launch"), dict):
        _drop_inherited_ranks(launch, {"hostfile": overrides.get("launch.hostfile")})
    for key, value in overrides.items():
        _set_dotted(merged.values, key, value)
    merged = merged._replace(overrides=tuple(overrides))
    for key, character in _unusable(merged.values):
        raise ConfigError(
            f"{merged.origin}: {key} has the character {character!r}, which no path or text of a "
            f"file can have: remove it{merged.place_of(key)}"
        )
    merged = merged._replace(values=_map_texts(merged.values, _with_workspace))
    for name in merged.values.keys() - _WITHOUT_PATHS:
        merged.values[name] = _map_texts(merged.values[name], _with_home)
    merged.values.setdefault("name", name_of(merged.path))
    return merged


def _refuse_replaced(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override that a later one of its whole section would undo."""
    for number, key in enumerate(overrides):
        whole = next((each for each in overrides[number:] if key.startswith(f"{each}.")), None)
        if whole is not None:
            raise ConfigError(
                f"override {whole} replaces the whole section, with {key}, which is given before "
                f"it: give {whole} first"
            )


def _unusable(value: Any, location: Location = ()) -> Iterator[tuple[str, str]]:
    """Yield the key of each text with a character that files cannot hold, and the character."""
    if isinstance(value, str) and (match := _UNUSABLE.search(value)):
        yield dotted(location), match[0]
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    for name, item in items:
        yield from _unusable(item, (*location, name))


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of a file with each of its texts changed."""
    if isinstance(value, dict):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _with_workspace(text: str) -> str:
    """Return a text of a file with the workspace's path for `WORKSPACE`."""
    return text.replace(WORKSPACE, str(workspace_root()))


def _with_home(text: str) -> str:
    """Return a text of a file with the home directory's path for `~` in front of a slash."""
    return os.path.expanduser(text) if text.startswith("~/") else text


def _read_extended(
    path: Path,
    above: tuple[Path, ...],
    conf_dir: Path,
    kind: _Kind,
    known: dict[Path, _Merged],
) -> _Merged:
    """Read a file and the files that it extends, and merge its values over theirs.

    Args:
        path: path of the file.
        above: chain of extending files. If it is not empty, this file's `name` is ignored.
        conf_dir: directory of named configurations.
        kind: kind of configuration.
        known: files that were read, to which this one is added: each is read once.
    """
    chain = (*above, path)
    if path.resolve() in (other.resolve() for other in above):
        raise ConfigError(
            f"{chain[0]} extends itself: {' extends '.join(map(str, chain))}: remove one `extends`"
        )
    again = known.get(path)
    if len(above) + (1 if again is None else again.levels) > _LONGEST_CHAIN:
        raise ConfigError(
            f"{chain[0]} extends {chain[1]}, and so on through more than {_LONGEST_CHAIN} files: "
            "extend fewer"
        )
    if again is not None:
        return again
    values = _read_file(path, kind)
    if above:
        values.pop("name", None)
    bases = values.pop(_EXTENDS, ())
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{path}: extends is {bases!r}: give the name or path of a configuration, or a list "
            "of them"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: extends names {twice!r} more than once: name it once")
    merged: dict[str, Any] = {}
    files: dict[Path, _File] = {}
    levels = 1
    for name in names:
        base_path = _base_path(name, path, conf_dir, kind)
        base = _read_extended(base_path, chain, conf_dir, kind, known)
        merged = _merge(merged, base.values, kind.schema)
        for file in base.files:  # a file that several bases extend has the place of the last one
            files.pop(file.path, None)
            files[file.path] = file
        levels = max(levels, 1 + base.levels)
    known[path] = _Merged(
        _merge(merged, values, kind.schema),
        (*files.values(), _File(path, values)),
        levels=levels,
    )
    return known[path]


def _read_file(path: Path, kind: _Kind) -> dict[str, Any]:
    """Return the content of one file. Raises ConfigError if it belongs to the other flow."""
    values = read_yaml(path)
    if values is None:
        raise ConfigError(f"{path} is empty: give it sections, as {kind.example} has")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds {type(values).__name__}, not a mapping of sections: see {kind.example}"
        )
    other = _other(kind)
    if _has(values, other.sign) and not _has(values, kind.sign):
        raise ConfigError(
            f"{path} has {other.sign}, a value of the flow {other.flow}, not of {kind.flow}: start "
            "that"
        )
    return values


def _base_path(name: str, extending: Path, conf_dir: Path, kind: _Kind) -> Path:
    """Return the file that `extends: name` refers to.

    The directory of the extending file comes first, then the directories of `conf_path`.
    """
    for candidate in (extending.parent / name, extending.parent / f"{name}.yaml"):
        if first_file((candidate,)) is not None and not candidate.samefile(extending):
            return candidate
    try:
        return conf_path(name, conf_dir, kind=kind)
    except ConfigError as error:
        raise ConfigError(f"{extending} extends {shortened(repr(name))}: {error}") from error


def _merge(
    base: Mapping[str, Any],
    values: Mapping[str, Any],
    schema: type[BaseModel],
    location: Location = (),
) -> dict[str, Any]:
    """Return the mapping `base` with `values` merged over it: only mappings merge.

    If kinds have different fields, a mapping with `kind` replaces the one in `base` instead of
    merging. A hostfile replaces the number of ranks per host, too.
    """
    merged = dict(base)
    if location == _LAUNCH:
        _drop_inherited_ranks(merged, values)
    for key, value in values.items():
        if isinstance(value, dict):
            old, place = merged.get(key), (*location, key)
            old = KernelsConfig.expanded(old) if place == _KERNELS else old
            old = old if isinstance(old, dict) else {}
            is_whole = any(name in value for name in DISCRIMINATORS)
            if is_whole and len(sections_at(place, schema)) > 1:
                old = {}
            value = _merge(old, value, schema, place)
        merged[key] = value
    return merged


def _drop_inherited_ranks(launch: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Remove `nproc_per_node` from the section `launch` if `values` over it give a hostfile.

    The slots of the hostfile are the ranks of its hosts; the number was chosen for other hosts.
    """
    if values.get("hostfile") is not None:
        launch.pop("nproc_per_node", None)


def _other(kind: _Kind) -> _Kind:
    return _PRETRAINING if kind is _FINE_TUNING else _FINE_TUNING


def _has(values: Any, key: str) -> bool:
    """Return True if the dotted key exists, or a list on its path could contain it."""
    for part in key.split("."):
        if isinstance(values, list):
            return True
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _read_deepspeed_json(merged: _Merged, conf_dir: Path) -> None:
    """Replace the path in `deepspeed.config` with the content of the file.

    Other processes then need not read the file. The path may be relative to the working directory,
    to the directory of the file that contains it, or to the parent of `conf_dir`.
    """
    values = merged.values
    section = values.get("deepspeed")
    if (
        values.get("engine") != "deepspeed"
        or not isinstance(section, dict)
        or not isinstance(section.get("config"), str)
    ):
        return
    json_name = section["config"]
    candidates = list(
        dict.fromkeys(
            Path(root, json_name)
            for root in ("", merged.file_of("deepspeed.config").parent, conf_dir.absolute().parent)
        )
    )
    json_path = first_file(candidates)
    if json_path is None:
        raise ConfigError(
            f"deepspeed.config is {shortened(repr(json_name))}: there is no file "
            f"{' or '.join(shortened(str(path)) for path in candidates)}"
        )
    values["deepspeed"] = {**section, "config": read_settings_json(json_path)}


def _set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `values[a][b][c] = value` for the key `a.b.c`, adding missing mappings.

    Text that applies to all operations of `train.kernels` becomes a mapping of them.
    """
    *parents, leaf = key.split(".")
    target = values
    for depth, parent in enumerate(parents):
        child = target.setdefault(parent, {})
        if tuple(parents[: depth + 1]) == _KERNELS:
            child = target[parent] = KernelsConfig.expanded(child)
        if not isinstance(child, dict):
            raise ConfigError(
                f"override {key!r}: {'.'.join(parents[: depth + 1])} holds {child!r}, not a section"
            )
        target = child
    target[leaf] = value
