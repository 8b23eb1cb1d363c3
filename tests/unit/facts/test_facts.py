"""Facts survive the journal whatever they hold, and docs/format.md lists them all.

`PYTHONPATH=tests/support python tests/unit/facts/test_facts.py` writes the table of facts into docs/format.md.
"""

import ast
import inspect
import itertools
import json
import math
import typing
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from facts import FACTS, facts, windows
from rollback.facts import training
from rollback.facts.training import Fact, Window, parse_fact

FORMAT = Path(__file__).parents[3] / "docs" / "format.md"
BEGIN, END = "<!-- facts:begin -->\n", "<!-- facts:end -->\n"

# --- round trip -------------------------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    """Equality that takes NaN for equal to NaN."""
    return repr(one) == repr(other)


@given(facts())
def test_a_fact_comes_back_from_json_as_it_was(fact: Fact) -> None:
    body = json.loads(fact.model_dump_json())
    assert same(parse_fact.validate_python(body), fact)


@given(facts())
def test_the_json_of_a_fact_is_standard_json(fact: Fact) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(fact.model_dump_json(), parse_constant=refuse)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_survive(value: float) -> None:
    fact = training.Noticed(first_step=1, last_step=2, peak=value, threshold=1.0, rule="r", fate="f")
    assert same(parse_fact.validate_python(json.loads(fact.model_dump_json())), fact)


def test_text_that_utf8_cannot_write_is_spelt_out_instead_of_failing_the_journal() -> None:
    undecodable = b"caf\xe9.txt".decode("utf-8", "surrogateescape")
    fact = training.Trouble(doing="reading", error=f"no such file: {undecodable}")
    assert fact.error == "no such file: caf\\udce9.txt"
    fact.model_dump_json()
    nested = training.AttemptStarted(command=("python", undecodable), host="h", pid=1)
    assert nested.command == ("python", "caf\\udce9.txt")


def test_an_unknown_kind_and_an_unknown_field_are_refused() -> None:
    with pytest.raises(ValidationError):
        parse_fact.validate_python({"kind": "no_such_fact"})
    with pytest.raises(ValidationError):
        parse_fact.validate_python({"kind": "finished", "step": 1, "batch": 2, "more": 3})


# --- windows ----------------------------------------------------------------------------------------------------------


@given(windows, st.integers(0, 2 * 10**9))
def test_a_window_contains_what_lies_between_its_ends(window: Window, batch: int) -> None:
    assert (batch in window) == (window.first <= batch <= window.last)
    assert len(window) == window.last - window.first + 1


@pytest.mark.parametrize(("first", "last"), [(5, 4), (-1, 3)])
def test_a_window_that_ends_before_it_begins_or_begins_before_0_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValidationError):
        Window(first=first, last=last)


# --- the table in the format document ---------------------------------------------------------------------------------


def meanings(kind: type) -> dict[str, str]:
    """The strings under a class's attributes, by attribute, as they stand behind a colon."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: meaning.value.value[0].lower() + meaning.value.value[1:]
        for field, meaning in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(meaning, ast.Expr)
    }


def facts_table() -> str:
    """The table of facts as docs/format.md must have it."""
    rows = ["A field with `?` may be null.", "", "| `kind` | journal | fields | says |", "|---|---|---|---|"]
    for kind in FACTS:
        name = kind.model_fields["kind"].default
        fields = ", ".join(
            f"`{field}`{'?' if type(None) in get_args(hint) else ''}"
            for field, hint in typing.get_type_hints(kind).items()
            if field in kind.model_fields and field != "kind"
        )
        says = " ".join([inspect.getdoc(kind) or "", *(f"`{field}`: {text}" for field, text in meanings(kind).items())])
        writer = {"either": "train or supervisor"}.get(kind.writer, kind.writer)
        rows.append(f"| `{name}` | {writer} | {fields} | {' '.join(says.split())} |")
    return "\n".join(rows) + "\n"


def test_the_format_document_lists_all_facts() -> None:
    written = FORMAT.read_text().split(BEGIN)[1].split(END)[0]
    assert written == facts_table(), (
        "run `PYTHONPATH=tests/support python tests/unit/facts/test_facts.py` to bring docs/format.md up to date"
    )


if __name__ == "__main__":
    before, rest = FORMAT.read_text().split(BEGIN)
    FORMAT.write_text(before + BEGIN + facts_table() + END + rest.split(END)[1])
