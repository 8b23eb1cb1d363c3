"""Whatever a journal says that its own hash chain vouches for: commands that read answer, or say where it is wrong."""

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from vouched import write_vouched

from facts import facts, facts_of_kind
from recorded_run import attached
from rollback.cli import app
from rollback.errors import ExitCode, RollbackError
from rollback.facts.fact import Fact
from rollback.facts.training import AttemptEnded, Incident, Planned, Restored
from rollback.rundir.journal.journal_index import IndexedLines, write_index
from rollback.rundir.paths import RunPaths

READING = [
    "status", "status --json", "status --watch --plain", "why", "why --attempt 1", "why --json", "audit", "audit --all",
    "audit --json", "audit --samples", "audit --verify", "audit --format csv", "report -o PAGE", "ring list",
    "ring list --json", "ring verify",
]  # fmt: skip
STARTED = {**attached(None, 0).model_dump(mode="json"), "attempt": 1}
ENDED = AttemptEnded(status=1, cause="killed", step=10, seconds=1.0).model_dump(mode="json")


def ask(run: Path, command: str) -> tuple[int, str]:
    """The exit code and the error, if there is one; fails where an exception is not for the reader."""
    name, *rest = shlex.split(command.replace("PAGE", str(run.with_suffix(".html"))))
    words = [name, rest.pop(0)] if name == "ring" else [name]
    result = CliRunner().invoke(app, [*words, str(run), *rest])
    error = result.exception
    if isinstance(error, RollbackError):
        return error.exit_code, str(error)
    if error is not None and not isinstance(error, SystemExit):
        raise AssertionError(f"rollback {command}") from error
    return result.exit_code, result.output


def write(run: Path, train: Sequence[dict[str, Any]], supervisor: Sequence[dict[str, Any]] = ()) -> RunPaths:
    paths = RunPaths(run)
    write_vouched(paths.train_journal, train)
    write_vouched(paths.supervisor_journal, supervisor)
    return paths


WRONG = {
    "a negative step": ({"step": -5}, "attached.step: Input should be greater than or equal to 0"),
    "a step that no run reaches": ({"step": 10**30}, "attached.step: Input should be less than"),
    "a number as a text": ({"batch": "many"}, "attached.batch: Input should be a valid integer"),
    "a field that nobody knows": ({"colour": "red"}, "attached.colour: Extra inputs are not permitted"),
    "another kind of fact": ({"kind": "wished"}, "kind: this version of rollback knows no fact 'wished'"),
    "no kind of fact": ({"kind": None}, "kind: "),
    "a negative attempt": ({"attempt": -1}, "seq, at or attempt is missing, or not what it should be"),
}


@pytest.mark.parametrize("command", ["status", "status --watch --plain", "why", "audit", "report -o PAGE"])
@pytest.mark.parametrize("place", ["in the middle", "at the end"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_value_that_cannot_be_is_named_with_its_line(tmp_path: Path, wrong: str, place: str, command: str) -> None:
    changed, said = WRONG[wrong]
    behind = [STARTED] if place == "in the middle" else []
    paths = write(tmp_path / "run", [STARTED, {**STARTED, **changed}, *behind], [ENDED])
    code, error = ask(paths.root, command)
    assert code == ExitCode.IO
    assert f"reading the journal {paths.train_journal}: line 2 is not what was written: {said}" in error
    assert "hint: restore the file from a copy" in error


@pytest.mark.parametrize("command", ["status", "status --watch --plain", "why", "audit", "report -o PAGE"])
def test_facts_that_contradict_each_other_are_named_with_their_line(tmp_path: Path, command: str) -> None:
    concluded = {"kind": "outcome", "incident": 7, "outcome": "recovered", "step": 3}
    run = write(tmp_path / "run", [STARTED, concluded], [ENDED]).root
    code, error = ask(run, command)
    assert code == ExitCode.IO
    assert "journal/train.jsonl, line 2 (outcome) contradicts what is before it: incident: 7 is not reported" in error
    assert "hint: restore the file from a copy" in error


@pytest.mark.parametrize("wrong", ['{"kind": "finished", "step": -1}', "[]", "7", "not JSON"])
def test_a_line_that_only_an_index_vouches_for_is_named_too(tmp_path: Path, wrong: str) -> None:
    paths = write(tmp_path / "run", [STARTED] * 4, [ENDED])
    lines = paths.train_journal.read_bytes().splitlines(keepends=True)
    lines[2] = wrong.encode() + b"\n"
    text = b"".join(lines)
    paths.train_journal.write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    block = IndexedLines(bytes=len(text), lines=len(lines), sha256=digest, chain=read_chain(lines[3]), seals=0)
    write_index(paths.train_journal, (block,))
    code, error = ask(paths.root, "status")
    assert code == ExitCode.IO
    assert f"reading the journal {paths.train_journal}: line 3 is not what was written" in error


def read_chain(line: bytes) -> str:
    return str(json.loads(line)["chain"])


def numbers() -> st.SearchStrategy[int]:
    return st.integers(-3, 3) | st.sampled_from([-(10**30), 2**53, 2**64, 10**400])


JUNK = (
    numbers() | st.none() | st.text() | st.floats() | st.lists(numbers(), max_size=3) | st.just({"first": 3, "last": 1})
)


@st.composite
def stories(draw: st.DrawFn) -> list[Fact]:
    """Facts, some of them about an incident that is reported."""
    rest = draw(st.lists(facts(), max_size=8))
    if draw(st.booleans()):
        return rest
    reported = draw(facts_of_kind(Incident))
    about = [draw(facts_of_kind(Planned)), draw(facts_of_kind(Restored)), *rest]
    number = {"incident": reported.incident}
    return [reported, *(f.model_copy(update=number) if "incident" in type(f).model_fields else f for f in about)]


@st.composite
def bodies(draw: st.DrawFn) -> list[tuple[str, dict[str, Any]]]:
    """Lines with their journals. Some have a field with a value that is nothing of the kind."""
    lines = []
    for fact in draw(stories()):
        body = {"attempt": draw(st.integers(0, 3)), **json.loads(fact.model_dump_json())}
        if draw(st.integers(0, 9)) == 0:
            body[draw(st.sampled_from(sorted(body)))] = draw(JUNK)
        lines.append(("supervisor" if fact.writer == "supervisor" else "train", body))
    return lines


@settings(max_examples=15)
@given(lines=bodies())
def test_whatever_it_says_commands_answer_or_say_where_it_is_wrong(lines: list[tuple[str, dict[str, Any]]]) -> None:
    with TemporaryDirectory() as directory:
        train, supervisor = ([body for where, body in lines if where == journal] for journal in ("train", "supervisor"))
        run = write(Path(directory) / "run", train, supervisor).root
        for command in READING:
            code, said = ask(run, command)
            if code == ExitCode.IO and not command.startswith(("audit --verify", "ring")):
                assert re.search(r"journal/\w+\.jsonl(:|,) line \d+ ", said), (command, said)
