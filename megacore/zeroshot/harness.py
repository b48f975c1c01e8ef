"""Scores of an exported model by lm-evaluation-harness (Gao et al., EleutherAI).

The package `lm_eval` computes them; the values are those of its own command line.
"""

import contextlib
import difflib
import errno
import glob
import hashlib
import importlib.util
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megacore.artifact.files import access_error, canonical_json, standard_json, workspace_errors
from megacore.artifact.manifest import file_digest
from megacore.config.train import LmEvalConfig
from megacore.errors import (
    ConfigError,
    DataFormatError,
    DownloadError,
    FileAccessError,
    MegacoreError,
    WorkspaceError,
    one_line,
)
from megacore.paths import exists, is_dir, is_file, rglob

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

PACKAGE = "lm_eval"
ITEMS_VERSION = 2
"""Version of the texts that `task_items` returns, increased whenever they change."""
_INSTALL = "pip install megacore[lm-eval]"


def check_tasks(config: LmEvalConfig, positions: int) -> None:
    """Check that lm_eval has the tasks of `evaluate.lm_eval`, and the model room for their answers.

    The data of the tasks are not looked for.

    Args:
        config: section with the tasks.
        positions: positions of the model.

    Raises:
        ConfigError: lm_eval is not installed, lacks a task, or would generate too many tokens.
        DataFormatError: the values of a task are not those that lm_eval expects.
    """
    if not config.tasks:
        return
    _check_installed()
    directory = config.include_path
    if directory is not None and not is_dir(directory):
        raise ConfigError(
            f"evaluate.lm_eval.include_path is {directory}, which is not a directory: give the "
            "directory with the tasks' YAML files, or remove it"
        )
    task_files(directory)
    index = _manager(config.tasks, directory).task_index
    for name in config.tasks:
        if name not in index:
            near = difflib.get_close_matches(name, index, 3)
            hint = f"; near are {', '.join(near)}" if near else ""
            raise ConfigError(
                f"evaluate.lm_eval.tasks names {name}, which lm_eval {harness_version()} and "
                f"evaluate.lm_eval.include_path do not have{hint}: `lm_eval ls tasks` lists them"
            )
        with _typed_errors([name], "read"):
            for task, tokens in _generated_tokens(index, {"task": name}, {}):
                if tokens >= positions:
                    raise ConfigError(
                        f"evaluate.lm_eval.tasks names {name}, and lm_eval generates {tokens} "
                        f"tokens for each question of {task}, but the model has {positions} "
                        "positions for question and answer: raise model.max_position_embeddings, "
                        "give a copy of the task in evaluate.lm_eval.include_path with "
                        f"generation_kwargs.max_gen_toks below {positions}, or remove {name}"
                    )


_OF_GENERATION = ("output_type", "generation_kwargs")
"""Values of a task that say whether it generates text, and how much."""


