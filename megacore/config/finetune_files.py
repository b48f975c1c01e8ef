"""Merging of Accelerate's YAML and DeepSpeed's JSON into a fine-tuning's configuration.

Values of a file apply where the configuration has none; where both have a value, the values must
agree. Merging a merged configuration changes nothing, so that a configuration can be written and
read again.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacore.config.finetune import FinetuneTrainConfig
from megacore.errors import ConfigError
from megacore.foreign.accelerate import named_json, read_accelerate
from megacore.foreign.deepspeed_claims import read_deepspeed
from megacore.foreign.files import Claim, first_file, read_settings_json, read_yaml, shortened

FILES = "files"
"""Key of the validation context for the names of the files that were read."""
ACCELERATE = "launch.accelerate_config"
DEEPSPEED = "launch.deepspeed_config"
_BATCH = ("micro_batch_size", "gradient_accumulation_steps")
"""Fields of `train` whose product is the number of samples per optimizer step of a rank."""


def read_files(values: dict[str, Any], roots: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    """Replace the paths of files in the values, in place, by the files' contents.

    By the dotted name of its value, `roots` has the directories that a path may be relative to, and
    the result the path of each file. Raises ConfigError if a file is missing or cannot be read, or
    two settings name different DeepSpeed JSON files.
    """
    names: dict[str, str] = {}
    launch = values.get("launch")
    if not isinstance(launch, dict):
        return names
    launch = values["launch"] = dict(launch)
    if isinstance(launch.get("deepspeed_config"), str):
        path = _settings_file(DEEPSPEED, launch["deepspeed_config"], roots[DEEPSPEED])
        launch["deepspeed_config"] = read_settings_json(path, DEEPSPEED)
        names[DEEPSPEED] = str(path)
    beside: tuple[Path, ...] = tuple(roots[ACCELERATE])
    if isinstance(launch.get("accelerate_config"), str):
        path = _settings_file(ACCELERATE, launch["accelerate_config"], beside)
        launch["accelerate_config"], names[ACCELERATE] = _accelerate(path), str(path)
        beside = (*beside, path.parent)
    if isinstance(launch.get("accelerate_config"), dict):
        _read_named_json(launch, names, beside)
    return names


def merge_files(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a configuration merged with those of its files.

    `names` has the files' names in messages, by the dotted name of the value with the content.
    Values of wrong types are left for their section to refuse. Raises ValueError if a file requests
    something unsupported, or contradicts the configuration or the other file.
    """
    merged = copy.deepcopy(dict(values))
    launch = merged.get("launch")
    if not isinstance(launch, dict):
        return merged
    claims: dict[str, Claim] = {}
    accelerate = launch.get("accelerate_config")
    if isinstance(accelerate, dict):
        for claim in read_accelerate(accelerate, launch, names.get(ACCELERATE, ACCELERATE)):
            _settle(merged, claim, claims)
    settings = launch.get("deepspeed_config")
    if isinstance(settings, dict):
        name, fields = names.get(DEEPSPEED, DEEPSPEED), FinetuneTrainConfig.model_fields
        batch = {key: fields[key].default for key in _BATCH}
        for claim in read_deepspeed(settings, merged, name, batch):
            _settle(merged, claim, claims)
    return merged


def _settle(values: dict[str, Any], claim: Claim, claims: dict[str, Claim]) -> None:
    """Merge a setting of a file into the values.

    Raises ValueError if the values or another file contradict it.
    """
    if not claim.by_default:
        before = claims.setdefault(claim.field, claim)
        if before is not claim and not _same(before.value, claim.value):
            raise ValueError(f"{claim.clause} but {before.clause}: change one of them")
    name, _, field = claim.field.partition(".")
    section = values.setdefault(name, {}) if claim.ours else None
    if not isinstance(section, dict):
        return
    current = section.get(field)
    if current in (None, "auto", [], ()):
        section[field] = claim.value
    elif not claim.by_default and not _same(current, claim.value):
        raise ValueError(
            f"{claim.clause}{claim.meaning} but {claim.field} is {Claim.shown(current)}: change "
            f"one of them, or remove {claim.field}"
        )


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return list(first) == list(second)
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=1e-9)
    return bool(first == second)


def _settings_file(name: str, value: str, roots: Sequence[Path]) -> Path:
    candidates = list(dict.fromkeys(root / Path(value).expanduser() for root in roots))
    match = first_file(candidates)
    if match is None:
        raise ConfigError(
            f"{name} is {shortened(repr(value))}: there is no file "
            f"{' or '.join(shortened(str(path)) for path in candidates)}"
        )
    return match


def _accelerate(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{ACCELERATE} {path} holds {type(content).__name__}, not a mapping: give what "
            "`accelerate config` wrote"
        )
    return content


def _read_named_json(launch: dict[str, Any], names: dict[str, str], roots: Sequence[Path]) -> None:
    """Read the DeepSpeed JSON that Accelerate's YAML names."""
    json_file = named_json(launch["accelerate_config"])
    if json_file is None:
        return
    name = f"deepspeed_config.deepspeed_config_file of {names.get(ACCELERATE, ACCELERATE)}"
    if isinstance(launch.get("deepspeed_config"), dict) and ACCELERATE not in names:
        return  # already read by the process that wrote this configuration
    path = _settings_file(name, json_file, roots)
    content = read_settings_json(path, name)
    if launch.get("deepspeed_config") not in (None, content):
        raise ConfigError(
            f"{name} is {path} but {DEEPSPEED} is {names.get(DEEPSPEED, 'another one')}, and they "
            "differ: keep one of them"
        )
    launch["deepspeed_config"], names[DEEPSPEED] = content, str(path)
