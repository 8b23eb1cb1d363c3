"""JSON, indented and in ASCII. The encoder of the library indents in Python; this one leaves most to C."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

_NESTED = frozenset({dict, list})
_text = json.encoder.encode_basestring_ascii


def indented(value: Any, line: str = "\n") -> str:
    """As `json.dumps` with an indent of 2. Objects have texts as names.

    line: begins a line at the level of the value.
    """
    kind, inner = type(value), line + "  "
    if kind not in _NESTED or not value:
        return _text(value) if kind is str else json.dumps(value)
    named = kind is dict
    if _NESTED.isdisjoint(map(type, value.values() if named else value)):
        inside = _flat("," + inner)(value)[1:-1]
    elif named:
        inside = f",{inner}".join(f"{_text(key)}: {indented(item, inner)}" for key, item in value.items())
    else:
        inside = f",{inner}".join(indented(item, inner) for item in value)
    return f"{{{inner}{inside}{line}}}" if named else f"[{inner}{inside}{line}]"


@cache
def _flat(separator: str) -> Callable[[Any], str]:
    return json.JSONEncoder(separators=(separator, ": ")).encode
