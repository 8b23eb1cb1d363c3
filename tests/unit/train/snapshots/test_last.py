"""What is proved before a last snapshot is believed: each proof fails here once."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import Toy, require_same, train

import rollback
from rollback.checkpoints import end_marks
from rollback.checkpoints.end_marks import EndMark, LastAccount, StepEnd
from rollback.checkpoints.slots import SlotPaths
from rollback.sentinel import Kind, Sentinel
from rollback.train.comm.pulse import FIELDS, beat_of
from rollback.train.data import rng
from rollback.train.data.raw_random import RawRandom, tree_of
from rollback.train.snapshots import last_write
from rollback.train.state import tree

TOY = Toy(samples=120, augment=True, patient=False)
AT = 17
END, BEFORE = StepEnd(1, 0, 8, 8, 0), StepEnd(1, 0, 7, 7, 0)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir(0o700)
    return folder


@pytest.fixture
def marks(memory: Path) -> end_marks.EndMarkPaths:
    paths = end_marks.marks_of(SlotPaths(memory))
    end_marks.prepare(paths)
    return paths


@pytest.fixture
def other() -> Iterator[int]:
    """A process that stands for another rank and lives."""
    if not (pid := os.fork()):
        while True:
            os.read(os.pipe()[0], 1)
    yield pid
    os.kill(pid, 9)
    os.waitpid(pid, 0)


Act = Callable[[rollback.Guard], object]


def kept(run: Path, memory: Path, act: Act, toy: Toy = TOY) -> list[LastAccount]:
    """The accounts after `act` was called in the body of step AT."""

    def hook(guard: rollback.Guard | None, position: int) -> None:
        if position == AT and guard is not None:
            act(guard)
            found.extend(end_marks.read_accounts(guard._last._paths))

    found: list[LastAccount] = []
    train(toy.with_settings(fast_tier=str(memory), snapshot_every=50), run, hook=hook)
    return found


def keep(guard: rollback.Guard) -> None:
    guard._last.keep("the test")


def test_a_rank_keeps_its_state_and_another_goes_on_from_it(tmp_path: Path, memory: Path) -> None:
    class Over(Exception):
        pass

    def leave(guard: rollback.Guard | None, position: int) -> None:
        if position == AT:
            torch.rand(3), random.random(), np.random.rand()
            raise Over

    undisturbed = train(TOY, tmp_path / "undisturbed", log=tmp_path / "undisturbed-log")
    toy = TOY.with_settings(fast_tier=str(memory), snapshot_every=50)
    with pytest.raises(Over):
        train(toy, tmp_path / "run", hook=leave, log=tmp_path / "log")
    starts: list[int] = []
    resumed = train(toy, tmp_path / "run", hook=lambda _, position: starts.append(position), log=tmp_path / "log")
    assert starts[0] == AT
    require_same(resumed, undisturbed, "resumed")


@pytest.mark.parametrize("place", [0, 8, 20, 40, 60, 100, 3000, 9_999])
def test_half_a_mark_is_no_mark(marks: end_marks.EndMarkPaths, place: int) -> None:
    mark = EndMark(marks, 0)
    mark.write(BEFORE, b"before" * 1000)
    mark.write(END, os.urandom(10_000))
    assert set(end_marks.read_ends(marks, 0)) == {BEFORE, END}
    mark._map[4096 + mark._half * end_marks._HALF + place] ^= 1
    assert set(end_marks.read_ends(marks, 0)) == {BEFORE}


def test_while_a_mark_is_written_the_one_before_stays(
    marks: end_marks.EndMarkPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be killed between any two writes to its mark."""
    mark, seen = EndMark(marks, 0), []

    class Watched:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __setitem__(self, key: Any, value: Any) -> None:
            self.inner[key] = value
            seen.append(set(end_marks.read_ends(marks, 0)))

    monkeypatch.setattr(mark, "_map", Watched(mark._map))
    ends = [StepEnd(1, 0, step, step, 0) for step in range(6)]
    for end in ends:
        mark.write(end, os.urandom(100))
    for number, after in enumerate(zip(*[iter(seen)] * 3, strict=True)):
        if number:
            assert all(ends[number - 1] in there for there in after)
        assert ends[number] in after[-1]