def _generated_tokens(
    index: Mapping[str, Any], member: Mapping[str, Any], changes: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """Yield the tasks that generate text, and the tokens of an answer.

    A task that is a Python class is left out, because its requests are known only when it runs.

    Args:
        index: lm_eval's entries of all tasks, groups and tags.
        member: a task, group or tag, with values of its own as in a group's list of tasks.
        changes: values of the groups around it, which replace those of a task.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    name = member.get("group") or member["task"]
    entry = index.get(name)
    values = dict(member) if entry is None else entry.cfg or {"task": sorted(entry.tags)}
    own = {**changes, **{key: member[key] for key in _OF_GENERATION if key in member}}
    merged = {key: values[key] for key in _OF_GENERATION if key in values} | own
    if isinstance(values["task"], list):
        for each in values["task"]:
            task = each if isinstance(each, dict) else {"task": each}
            yield from _generated_tokens(index, task, merged)
    elif "class" not in values and merged.get("output_type", "generate_until") == "generate_until":
        yield name, normalize_gen_kwargs(merged.get("generation_kwargs") or {})["max_gen_toks"]


def _check_installed() -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"evaluate.lm_eval.tasks needs lm_eval, which is not installed: {_INSTALL}, or remove "
            "the tasks"
        )


def _manager(
    tasks: Sequence[str], directory: str | None, arguments: dict[str, Any] | None = None
) -> "TaskManager":
    """Return lm_eval's index of tasks, without its own ones if those of a directory suffice.

    To read its own takes some seconds. They are needed for a group, which may contain them.
    """
    from lm_eval.tasks import TaskManager

    if directory is not None:
        local = TaskManager(include_path=directory, include_defaults=False, metadata=arguments)
        if all(name in local.all_subtasks for name in tasks):
            return local
    return TaskManager(include_path=directory, metadata=arguments)


def harness_version() -> str:
    """Return the version of lm_eval, which determines its tasks. Raises ConfigError without it."""
    _check_installed()
    return version(PACKAGE)


def task_files(directory: str | None) -> dict[str, str] | None:
    """Return the digests of additional tasks by path: their files, and the data that they name.

    The files are those of `directory`, with paths relative to it, and those that a task includes
    from elsewhere. A directory of data has one digest. None stands for no directory.

    Raises:
        ConfigError: a file cannot be read, or a task is not YAML.
    """
    if directory is None:
        return None
    included: set[Path] = set()
    data: set[str] = set()  # many tasks may name the same
    try:
        files = sorted(path for path in rglob(directory, "*") if is_file(path))
        files = [path for path in files if "__pycache__" not in path.parts]
        for path in files:
            if path.suffix in (".yaml", ".yml"):
                includes: set[Path] = set()
                data.update(_local_data(_read_task(path, directory, includes)))
                included |= includes
        outside = {str(path) for path in included if not path.is_relative_to(_real(directory))}
        digests = {str(path.relative_to(directory)): file_digest(path) for path in files}
        digests |= {name: _digest(Path(name)) for name in sorted(outside | data)}
    except OSError as error:
        raise ConfigError(
            f"evaluate.lm_eval.include_path is {directory}, and {error.filename} cannot be read: "
            f"{error.strerror}: correct the path, or remove it"
        ) from error
    return digests


class _TaskLoader(yaml.SafeLoader):
    """Loader of YAML that ignores the tags of lm_eval, such as !function."""


_TaskLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _real(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()


def _read_task(path: Path, directory: str, included: set[Path]) -> dict[str, Any]:
    """Return the values of a task or group with those of the files that it includes.

    As in lm_eval, an included file may have any name, and later values replace earlier ones.

    Args:
        path: file of the task.
        directory: `evaluate.lm_eval.include_path`.
        included: receives the included files, and modules that they name as `!function`.

    Raises:
        ConfigError: a file is not YAML, or an included one does not exist. lm_eval would leave the
            task out without a word.
    """
    content = path.read_bytes()
    try:
        task = yaml.load(content, _TaskLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"evaluate.lm_eval.include_path has {path}, which is not YAML "
            f"({one_line(error)}): correct or remove it"
        ) from error
    if not isinstance(task, dict):
        return {}
    if path in included:
        modules = {_real(path.parent / f"{name}.py") for name in _modules(content)}
        included |= {module for module in modules if is_file(module)}
    names = task.pop("include", None) or []
    values: dict[str, Any] = {}
    for name in names if isinstance(names, list) else [names]:
        base = _real(path.parent / str(name))
        if not is_file(base):
            raise ConfigError(
                f"evaluate.lm_eval.include_path is {directory}, and {path} includes {name}, but "
                f"there is no file {base}: correct or remove it"
            )
        if base not in included:  # a file that includes itself ends here, and lm_eval refuses it
            included.add(base)
            values |= _read_task(base, directory, included)
    return values | task


def _modules(content: bytes) -> list[str]:
    """Return the modules of a task's functions as paths without suffix."""
    names = re.findall(rb"!function\s+['\"]?([\w.]+)\.\w", content)
    return [name.decode().replace(".", "/") for name in names]


_FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""Values of `dataset_path` that name a format, even where a directory has this name."""


def _local_data(task: dict[str, Any]) -> Iterator[str]:
    """Yield the local files and directories from which datasets reads the data of a task or group.

    They are `dataset_path`, and `data_files` or `data_dir` of `dataset_kwargs`.
    """
    members = task.get("task")
    for member in members if isinstance(members, list) else []:
        if isinstance(member, dict):  # a group's task with values of its own
            yield from _local_data({**task, "task": None, **member})
    values = task.get("dataset_kwargs")
    arguments: dict[str, Any] = values if isinstance(values, dict) else {}
    path, folder = task.get("dataset_path"), arguments.get("data_dir")
    base = ""
    if isinstance(path, str) and path not in _FORMATS and exists(path):
        yield path
        base = path
    elif isinstance(path, str) and "/" in path:
        folder = None  # a directory of the data set on the hub
    if isinstance(folder, str):
        base = str(Path(base, Path(folder).expanduser()))
    patterns = list(_texts(arguments.get("data_files")))
    for pattern in patterns:
        place = os.path.join(glob.escape(base), pattern)
        yield from glob.glob(place, recursive=True)
    if isinstance(folder, str) and not patterns and is_dir(base):
        yield base


def _texts(value: Any) -> Iterator[str]:
    """Yield the local paths and patterns in a value of `data_files`."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str) and "://" not in value:
        yield value


_MOST_BYTES = 4 << 30
"""Size above which a directory of data is compared by sizes and times, as to read it takes long."""


def _digest(path: Path) -> str:
    """Return the digest of a file's content, or one of a directory's files without hidden ones."""
    if not is_dir(path):
        return file_digest(path)
    states = {name: (path / name).stat() for name in sorted(_files_below(path))}
    if sum(state.st_size for state in states.values()) <= _MOST_BYTES:
        entries = [[name, file_digest(path / name)] for name in states]
    else:
        entries = [[name, f"{each.st_size} {each.st_mtime_ns}"] for name, each in states.items()]
    return hashlib.sha256(canonical_json(entries)).hexdigest()


def _files_below(directory: Path) -> Iterator[str]:
    """Yield the relative paths of a directory's files except hidden ones, which datasets skips."""

    def fail(error: OSError) -> None:
        raise error

    visited = set()  # a link may lead to a directory above it
    for folder, folders, names in os.walk(directory, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        # in order, so that of two links to one directory always the same is followed
        folders[:] = sorted({name for name in folders if name[0] != "."} - {"__pycache__"})
        paths = (Path(folder, name) for name in names if name[0] != ".")
        yield from (str(path.relative_to(directory)) for path in paths if is_file(path))


def score_model(
    model: Path,
    tasks: Sequence[str],
    *,
    include_path: str | None,
    num_fewshot: int | None,
    limit: int | None,
    batch_size: int,
    device: str,
) -> dict[str, Any]:
    """Score a transformers directory, and return lm_eval's results as JSON.

    Args:
        model: directory of the model and its tokenizer, read in the type of its weights.
        tasks: names of tasks, groups or tags.
        include_path: directory of additional tasks.
        num_fewshot: examples before each question; None means the number of each task.
        limit: largest number of questions of each task; None means all.
        batch_size: sequences of one forward pass.
        device: torch's name of the device.

    Returns:
        `results`, `versions`, `n-shot` and `n-samples` by task, as lm_eval returns them,
        `lm_eval`, its version, and `command`, which computes the same values.

    Raises:
        DownloadError: the data of a task were not found on this host nor on the hub.
        DataFormatError: lm_eval refused a task or its data.
        WorkspaceError: the cache of the data cannot be written.
        FileAccessError: the disk fails, or the mount is lost.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.utils import handle_non_serializable

    arguments = {"pretrained": str(model)}
    with _typed_errors(tasks):
        results = simple_evaluate(
            model="hf",
            model_args=arguments,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            batch_size=batch_size,
            device=device,
            task_manager=_manager(tasks, include_path, arguments),
            log_samples=False,
        )
    assert results is not None, "a single process has the results"
    kept = {name: results.get(name) for name in ("results", "versions", "n-shot", "n-samples")}
    words = ["lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model}"]
    words += ["--tasks", ",".join(tasks), "--batch_size", str(batch_size), "--device", device]
    options = {"include_path": include_path, "num_fewshot": num_fewshot, "limit": limit}
    for name, value in options.items():
        words += [] if value is None else [f"--{name}", str(value)]
    kept |= {"lm_eval": harness_version(), "command": shlex.join(words)}
    return standard_json(kept, handle_non_serializable)  # type: ignore[no-any-return]


def task_items(
    tasks: Sequence[str], include_path: str | None, limit: int | None
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return the texts of the scored questions by task, and the tasks of each group.

    A text is the question with its right answer, without examples. Raises ConfigError,
    DataFormatError, DownloadError.
    """
    _check_installed()
    with _typed_errors(tasks, "read"):
        loaded = _manager(tasks, include_path).load(list(tasks))
        items = {
            name: tuple(
                _item_text(task, row)
                for _, row in task.doc_iterator(rank=0, limit=limit, world_size=1)
            )
            for name, task in loaded["tasks"].items()
        }
    children = {name: tuple(members) for name, members in loaded["group_map"].items()}

    def leaves(name: str) -> tuple[str, ...]:
        if name not in children:
            return (name,)
        return tuple(leaf for child in children[name] for leaf in leaves(child))

    return items, {name: leaves(name) for name in children}


def _item_text(task: Any, row: Any) -> str:
    """Return a question and its right answer.

    Either may be the number of a choice, if the task has choices, or values of other types: of a
    list or mapping all values are joined, and None is an empty text.
    """
    choices = task.doc_to_choice(row) if task.config.doc_to_choice is not None else None

    def text_of(value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            return " ".join(filter(None, map(text_of, value)))
        if isinstance(value, int) and choices is not None:
            return str(choices[value]) if 0 <= value < len(choices) else ""
        return str(value)

    return f"{text_of(task.doc_to_text(row))} {text_of(task.doc_to_target(row))}".strip()


_REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a disk that cannot be written, which no file of a task can cause."""


@contextlib.contextmanager
def _typed_errors(tasks: Sequence[str], action: str = "score") -> Iterator[None]:
    """Raise what lm_eval and datasets raise in the body as one sentence.

    `action` is what the body does with the tasks.
    """
    try:
        yield
    except (MegacoreError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's
            raise
        if (fault := _disk_fault(error)) is not None:
            raise fault from error
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        kind, names = type(error).__name__, ", ".join(tasks)
        sentence = f"lm_eval could not {action} {names}: {kind}: {reason}"
        if isinstance(error, ConnectionError | TimeoutError):
            raise DownloadError(
                f"{sentence}: connect this host, or give local data in a task of "
                "evaluate.lm_eval.include_path"
            ) from error
        raise DataFormatError(
            f"{sentence}: correct the task or its data, or remove it from evaluate.lm_eval.tasks"
        ) from error


def _disk_fault(error: BaseException | None) -> MegacoreError | None:
    """Return the error of a disk that cannot hold or give the data of a task; None for others.

    datasets keeps the data in its cache, and raises an error of its own from the disk's.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    cache = _cache()
    if error.errno in _REFUSALS or Path(str(error.filename)).is_relative_to(cache):
        try:
            with workspace_errors(cache, "set HF_HOME to a directory on another disk"):
                raise error
        except (WorkspaceError, FileAccessError) as fault:
            return fault
        except OSError:
            return None
    return access_error(error, cache)


def _cache() -> Path:
    """Return the directory in which datasets keeps its data, or one above it."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    names = ("HF_DATASETS_CACHE", "HF_HOME")
    return Path(next(filter(None, map(os.environ.get, names)), default)).expanduser()


def metrics_of(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores by their names in MLflow: `lm_eval/TASK/METRIC`, or also with `/FILTER`.

    Standard errors, and values that are not finite, are left out.
    """
    metrics = {}
    for task, values in scores["results"].items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            if math.isfinite(value):
                suffix = "" if kind == "none" else f"/{kind}"
                metrics[f"lm_eval/{task}/{metric}{suffix}"] = float(value)
    return metrics
