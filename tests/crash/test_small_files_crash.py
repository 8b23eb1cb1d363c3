"""A crash or power loss while a small file is replaced or a journal appended to leaves the old content or the new."""

from pathlib import Path

import pytest

from mortal import Mortal
from rollback.facts.training import Finished
from rollback.rundir.journal.journal import Journal, read_journal
from rollback.system.durable import write_file

OLD, NEW = b"old content", b"new content, which is longer"


def test_dying_while_a_file_is_replaced_leaves_the_old_content_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = Mortal(monkeypatch)
    path = tmp_path / "run.json"
    total = mortal.live(lambda: write_file(path, NEW))
    seen = []
    for at in range(1, total + 1):
        path.write_bytes(OLD)
        mortal.die(at, lambda: write_file(path, NEW))
        mortal.lose_power(tmp_path)
        seen.append(path.read_bytes())
    assert set(seen) == {OLD, NEW}
    assert seen == sorted(seen, reverse=True), "once new, always new"


def test_a_file_that_is_durable_was_synced_before_and_after_it_got_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = Mortal(monkeypatch)
    assert (
        mortal.live(lambda: write_file(tmp_path / "a", NEW)) == 5
    )  # open, write, fsync, replace, fsync of the directory
    assert mortal.live(lambda: write_file(tmp_path / "a", NEW, durable=False)) == 3


def test_dying_while_facts_are_appended_leaves_a_journal_of_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = Mortal(monkeypatch)
    facts = [Finished(step=step, batch=2 * step) for step in range(3)]

    def append_all(path: Path, attempt: int) -> None:
        journal = Journal(path, attempt)
        for fact in facts:
            journal.append(fact)
        journal.close()

    total = mortal.live(lambda: append_all(tmp_path / "undisturbed" / "journal" / "train.jsonl", 1))
    for at in range(1, total + 1):
        path = tmp_path / str(at) / "journal" / "train.jsonl"
        mortal.die(at, lambda path=path: append_all(path, 1))  # type: ignore[misc]
        mortal.lose_power(tmp_path)
        before = [record.fact for record in read_journal(path).records]
        assert before == facts[: len(before)]
        append_all(path, 2)
        assert [record.fact for record in read_journal(path).records] == [*before, *facts]