@pytest.mark.parametrize("where", ["before", "behind"])
def test_nothing_is_kept_within_an_update(
    tmp_path: Path, memory: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the parameters are about to change, or have changed and the step has not ended."""
    monkeypatch.setattr("rollback.train.snapshots.last._SETTLE", 0.05)
    found: list[LastAccount] = []

    def in_the_update(guard: rollback.Guard) -> None:
        def at_the_hook(*_: object) -> None:
            keep(guard)
            found.extend(end_marks.read_accounts(guard._last._paths))
            handle.remove()

        optimizer = guard._state.optimizer
        hook = optimizer.register_step_pre_hook if where == "before" else optimizer.register_step_post_hook
        handle = hook(at_the_hook)

    kept(tmp_path / "run", memory, in_the_update)
    (account,) = found
    assert account.checkpoint is None
    assert "in its update behind step 17" in (account.why_not or "")


@pytest.mark.parametrize("how", ["counted", "in place", "past the count"])
def test_a_change_during_the_copy_is_noticed(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    write = last_write.write_shard

    def and_change(guard: rollback.Guard, *given: Any) -> Any:
        weight = next(guard._state.model.parameters())
        with torch.no_grad():
            match how:
                case "counted":
                    guard._last.note_change()
                case "in place":
                    weight.mul_(1)
                case _:
                    weight.data[0, 0] += 1
        return write(*given)

    def act(guard: rollback.Guard) -> None:
        monkeypatch.setattr(last_write, "write_shard", lambda *given: and_change(guard, *given))
        keep(guard)

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert ("changed while it was read" if how != "past the count" else "copy") in (account.why_not or "")
    assert not [*memory.glob("*/*/slot-9*/manifest.json")]


def as_one_of_two(guard: rollback.Guard, pid: int) -> EndMark:
    """Another rank, with a mark of the same step's end. The guard itself stays alone in the end."""
    last = guard._last
    assert last._standing is not None
    body = end_marks.read_ends(last._paths, 0)[last._standing.end]
    second = EndMark(last._paths, 1)
    second.write(last._standing.end, body)
    last._pidfds[1] = os.pidfd_open(pid)
    guard._run.ranks.world_size = 2
    return second


@pytest.mark.parametrize("differs", [False, True])
def test_parameters_that_differ_are_not_kept(tmp_path: Path, memory: Path, other: int, differs: bool) -> None:
    def act(guard: rollback.Guard) -> None:
        second = as_one_of_two(guard, other)
        digest = last_write.digest_of_parameters(guard._state)
        second.tell_digest(guard._last._standing.end, digest ^ differs)  # type: ignore[union-attr]
        keep(guard)
        guard._run.ranks.world_size = 1

    (account,) = kept(tmp_path / "run", memory, act)
    assert ("are others" in (account.why_not or "")) == differs
    assert (account.checkpoint is None) == differs


@pytest.mark.parametrize("end", [{"step": AT - 1}, {"returns": 1}, {"attempt": 2}, {"timeline": 1}])
def test_a_mark_of_another_step_or_of_an_earlier_return_does_not_count(
    tmp_path: Path, memory: Path, other: int, end: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollback.train.snapshots.last._SETTLE", 0.05)

    def act(guard: rollback.Guard) -> None:
        second = as_one_of_two(guard, other)
        assert guard._last._standing is not None
        own = guard._last._standing.end
        body = end_marks.read_ends(guard._last._paths, 0)[own]
        for number in range(2):
            second.write(own._replace(**end, batch=own.batch + number), body)
        keep(guard)
        guard._run.ranks.world_size = 1

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert "rank 1 had not come to the end of step 17" in (account.why_not or "")


def test_a_state_that_is_not_healthy_is_not_kept(tmp_path: Path, memory: Path) -> None:
    (account,) = kept(tmp_path / "run", memory, keep, TOY.but(nan=(AT - 1,)).with_settings(observe_only=True))
    assert account.checkpoint is None
    assert "not healthy" in (account.why_not or "") or "not finite" in (account.why_not or "")


def test_the_sentinel_is_foreseen_as_it_will_be(tmp_path: Path, memory: Path) -> None:
    """Judged ahead from what the ranks have sent; what the guard itself judges later gives the same."""

    def act(guard: rollback.Guard) -> None:
        judge, sentinel = guard._judge, guard._state.sentinel
        before = sentinel.state_dict()
        foreseen = judge.foresee([judge.sent])
        assert sentinel.state_dict() == before != foreseen.sentinel
        judge.settle()
        assert sentinel.state_dict() == foreseen.sentinel == judge.foresee([b""]).sentinel
        assert foreseen.metric is not None
        assert json.loads(foreseen.metric) == guard._run.record.recent[-1]

    kept(tmp_path / "run", memory, act)


def test_a_state_that_may_still_be_undone_is_not_kept(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(guard: rollback.Guard) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(guard._judge, "screens", lambda batch: True)
            keep(guard)

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert account.why_not == "each update is screened, and may still be undone"


def test_a_closed_guard_leaves_no_thread_no_descriptor_and_no_model(tmp_path: Path, memory: Path) -> None:
    def descriptors() -> list[str]:
        return [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]

    def closed() -> tuple[threading.Thread, weakref.ref[torch.nn.Module]]:
        found: list[Any] = []

        def hook(guard: rollback.Guard | None, position: int) -> None:
            if guard is not None and not found:
                found.extend([guard._last._thread, weakref.ref(guard._state.model)])
                assert any(str(memory) in each for each in descriptors())

        train(TOY.with_settings(fast_tier=str(memory)), tmp_path / "run", hook=hook)
        return found[0], found[1]

    thread, model = closed()
    assert not thread.is_alive()
    gc.collect()
    assert model() is None
    assert not any(str(memory) in each for each in descriptors())


def test_a_state_whose_last_step_stood_out_is_not_kept(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Sentinel.update

    def act(guard: rollback.Guard) -> None:
        watched = lambda self, seen: replace(update(self, seen), kind=Kind.WATCH)  # noqa: E731
        with monkeypatch.context() as patched:
            patched.setattr(Sentinel, "update", watched)
            keep(guard)

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert account.why_not == "the last step was not healthy"


_sent = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=5)


@given(_sent)
def test_a_sum_that_is_taken_is_the_same_in_every_order(values: list[float]) -> None:
    sent = [struct.pack(f"{FIELDS}d", *([value] * FIELDS)) for value in values]
    if beat_of(sent) is not None:
        sums = {sum(order) for order in itertools.permutations(values)}
        assert len(sums) == 1
    exact = [struct.pack(f"{FIELDS}d", *([value] * FIELDS)) for value in (1.5, 2.25, -3.0)]
    assert beat_of(exact) is not None
    assert beat_of([struct.pack(f"{FIELDS}d", *([value] * FIELDS)) for value in (0.1, 1e17, 0.3)]) is None


def test_random_states_as_bytes_are_the_random_states() -> None:
    raw = RawRandom()
    np.random.seed(3)
    for _ in range(4):  # every second draw takes a number that was drawn before, and changes no word
        np.random.randn()
        assert tree_of(*raw.read())["numpy"]["has_gauss"] == rng.capture(cuda=False)["numpy"]["has_gauss"]
    for number in range(1300):
        random.random(), np.random.rand(), torch.rand(1)
        if number % 7 == 0:
            random.gauss(0, 1), np.random.randn()
        one, other = tree_of(*raw.read()), rng.capture(cuda=False)
        held: dict[str, torch.Tensor] = {}
        again: dict[str, torch.Tensor] = {}
        assert tree.encode(one, "", held) == tree.encode(other, "", again)
        assert all(torch.equal(held[name], again[name]) for name in (*held, *again))


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


@given(_plain)
def test_the_quick_encoding_is_the_encoding(value: Any) -> None:
    try:
        quick = tree.encode_plain(value)
    except tree.NotPlain:
        return
    assert repr(quick) == repr(tree.encode(value, "", {}))
