"""Redaction of secrets from text that is shown, logged or written.

Secrets are recognized in URLs and headers, by the name of their key, or by their value.
"""

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""Replacement for a secret."""

_PASSING = (
    r"[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|signature|credentials?|api[_-]?key|access[_-"
    r"]?key|private[_-]?key)"
    r"|sig|sas|auth|pwd"
)
"""Names of URL parameters that grant access and never identify content."""
_KEYS = r"[\w.-]*key"
"""Names of URL parameters that may grant access or identify content."""
_USER = re.compile(r"(?<=://)[^/?#\s\"]+@")
"""User and password of a URL, up to the last @ before its path; a password may have a '."""
_QUERY = re.compile(rf"(?<=[?&;])({_PASSING}|{_KEYS})=([^&;#\s'\"]+)", re.IGNORECASE)
_HEADER = re.compile(r"\b((?i:Bearer|Basic))\s+(?=\S*(?:[\d=]|[a-z][A-Z]))[\w.~+/=-]{8,}")
"""Authorization header. A credential is not a plain word: `Basic arithmetic` is ordinary text."""
_CREDENTIAL = re.compile(_PASSING, re.IGNORECASE)
_NAME = re.compile(
    r"(?:(?:^|.*[_.-])(?:auth|access|api|bearer|hf|hub|refresh|security|session|wandb)[_-])?token"
    r"|.*(?:secret|passw(?:or)?d|passphrase|credentials?|api[_-]?key|access[_-]?key|private[_-"
    r"]?key)",
    re.IGNORECASE,
)
"""Keys of a mapping whose value is a secret; not tokens of a vocabulary, such as eod_token."""
_VARIABLE = re.compile(
    r".*(?:_TOKEN|SECRET|SECRET_KEY|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|CREDENTIALS|AUTH_STRING)$"
)
_SHORTEST = 8
"""Minimum length of an environment variable's value to count as a secret: a shorter one is a word
that may occur anywhere."""


def redact(text: str, *, environment: bool = True) -> str:
    """Return `text` without the credentials of URLs and headers.

    Args:
        text: any text.
        environment: also hide the secrets in this process's environment variables. False for text
            that is read back: it must not change because a path contains a password.
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
    """Return nested mappings and sequences with every text redacted.

    Text under a key that names a secret is replaced completely.
    """
    if isinstance(value, str):
        return redact(value, environment=environment)
    if isinstance(value, Mapping):
        return {
            name: HIDDEN
            if isinstance(item, str) and item and _NAME.fullmatch(str(name))
            else redact_values(item, environment=environment)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_values(element, environment=environment) for element in value]
    return value


def page_address(url: str) -> str:
    """Return a server's URL for a link: without user and password, other credentials hidden.

    A browser opens it, and asks for the password itself.
    """
    return redact(_USER.sub("", url, count=1))


def address_identity(url: str) -> str:
    """Return the part of a URL that identifies its content, for use in a stage key.

    Credentials are removed; parameters that may be either are replaced by their digest.
    """

    def identify(match: re.Match[str]) -> str:
        if _CREDENTIAL.fullmatch(match[1]):
            return HIDDEN
        return f"{match[1]}={hashlib.sha256(match[2].encode()).hexdigest()[:16]}"

    return _QUERY.sub(identify, _USER.sub("", url, count=1))


class RedactingFilter(logging.Filter):
    """Logging filter that hides secrets in messages and tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact `record` and return True: no record is dropped."""
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
    """Add a `RedactingFilter` to `log`, unless it has one already."""
    if not any(isinstance(existing, RedactingFilter) for existing in log.filters):
        log.addFilter(RedactingFilter())
