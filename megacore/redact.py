"""Secrets are left out of everything that is shown, logged or written.

They are known in URLs, under telling names, or by their value.
"""

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""What stands in the place of a secret."""

_PASSING = (
    r"[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|signature|credentials?|api[_-]?key|access[_-"
    r"]?key|private[_-]?key)"
    r"|sig|sas|auth|pwd"
)
"""Names of parameters that let somebody in, and never say which content is asked for."""
_KEYS = r"[\w.-]*key"
"""Names of parameters that may do either."""
_USER = re.compile(r"(?<=://)[^/?#\s'\"]+@")
"""User and password of a URL, up to the last @ before its path."""
_QUERY = re.compile(rf"(?<=[?&;])({_PASSING}|{_KEYS})=([^&;#\s'\"]+)", re.IGNORECASE)
_HEADER = re.compile(r"\b((?i:Bearer|Basic))\s+(?=\S*(?:[\d=]|[a-z][A-Z]))[\w.~+/=-]{8,}")
"""A credential is no plain word: `Basic arithmetic` is a text."""
_CREDENTIAL = re.compile(_PASSING, re.IGNORECASE)
_NAME = re.compile(
    r"(?:(?:^|.*[_.-])(?:auth|access|api|bearer|hf|hub|refresh|security|session|wandb)[_-])?token"
    r"|.*(?:secret|passw(?:or)?d|passphrase|credentials?|api[_-]?key|access[_-]?key|private[_-"
    r"]?key)",
    re.IGNORECASE,
)
"""Keys of a mapping whose text is a secret. The tokens of a vocabulary (eod_token) are none."""
_VARIABLE = re.compile(
    r".*(?:_TOKEN|SECRET|SECRET_KEY|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|CREDENTIALS|AUTH_STRING)$"
)
_SHORTEST = 8
"""Characters of a variable's value below which it is no secret but a word that may stand
anywhere."""


def redact(text: str, *, environment: bool = True) -> str:
    """`text` without the credentials of URLs and headers.

    Secrets of this process's environment are left out too.

    Without `environment` those stay: what is read back must not change because a path holds a
    password's word.
    """
    if "://" in text:
        text = _USER.sub(f"{HIDDEN}@", text)
    text = _QUERY.sub(HIDDEN, text)
    text = _HEADER.sub(rf"\1 {HIDDEN}", text)
    for name, value in os.environ.items() if environment else ():
        if len(value) >= _SHORTEST and value in text and _VARIABLE.fullmatch(name):
            text = text.replace(value, HIDDEN)
    return text


def redact_values(value: Any, *, environment: bool = True) -> Any:
    """Nested mappings and sequences with every text redacted.

    Values whose key says that they are secret are hidden.
    """
    if isinstance(value, str):
        return redact(value, environment=environment)
    if isinstance(value, Mapping):
        return {
            name: HIDDEN
            if isinstance(held, str) and held and _NAME.fullmatch(str(name))
            else redact_values(held, environment=environment)
            for name, held in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_values(element, environment=environment) for element in value]
    return value


def address_identity(url: str) -> str:
    """What of an address says which content it has, for a key.

    Credentials are left out, other keys are digested.
    """

    def identify(match: re.Match[str]) -> str:
        if _CREDENTIAL.fullmatch(match[1]):
            return HIDDEN
        return f"{match[1]}={hashlib.sha256(match[2].encode()).hexdigest()[:16]}"

    return _QUERY.sub(identify, _USER.sub("", url, count=1))


class RedactingFilter(logging.Filter):
    """Hides secrets in what passes a logger or a handler, tracebacks included."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true: a record is changed, never lost."""
        text = record.getMessage()
        shown = redact(text)
        if shown != text:
            record.msg, record.args = shown, ()
        if isinstance(record.exc_info, tuple):
            record.exc_text = redact(
                record.exc_text or logging.Formatter().formatException(record.exc_info)
            )
        return True


def redact_log(log: logging.Logger | logging.Handler) -> None:
    """Apply the filter; doing it again changes nothing."""
    if not any(isinstance(known, RedactingFilter) for known in log.filters):
        log.addFilter(RedactingFilter())
