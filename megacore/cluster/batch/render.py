"""Fills the templates of batch jobs: what is not known to a template is an error, and no value can become a command."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, TemplateError

from megacore.errors import ConfigError, LaunchError

TEMPLATES = Path(__file__).resolve().parent / "templates"


def render(template: str | None, default: str, setting: str, values: Mapping[str, Any]) -> str:
    """The text of a template with its placeholders filled.

    Besides Jinja's own filters there are `word`, which quotes a value for a shell or an #SBATCH line, `words`, which
    does so with each of a list, and `json`, in which form YAML takes any value.

    Args:
        template: a file of the user's; None takes `default` of this package.
        default: name of a file in megacore/cluster/batch/templates.
        setting: what names the user's file.
        values: what placeholders stand for.

    Raises:
        ConfigError: the file cannot be read or filled, or a value cannot stand in it.
        LaunchError: the package's own template is not installed.
    """
    path = TEMPLATES / default if template is None else Path(template)
    # No autoescape: the result is no HTML. A sandbox is not needed: the user's template is a script of the user's.
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, autoescape=False)
    environment.filters |= {"word": _word, "words": _words, "json": _json}
    try:
        return environment.from_string(path.read_text(encoding="utf-8")).render(values)
    except OSError as error:
        if template is None:
            raise LaunchError(f"{path} is missing: install megacore again ({error.strerror})") from error
        raise ConfigError(f"{setting} is {path}, which cannot be read: {error.strerror}") from error
    except (TemplateError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}," if line else f"{path}"
        raise ConfigError(
            f"{where} cannot be filled: {error}: see megacore/cluster/batch/templates/{default} for what it may use"
        ) from error


def _word(value: object) -> str:
    text = str(value)
    if not text.isprintable():
        raise ConfigError(f"{text!r} cannot stand in a batch script: leave out what is not printable")
    return shlex.quote(text)


def _words(values: list[object]) -> str:
    return " ".join(map(_word, values))


def _json(value: object) -> str:
    return json.dumps(value)
