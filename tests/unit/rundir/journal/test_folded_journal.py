"""The history that is kept beside a journal: see test_journal_index.py for what is believed of it."""

import ast
import hashlib
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator

from rollback import facts
from rollback.facts.fact import Fact
from rollback.facts.history import Case, History
from rollback.rundir.journal import folded_journal

KNOWN = {11: "3df31d3a4bed7b2b"}
"""By format, what a history consists of."""


def kinds(base: type) -> Iterator[type]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def fields(kind: type) -> dict[str, str]:
    """As they are written: what Python shows of a type depends on its version. What all of a class share is in no
    file."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    written = [node for node in body.body if isinstance(node, ast.AnnAssign)]
    stated = {ast.unparse(node.target): ast.unparse(node.annotation) for node in written}
    return {name: text for name, text in stated.items() if not text.startswith("ClassVar")}


def test_a_history_of_other_fields_has_another_format() -> None:
    """Else the next start would believe what an earlier version has kept. After a change: raise `_FORMAT` in
    folded_journal, and put the new value here."""
    for module in pkgutil.iter_modules(facts.__path__):
        importlib.import_module(f"{facts.__name__}.{module.name}")
    ours = {kind for kind in kinds(Fact) if kind.__module__.startswith(f"{facts.__name__}.")}
    told = {kind.__name__: stated for kind in (History, Case, *ours) if (stated := fields(kind))}
    found = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    assert KNOWN[folded_journal._FORMAT] == found
