"""What a journal's writer keeps beside it, and when a reader believes it."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selection import soak
from vouched import kinds_parsed, write_vouched

from recorded_run import incident, rollback_plan
from rollback.errors import JournalDamaged
from rollback.facts.history import History, fold
from rollback.facts.training import BecameGood, Committed, Concluded, Evicted, Incident, Restored, Stopped
from rollback.rundir import seal
from rollback.rundir.journal import folded_journal, journal, journal_index
from rollback.rundir.journal.folded_journal import fold_journal, history_path
from rollback.rundir.journal.journal import Journal, JournalTail, examine_journal, of_kinds, read_entries, read_journal
from rollback.rundir.journal.journal_index import index_path
from rollback.rundir.paths import CheckpointName

BLOCK = 4


def facts() -> Iterator[Any]:
    """Of a run with a rollback after every five checkpoints."""
    for seq in range(14):
        name = CheckpointName.of(seq, 10 * seq)
        yield Committed(checkpoint=name, step=10 * seq, batch=10 * seq, timeline=seq // 5, bytes=1, seconds=0.5)
        yield BecameGood(checkpoint=name, step=10 * seq)
        if seq > 3:
            yield Evicted(checkpoint=CheckpointName.of(seq - 3, 10 * seq - 30), reason="the ring is full")
        if seq % 5 == 4:
            number = seq // 5
            yield incident(number, 10 * seq + 2, 10 * seq + 3)
            yield rollback_plan(number, name, 10 * seq, (10 * seq, 10 * seq + 3), discards=(), timeline=number + 1)
            yield Restored(
                incident=number, checkpoint=name, step=10 * seq, batch=10 * seq, steps_lost=3, seconds=0.1,
                route="in_process",
            )  # fmt: skip
            yield Concluded(incident=number, outcome="recovered", step=10 * seq + 9)
    yield Stopped(reason="preempted", step=140, batch=140, checkpoint=None, account="told to stop")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal of many blocks, as three attempts have left it."""
    monkeypatch.setattr(journal_index, "LINES", BLOCK)
    path = tmp_path / "journal" / "train.jsonl"
    written = list(facts())
    for attempt in (1, 2, 3):
        past = fold_journal(path, to_keep=True)
        writer = Journal(path, attempt, past.reading)
        past.keep()
        for fact in written[(attempt - 1) * 20 : attempt * 20]:
            writer.append(fact)
        writer.close()
    return path


def test_facts_that_the_index_vouches_for_are_as_light_as_they_can_be(path: Path) -> None:
    """The names of the fields that were given are not kept. A copy with another field changes no other fact."""
    index = journal_index.read_index(path)
    facts = [record.fact for record in read_journal(path).records[: sum(block.lines for block in index)]]
    assert facts
    assert facts[0].model_copy(update={"seconds": 2.0}) != facts[0]
    assert not any(fact.model_fields_set for fact in facts)


def outcome(path: Path) -> tuple[Any, ...]:
    """What readers make of a journal: all entries, the history, the place of the next line; or what is damaged."""
    try:
        whole = read_journal(path)
        tail = JournalTail(path)
        folded = fold_journal(path)
        assert tail.new() == whole.records
        assert folded.reading.lines == whole.lines
        assert folded.history == fold(whole.records, History())
        for kinds in ({Incident}, {Evicted, Stopped}):
            assert read_entries(path, kinds) == of_kinds(whole.records, kinds)
        place = (folded.reading.sound_bytes, folded.reading.torn_bytes, folded.reading.chain)
        assert place == (whole.sound_bytes, whole.torn_bytes, whole.chain)
    except JournalDamaged as error:
        return (error.message,)
    return whole.records, folded.history, place


