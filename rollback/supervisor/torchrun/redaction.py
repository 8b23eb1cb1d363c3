"""Removes what looks like a secret from command lines and environment variables before they are written.

A digest of 16 bits, with the run's salt and a slow hash, shows whether a secret is the same as at another start. Very
many values have the same 16 bits, so the digest does not reveal the secret.
"""

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_SECRET_ANYWHERE = {"secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey"}
_SECRET_AT_THE_END = {"token", "key", "pwd", "auth", "authorization"}
_PARTS = re.compile(
    r"(?<![\w-])(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|eyJ)[\w.-]{8,}"
    r"|(?<=://)[^/@\s]+(?=@)"  # of a URL
    r"|(?<![\w/:])[\w.+-]+:[^@\s/:]+(?=@)"  # user:password@host
    r"|(?i:(?<=bearer )|(?<=basic ))\S+"
)
_FIELD = re.compile(r"(?<=[?&;#])([\w.-]+)=([^&;#\s]+)")
_HIDDEN = "***"
_DIGEST = re.compile(r"\*\*\*[0-9a-f]{4}(?![0-9a-f])")
_ROUNDS = 100_000


def new_salt() -> str:
    return os.urandom(16).hex()


def redacted(arguments: Sequence[str], names: Collection[str] = (), salt: str | None = None) -> tuple[str, ...]:
    """A command line without values that look like secrets, and without the values of the options `names`.

    salt: the run's. With it each value is replaced by its digest.
    """
    return tuple(_redacted(arguments, {_plain(name) for name in names}, salt))


def _redacted(arguments: Sequence[str], names: Collection[str], salt: str | None) -> Iterator[str]:
    hides_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if hides_next and not argument.startswith("--"):
            yield _hidden(argument, salt)
        elif equals and _hides(name, names):
            yield f"{name}={_hidden(value, salt)}"
        else:
            yield without_secrets(argument, salt)
        hides_next = argument.startswith("-") and not equals and _hides(argument, names)


def _hides(name: str, names: Collection[str]) -> bool:
    return is_secret(name) or _plain(name) in names


def _plain(name: str) -> str:
    return name.lstrip("-+").replace("_", "-")


def is_secret(name: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and (words[-1] in _SECRET_AT_THE_END or not _SECRET_ANYWHERE.isdisjoint(words))


def without_secrets(value: str, salt: str | None) -> str:
    """A value without the parts of it that look like secrets."""
    value = _FIELD.sub(lambda m: f"{m[1]}={_hidden(m[2], salt)}" if is_secret(m[1]) else m[0], value)
    return _PARTS.sub(lambda match: _hidden(match[0], salt), value)


def without_digests(value: str) -> str:
    """The value as it would be without a salt."""
    return _DIGEST.sub(_HIDDEN, value)


@lru_cache(maxsize=256)
def _hidden(value: str, salt: str | None) -> str:
    if salt is None or value.startswith(_HIDDEN):
        return _HIDDEN
    text = value.encode("utf-8", "surrogatepass")
    return _HIDDEN + hashlib.pbkdf2_hmac("sha256", text, salt.encode("utf-8", "surrogatepass"), _ROUNDS, 2).hex()
