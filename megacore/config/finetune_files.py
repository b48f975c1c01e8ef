"""The files that a fine-tuning's configuration names, merged into its values.

They are Accelerate's YAML and DeepSpeed's JSON.

What a file says goes where the configuration says nothing; where both speak, they must say the
same. Merging what has been merged changes nothing, so that a configuration can be written and read
again.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacore.config.finetune import FinetuneTrainConfig
from megacore.errors import ConfigError
from megacore.foreign.accelerate import named_json, read_accelerate
from megacore.foreign.claims import Claim
from megacore.foreign.deepspeed_claims import read_deepspeed
from megacore.foreign.files import read_settings_json, read_yaml

FILES = "files"
"""Key of the validation context with the names of the files that were read."""
ACCELERATE = "launch.accelerate_config"
DEEPSPEED = "launch.deepspeed_config"
_BATCH = ("micro_batch_size", "gradient_accumulation_steps")
"""Fields of train whose product a rank's batch is."""


def read_files(values: dict[str, Any], roots: Sequence[Path]) -> dict[str, str]:
    """Put the content of the files in the place of their paths.

    Args:
        values: by section; changed.
        roots: directories that a path may be relative to.

    Returns:
        The path of each file by the dotted name of its value.

    Raises:
        ConfigError: a file is missing or cannot be read, or two names of DeepSpeed's JSON lead to
            different ones.
    """
    names: dict[str, str] = {}
    launch = values.get("launch")
    if not isinstance(launch, dict):
        return names
    launch = values["launch"] = dict(launch)
    if isinstance(launch.get("deepspeed_config"), str):
        path = _found(DEEPSPEED, launch["deepspeed_config"], roots)
        launch["deepspeed_config"] = read_settings_json(path, DEEPSPEED)
        names[DEEPSPEED] = str(path)
    if isinstance(launch.get("accelerate_config"), str):
        path = _found(ACCELERATE, launch["accelerate_config"], roots)
        launch["accelerate_config"], names[ACCELERATE] = _accelerate(path), str(path)
        roots = (*roots, path.parent)
    if isinstance(launch.get("accelerate_config"), dict):
        _read_named_json(launch, names, roots)
    return names


def merge_files(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of a configuration with those of its files.

    Args:
        values: plain ones, by section; wrong types are left for their section to refuse.
        names: of the files in sentences, by the dotted name of the value that holds them.

    Raises:
        ValueError: a file says what cannot be done here, or what the configuration or the other
            file contradicts.
    """
    merged = copy.deepcopy(dict(values))
    launch = merged.get("launch")
    if not isinstance(launch, dict):
        return merged
    said: dict[str, Claim] = {}
    accelerate = launch.get("accelerate_config")
    if isinstance(accelerate, dict):
        for claim in read_accelerate(accelerate, launch, names.get(ACCELERATE, ACCELERATE)):
            _settle(merged, claim, said)
    settings = launch.get("deepspeed_config")
    if isinstance(settings, dict):
        name, fields = names.get(DEEPSPEED, DEEPSPEED), FinetuneTrainConfig.model_fields
        batch = {key: fields[key].default for key in _BATCH}
        for claim in read_deepspeed(settings, merged, name, batch):
            _settle(merged, claim, said)
    return merged


def _settle(values: dict[str, Any], claim: Claim, said: dict[str, Claim]) -> None:
    """Put what a file says into the values.

    Raises ValueError where they, or another file, say something else.
    """
    if not claim.by_default:
        before = said.setdefault(claim.field, claim)
        if before is not claim and not _same(before.value, claim.value):
            raise ValueError(f"{claim.clause} but {before.clause}: change one of them")
    name, _, field = claim.field.partition(".")
    section = values.setdefault(name, {}) if claim.ours else None
    if not isinstance(section, dict):
        return
    ours = section.get(field)
    if ours in (None, "auto", [], ()):
        section[field] = claim.value
    elif not claim.by_default and not _same(ours, claim.value):
        raise ValueError(
            f"{claim.clause}{claim.meaning} but {claim.field} is {_shown(ours)}: change one of "
            f"them, or remove {claim.field}"
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _found(name: str, given: str, roots: Sequence[Path]) -> Path:
    candidates = list(dict.fromkeys(root / Path(given).expanduser() for root in roots))
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise ConfigError(
            f"{name} is {given!r}: there is no file {' or '.join(map(str, candidates))}"
        )
    return found


def _accelerate(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{ACCELERATE} {path} holds {type(content).__name__}, not a mapping: give what "
            "`accelerate config` wrote"
        )
    return content


def _read_named_json(launch: dict[str, Any], names: dict[str, str], roots: Sequence[Path]) -> None:
    """Read the JSON that Accelerate's YAML names."""
    given = named_json(launch["accelerate_config"])
    if given is None:
        return
    name = f"deepspeed_config.deepspeed_config_file of {names.get(ACCELERATE, ACCELERATE)}"
    if isinstance(launch.get("deepspeed_config"), dict) and ACCELERATE not in names:
        return  # read before: this configuration was written by another process
    path = _found(name, given, roots)
    content = read_settings_json(path, name)
    if launch.get("deepspeed_config") not in (None, content):
        raise ConfigError(
            f"{name} is {path} but {DEEPSPEED} is {names.get(DEEPSPEED, 'another one')}, and they "
            "differ: keep one of them"
        )
    launch["deepspeed_config"], names[DEEPSPEED] = content, str(path)