def without_index(path: Path) -> tuple[Any, ...]:
    kept = {beside: beside.read_bytes() for beside in (index_path(path), history_path(path)) if beside.exists()}
    for beside in kept:
        beside.unlink()
    try:
        return outcome(path)
    finally:
        for beside, content in kept.items():
            beside.write_bytes(content)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chains that are computed from now on."""
    found: list[str] = []
    really = journal._chain

    def note(previous: str, body: dict[str, Any]) -> str:
        found.append(previous)
        return really(previous, body)

    monkeypatch.setattr(journal, "_chain", note)
    return found


def test_what_an_index_vouches_for_is_not_verified_again(path: Path, computed: list[str]) -> None:
    lines = len(read_journal(path).records)
    assert lines == len(list(facts()))
    assert len(computed) == lines % BLOCK
    computed.clear()
    assert examine_journal(path).damage is None
    assert len(computed) == lines, "who verifies a record believes no index"


def test_a_start_reads_only_what_came_after_the_history_that_the_last_start_kept(path: Path) -> None:
    past = fold_journal(path)
    assert past.history == fold(read_journal(path).records)
    assert past.reading.before == 40
    assert len(past.reading.records) == len(list(facts())) - 40


def test_facts_of_some_kinds_are_read_without_the_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = kinds_parsed(monkeypatch)
    assert [record.fact.incident for record in read_entries(path, {Incident})] == [0, 1]  # type: ignore[union-attr]
    assert set(parsed[:2]) == {"incident"}
    assert len(parsed) == 2 + len(list(facts())) % BLOCK, "of the lines that no index vouches for, all are"


def test_what_is_damaged_behind_the_index_is_told_to_every_reader(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"garbage\n" * 2)
    for read in (read_journal, fold_journal, lambda path: read_entries(path, {Incident})):
        with pytest.raises(JournalDamaged):
            read(path)
    assert len(read_entries(path, {Incident}, blocks=3)) == 1, "of what is before it, it can be read"


def test_a_writer_keeps_the_index_as_it_goes_so_that_a_death_costs_no_reader_a_second_look(path: Path) -> None:
    before = len(journal_index.read_index(path))
    writer = Journal(path, 4)
    for fact in facts():
        writer.append(fact)
    assert len(journal_index.read_index(path)) == len(read_journal(path).records) // BLOCK > before
    writer.close()


def test_lines_that_another_hand_has_spelt_are_read_all_the_same(path: Path) -> None:
    before = read_journal(path).records
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    quoted = {"attempt": 3, "kind": "trouble", "doing": "reading", "error": "no such file: caf\udce9.txt"}
    write_vouched(path, [{name: line[name] for name in line if name != "chain"} for line in lines] + [quoted])
    Journal(path, 3).close()
    assert len(journal_index.read_index(path)) == (len(before) + 1) // BLOCK
    after = read_journal(path).records
    assert after[:-1] == before
    assert after[-1].fact.error == "no such file: caf\\udce9.txt"  # type: ignore[union-attr]
    assert outcome(path) == without_index(path)


def test_readers_of_an_index_find_what_readers_without_it_find(path: Path) -> None:
    assert outcome(path) == without_index(path)


@pytest.mark.parametrize("which", ["journal", "index", "history"])
@pytest.mark.parametrize("seed", [*range(6), *soak(*range(6, 25))])
def test_whatever_is_damaged_readers_find_what_they_would_find_without_an_index(
    path: Path, which: str, seed: int
) -> None:
    chance = random.Random(f"{which} {seed}")
    file = {"journal": path, "index": index_path(path), "history": history_path(path)}[which]
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            content[place] ^= 1 << chance.randrange(8)
        case 1:
            del content[place:]
        case 2:
            del content[place : place + chance.randrange(1, 2000)]
        case _:
            content[place:place] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 40)))
    file.write_bytes(content)
    assert outcome(path) == without_index(path)


def test_an_index_and_a_history_of_another_moment_are_believed_as_far_as_they_fit(path: Path) -> None:
    old = [(beside, beside.read_bytes()) for beside in (index_path(path), history_path(path))]
    past = fold_journal(path, to_keep=True)
    writer = Journal(path, 4, past.reading)
    past.keep()
    for fact in list(facts())[:1] * 9:
        writer.append(fact)
    writer.close()
    for beside, content in old:
        new = beside.read_bytes()
        beside.write_bytes(content)
        assert outcome(path) == without_index(path)
        beside.write_bytes(new)


def test_an_index_of_another_journal_is_not_believed(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "train.jsonl"
    writer = Journal(other, 7)
    for fact in facts():
        writer.append(fact)
    writer.close()
    for beside in (index_path, history_path):
        if beside(path).exists():
            beside(other).write_bytes(beside(path).read_bytes())
    assert outcome(other) == without_index(other)


def test_a_disk_that_takes_no_index_costs_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_index, "write_file", refuse)
    monkeypatch.setattr(folded_journal, "write_file", refuse)
    past = fold_journal(path, to_keep=True)
    writer = Journal(path, 4, past.reading)
    past.keep()
    for fact in facts():
        if isinstance(fact, Committed):
            writer.append(fact)
    writer.close()
    assert outcome(path) == without_index(path)


def test_with_a_key_only_what_bears_its_seal_is_believed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: list[str]
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    monkeypatch.setenv(seal.ENV_SEAL, str(key))
    sealed = tmp_path / "sealed" / "train.jsonl"
    for attempt in (1, 2):
        past = fold_journal(sealed, to_keep=True)
        writer = Journal(sealed, attempt, past.reading)
        past.keep()
        for fact in facts() if attempt == 1 else ():
            writer.append(fact)
        writer.close()
    computed.clear()
    assert fold_journal(sealed).reading.seals == len(list(facts()))
    assert len(computed) == len(list(facts())) % BLOCK
    for beside in (index_path(sealed), history_path(sealed)):
        text = beside.read_text()
        assert '"seal"' in text
        beside.write_text(text.replace(hashlib.sha256(b"").hexdigest(), "").replace('"seal":"', '"seal":"0'))
        beside.write_text(beside.read_text().replace('"seal": "', '"seal": "0'))
    computed.clear()
    assert read_journal(sealed).seals == len(list(facts()))
    assert len(computed) == len(list(facts())), "every line is verified"
    index_path(sealed).unlink()
    Journal(sealed, 3).close()
    assert journal_index.read_index(sealed)
    assert read_journal(sealed).seals == len(list(facts())), "an index that is made anew counts them, too"
