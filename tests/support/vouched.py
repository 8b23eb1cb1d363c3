"""Journals whose hash chain is right, whatever their lines say."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rollback.rundir.journal import journal


def write_vouched(path: Path, bodies: Iterable[dict[str, Any]]) -> None:
    """bodies: what each line says besides `seq` and `chain`, which are given to it here."""
    chain, lines = "0" * 32, []
    for seq, body in enumerate(bodies):
        said = {"at": "2030-01-01T00:00:00+00:00", "attempt": 1, **body, "seq": seq}
        text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        chain = hashlib.sha256((chain + text).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        lines.append(json.dumps({**said, "chain": chain}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def kinds_parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each fact that is made of a journal's line from now on, the kind."""
    found: list[str] = []
    one, many = journal._record, journal._facts

    def made(body: dict[str, Any]) -> Any:
        entry = one(body)
        found.append(entry.fact.kind)
        return entry

    def all_made(text: bytes) -> Any:
        facts = many(text)
        found.extend(fact.kind for fact in facts)
        return facts

    monkeypatch.setattr(journal, "_record", made)
    monkeypatch.setattr(journal, "_facts", all_made)
    return found
