"""Aliases of a registered model: `candidate`, and `best-DIGEST` for each set of test data.

An alias moves to a published version if that version's test metric is better than the metric of the
version that holds the alias, on the same data. Of versions that cannot be compared, the newer one
has the alias. Versions are compared by their tags, so that nothing else is read.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megacore.artifact import lock
from megacore.artifact.files import canonical_json
from megacore.observe.logging import short_number
from tasks._mlflow import Tracking

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

ALIAS = "candidate"
"""Alias of the version to use next: the best one of those that were measured on the same data."""
BEST = "best-"
"""Prefix of the alias of the best version on one set of test data."""
DATA_TAG = "test_data"
"""Tag with the digest of the test data of a version's last publication."""
LOST_TAG = "lost_to"
"""Tag with the number of the version that keeps an alias, because its metric is not worse."""
_LENGTH = 12
"""Hex digits of the digest of test data, which is also part of an alias."""
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's codes for a missing model and for a missing alias."""


@dataclass(frozen=True)
class Measurement:
    """The metric of a model on test data, by which versions are compared."""

    name: str
    """Name of the metric, such as `test_ppl`."""
    value: float
    data: str
    """Digest of what determines the measured samples: only values with equal digests are compared.
    """
    larger_is_better: bool = False

    @classmethod
    def of(
        cls, name: str, value: float, content: Mapping[str, Any], *, larger_is_better: bool = False
    ) -> "Measurement":
        """Return the measurement on the data that `content` determines."""
        data = hashlib.sha256(canonical_json(content)).hexdigest()[:_LENGTH]
        return cls(name, float(value), data, larger_is_better)

    @property
    def tags(self) -> dict[str, str]:
        """Tags of a version with this measurement. A version can have several, by data."""
        return {DATA_TAG: self.data, f"{self.name}.{self.data}": repr(self.value)}

    def beats(self, other: float) -> bool:
        """Return True if this value is better than `other`."""
        return self.value > other if self.larger_is_better else self.value < other


def move_aliases(
    tracking: Tracking,
    version: "ModelVersion",
    measurement: Measurement | None,
    *,
    force: bool = False,
) -> None:
    """Move the aliases to a version if the rule gives it to them, and tag it with the comparison.

    Repeating it changes nothing. Without a measurement, no version can be compared with it. `force`
    moves `candidate` in any case.
    """
    client, name, number = tracking.client, version.name, str(version.version)
    folder = tracking.workspace.folder("publish")
    folder.mkdir(parents=True, exist_ok=True)
    # Two runs that compare at the same time could both move the alias.
    with lock(folder / f"aliases-{name}"):
        # First, so that a version that holds an alias can be compared, also after a crash.
        for tag, value in ({} if measurement is None else measurement.tags).items():
            client.set_model_version_tag(name, number, tag, value)
        winners = []
        for alias in [ALIAS] if measurement is None else [ALIAS, f"{BEST}{measurement.data}"]:
            forced = force and alias == ALIAS
            winners.append(None if forced else _winner(tracking, version, alias, measurement))
            if winners[-1] is None:
                client.set_registered_model_alias(name, alias, number)
        comparison = _comparison(winners, measurement)
        for tag, value in comparison.items():
            client.set_model_version_tag(name, number, tag, value)
        for tag in client.get_model_version(name, number).tags:
            if tag.startswith(LOST_TAG) and tag not in comparison:
                client.delete_model_version_tag(name, number, tag)


def alias_problem(tracking: Tracking, name: str, number: str, *, force: bool) -> str | None:
    """Return why the alias `candidate` must be moved although the version is published, or None.

    Raises TrackingError.
    """

    def ask() -> str | None:
        with tracking.errors(f"look up alias {ALIAS} of model {name!r}"):
            holder = _holder(tracking, name, ALIAS)
        return None if holder is None else str(holder.version)

    holder = tracking.recall(["holder", ALIAS, name], ask)
    if holder is None:
        return f"no version has the alias {ALIAS}"
    if force and holder != number:
        return f"tracking.force_alias is true and {ALIAS} is version {holder}"
    return None


def standing(tracking: Tracking, name: str, number: str) -> str:
    """Return in words whether a version has the alias `candidate` now, and if not, which has it.

    Raises TrackingError.
    """
    return tracking.recall(
        ["standing", ALIAS, name, number], lambda: _standing(tracking, name, number)
    )


def _standing(tracking: Tracking, name: str, number: str) -> str:
    with tracking.errors(f"look up alias {ALIAS} of model {name!r}"):
        holder = _holder(tracking, name, ALIAS)
        tags = tracking.client.get_model_version(name, number).tags
    if holder is None:
        return f"no version has the alias {ALIAS}"
    if str(holder.version) == number:
        return f"alias {ALIAS}"
    reasons = [tag for tag in tags if tag.startswith(f"{LOST_TAG}_")]
    if tags.get(LOST_TAG) != str(holder.version) or not reasons:
        return f"{ALIAS} is version {holder.version}"
    metric = reasons[0].removeprefix(f"{LOST_TAG}_")
    value, other = float(tags[f"{metric}.{tags[DATA_TAG]}"]), float(tags[reasons[0]])
    label = metric.replace("_", " ").replace("ppl", "PPL")
    return f"{ALIAS} stays version {holder.version}, whose {label} {_relation(other, value)}"


def _winner(
    tracking: Tracking, version: "ModelVersion", alias: str, measurement: Measurement | None
) -> "ModelVersion | None":
    """Return the version that keeps an alias; None if the alias is to be on `version`."""
    holder = _holder(tracking, version.name, alias)
    if holder is None or str(holder.version) == str(version.version):
        return None
    other = _measured(holder, measurement)
    if measurement is None or other is None:
        # An older version that is published again, such as with another sample text, stays behind.
        return holder if int(holder.version) > int(version.version) else None
    return None if measurement.beats(other) else holder


def _comparison(
    winners: "list[ModelVersion | None]", measurement: Measurement | None
) -> dict[str, str]:
    """Return the tags that name the first version that was compared and won; empty if none did."""
    for winner in winners:
        other = None if winner is None else _measured(winner, measurement)
        if winner is not None and measurement is not None and other is not None:
            return {
                LOST_TAG: str(winner.version),
                f"{LOST_TAG}_{measurement.name}": repr(other),
            }
    return {}


def _measured(version: "ModelVersion", measurement: Measurement | None) -> float | None:
    """Return a version's value of the same metric on the same data, or None without one."""
    if measurement is None:
        return None
    value = float(version.tags.get(f"{measurement.name}.{measurement.data}", "nan"))
    return None if math.isnan(value) else value


def _holder(tracking: Tracking, name: str, alias: str) -> "ModelVersion | None":
    """Return the version with an alias, or None if no version has it."""
    from mlflow.exceptions import MlflowException

    try:
        return tracking.client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ABSENT:
            return None
        raise


def _relation(first: float, second: float) -> str:
    """Return how the first value compares with the second, with as many digits as that takes."""
    if math.isnan(second):
        return f"is {short_number(first)}, while that of this version is not a number"
    if first == second:
        return f"is the same ({short_number(first)})"
    pairs = [(short_number(first, f".{n}f"), short_number(second, f".{n}f")) for n in (2, 4, 6, 12)]
    left, right = next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])
    word, sign = ("lower", "<") if first < second else ("higher", ">")
    return f"is {word} ({left} {sign} {right})"
