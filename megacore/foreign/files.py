"""YAML without surprises."""

import re
from pathlib import Path
from typing import Any

import yaml

from megacore.errors import ConfigError


def _without_colons(form: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(rf"(?!.*:)(?:{form.pattern})", form.flags)


class Loader(yaml.SafeLoader):
    """Reads `1:2` and `12:00:00` as text, as YAML 1.2 does, and not as numbers to the base of 60."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own name
        first: [(tag, _without_colons(form) if tag.endswith((":int", ":float")) else form) for tag, form in known]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises ConfigError when it is none."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
