"""Labels of a classification: which classes there are, and the number of each row's."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megacore.errors import DataFormatError
from megacore.finetune.glue import ClassificationSettings

if TYPE_CHECKING:
    from datasets import Dataset

_HIDDEN = -1
_SHOWN = 10
"""Classes that a message lists."""


def read_labels(
    splits: "Mapping[str, Dataset]", column: str, settings: ClassificationSettings
) -> tuple[tuple[str, ...] | None, dict[str, list[int] | list[float]]]:
    """The names of the classes in the order of their numbers (None where a number is predicted), and every label.

    Raises DataFormatError for labels that are missing, hidden, of another kind than the head, or of no class.
    """
    values = {name: _values(rows, name, column) for name, rows in splits.items()}
    if settings.regression:
        return None, {name: _numbers(found, name, column) for name, found in values.items()}
    names = _class_names(splits["train"], values["train"], column, settings)
    return names, {name: _classes(found, name, column, names) for name, found in values.items()}


def _values(rows: "Dataset", split: str, column: str) -> list[Any]:
    values = list(rows[column])
    for number, value in enumerate(values):
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise DataFormatError(
                f"row {number} of the {split} split has no value in task.label_column {column!r}: remove the row"
            )
    return values


def _numbers(values: Sequence[Any], split: str, column: str) -> list[float]:
    for number, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataFormatError(
                f"row {number} of the {split} split has {value!r} in task.label_column {column!r}, but the task "
                "predicts numbers: set task.regression to false for classes, or repair the row"
            )
    return [float(value) for value in values]


def _class_names(
    rows: "Dataset", values: Sequence[Any], column: str, settings: ClassificationSettings
) -> tuple[str, ...]:
    from datasets import ClassLabel

    feature, given = rows.features[column], settings.labels
    if isinstance(feature, ClassLabel):
        return _of_feature(tuple(feature.names), given, column)
    if isinstance(values[0], str):
        found = sorted(set(values))
        if given is None and len(found) < 2:
            raise DataFormatError(f"task.label_column {column!r} has only the class {found[0]!r} in training: give two")
        return given or tuple(found)
    _refuse_other_kinds(values, column)
    if given is not None:
        return given
    return _counted(sorted({int(value) for value in values}), column)


def _of_feature(names: tuple[str, ...], given: tuple[str, ...] | None, column: str) -> tuple[str, ...]:
    """The data's own names, or those that the configuration gives instead."""
    if given is None:
        return names
    if len(given) != len(names) or (given != names and set(given) & set(names)):
        raise DataFormatError(
            f"the classes are {_listed(given)} by the configuration, but the data's column {column!r} has "
            f"{_listed(names)}: give the data's names in task.labels, in their order"
        )
    return given


def _refuse_other_kinds(values: Sequence[Any], column: str) -> None:
    for number, value in enumerate(values):
        if isinstance(value, float):
            raise DataFormatError(
                f"row {number} of the train split has {value!r} in task.label_column {column!r}, a number with "
                "decimals, where classes are counted from 0: set task.regression to true, or write whole numbers"
            )
        if not isinstance(value, int):
            raise DataFormatError(
                f"row {number} of the train split has a {type(value).__name__} in task.label_column {column!r}: a "
                "class is a number from 0, or a name"
            )


def _counted(found: list[int], column: str) -> tuple[str, ...]:
    """The classes 0, 1, … of which training has one or more rows each."""
    if found[0] == _HIDDEN:
        raise DataFormatError(_hidden("train", column))
    expected = list(range(len(found)))
    if found != expected:
        raise DataFormatError(
            f"task.label_column {column!r} has the classes {', '.join(map(str, found[:_SHOWN]))} in training, which "
            f"are not counted from 0 without a gap: number them 0 to {len(found) - 1}, or name all classes in "
            "task.labels"
        )
    if len(found) < 2:
        raise DataFormatError(f"task.label_column {column!r} has only the class 0 in training: give two")
    return tuple(map(str, expected))


def _classes(values: Sequence[Any], split: str, column: str, names: tuple[str, ...]) -> list[int]:
    by_name = {name: number for number, name in enumerate(names)}
    found = []
    for number, value in enumerate(values):
        place = by_name.get(value) if isinstance(value, str) else value
        if isinstance(place, int) and 0 <= place < len(names):
            found.append(int(place))
            continue
        if value == _HIDDEN:
            raise DataFormatError(_hidden(split, column))
        close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5) if isinstance(value, str) else []
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise DataFormatError(
            f"row {number} of the {split} split has {value!r} in task.label_column {column!r}, but the head has the "
            f"{len(names)} classes {_listed(names)}, numbered 0 to {len(names) - 1}{hint}: repair the row, or "
            "task.labels"
        )
    return found


def _hidden(split: str, column: str) -> str:
    setting = "set data.source.test to null" if split == "test" else "give a split whose labels are known"
    return (
        f"the {split} split has -1 in task.label_column {column!r}, as the test splits of GLUE have where labels are "
        f"hidden: {setting}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
