"""What is proved before a last snapshot is believed: each proof fails here once."""

import gc
import itertools
import json
import os
import random
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from late_gpu import use_late_gpu
from open_files import open_below
from test_agreement import MANIFEST
from torch import nn
from toy import Loop, Toy, facts, require_same, train

import rollback
from rollback.checkpoints import ring
from rollback.checkpoints.fast_tier import end_marks, last_snapshot_result, slots
from rollback.checkpoints.fast_tier.end_marks import FOREVER, EndMark, Hold, StepEnd
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.manifest import read_manifest
from rollback.facts.training import Advice, NoLastSnapshot
from rollback.rundir.metrics.metric_lines import metric_line
from rollback.rundir.paths import shard_name
from rollback.sentinel import Kind, Sentinel
from rollback.train.comm.beat import FIELDS, beat_of
from rollback.train.comm.pulse import Pulse
from rollback.train.data import rng
from rollback.train.data.rng import RawRandom, tree_of
from rollback.train.incidents import rewinder as returns
from rollback.train.last_snapshot import survivor, writers
from rollback.train.last_snapshot.device import NO_DEVICE
from rollback.train.last_snapshot.early import TRIED, EarlyMarks, early_of_living
from rollback.train.last_snapshot.hosts import Hosts
from rollback.train.last_snapshot.membership import join
from rollback.train.last_snapshot.peers import Peers
from rollback.train.last_snapshot.proof import NotProved
from rollback.train.last_snapshot.small_state import LocalState, SmallState, split
from rollback.train.run import AttachedRun
from rollback.train.snapshots.buffers import FastTier
from rollback.train.state import tree
from rollback.train.state.state_copy import StateCopy
from rollback.train.updates.optimizer import Updates

TOY = Toy(samples=120, augment=True, patient=False)
AT = 17
HOLD = Hold(0, 0, 0, 0)
END, BEFORE = StepEnd(1, 0, 8, 8, 0, 0), StepEnd(1, 0, 7, 7, 0, 0)


def newest_early(paths: end_marks.EndMarkPaths, rank: int) -> end_marks.EarlyMark | None:
    return max(end_marks.read_early(paths, rank).values(), key=lambda early: early.hold.at, default=None)


@pytest.fixture
def other() -> Iterator[int]:
    """A process that stands for another rank and lives."""
    if not (pid := os.fork()):
        while True:
            os.read(os.pipe()[0], 1)
    yield pid
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def kill(pid: int) -> None:
    """Return when it is gone: a machine with all cores busy comes to that later than a test settles."""
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


Act = Callable[[rollback.Guard], object]


def kept(
    run: Path,
    memory: Path,
    act: Act,
    toy: Toy = TOY,
    at_each: Callable[[rollback.Guard | None, int], object] = lambda guard, position: None,
) -> list[LastSnapshotResult]:
    """The accounts after `act` was called in the body of step AT. at_each: called in the body of each step."""

    def hook(guard: rollback.Guard | None, position: int) -> None:
        at_each(guard, position)
        if position == AT and guard is not None:
            act(guard)
            found.extend(last_snapshot_result.read_results(guard._loop.last_snapshot._paths))

    found: list[LastSnapshotResult] = []
    train(toy.with_settings(fast_tier=str(memory), snapshot_every=50), run, hook=hook)
    return found


def keep(guard: rollback.Guard) -> None:
    guard._loop.last_snapshot.keep("the test")


def test_a_rank_keeps_its_state_and_another_goes_on_from_it(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "_PART", 100)  # most of what is read back is longer, and no multiple of it

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


def test_no_update_begins_before_the_beat_of_the_step_before_is_there(tmp_path: Path, memory: Path) -> None:
    """Of several hosts: else a rank that dies in its update takes that beat along, and nobody can end the step."""
    stood = []

    def act(guard: rollback.Guard) -> None:
        class Sum:
            def wait(self) -> None:
                stood.append(bool(guard._loop.last_snapshot._standing.still))

        guard._loop.judge._pulse._work = cast(Any, Sum())

    kept(tmp_path / "run", memory, act)
    assert stood == [True, False], "the second one is that of the beat's reading"


@pytest.mark.parametrize("place", [0, 8, 20, 40, 60, 100, 3000, 9_999])
def test_half_a_mark_is_no_mark(marks: end_marks.EndMarkPaths, place: int) -> None:
    mark = EndMark(marks, 0)
    mark.write(BEFORE, b"before" * 1000)
    mark.write(END, os.urandom(7_000), os.urandom(3_000))
    assert set(end_marks.read_ends(marks, 0)) == {BEFORE, END}
    mark._map[4096 + mark._half * end_marks._PART + place] ^= 1
    assert set(end_marks.read_ends(marks, 0)) == {BEFORE}


def test_the_newest_early_mark_of_a_step_counts_and_that_of_the_step_before_stays(
    marks: end_marks.EndMarkPaths,
) -> None:
    """A step may have several backwards, and draw between them."""
    mark = EndMark(marks, 0)
    mark.write_early(BEFORE, b"before", HOLD)
    for told in (b"first", b"second", b"third"):
        mark.write_early(END, told, HOLD)
        assert {end: early.body for end, early in end_marks.read_early(marks, 0).items()} == {
            BEFORE: b"before", END: told
        }  # fmt: skip


def test_what_stays_is_written_once_to_each_part_and_read_with_every_mark(marks: end_marks.EndMarkPaths) -> None:
    mark, stays = EndMark(marks, 0), os.urandom(500)
    ends = [StepEnd(1, 0, step, step, 0, 0) for step in range(6)]
    for end in ends[:2]:
        mark.write(end, b"first", stays)
    written = mark._map[:]
    for end in ends[2:4]:
        mark.write(end, b"other", stays)
        mark.write_early(end, b"early", HOLD, stays)
    assert end_marks.read_ends(marks, 0) == dict.fromkeys(ends[2:4], b"other" + stays)
    assert (early := newest_early(marks, 0)) is not None
    assert early.body == b"early" + stays
    assert [written.count(stays), mark._map[:].count(stays)] == [2, 4]
    changed = bytes(500)
    mark.write(ends[4], b"longer than before", changed)
    assert end_marks.read_ends(marks, 0) == {ends[3]: b"other" + stays, ends[4]: b"longer than before" + changed}
    mark.write(ends[5], b"without", b"")
    assert end_marks.read_ends(marks, 0) == {ends[4]: b"longer than before" + changed, ends[5]: b"without"}


def test_an_epoch_s_opening_is_in_the_mark_of_its_epoch(tmp_path: Path, memory: Path) -> None:
    """It is copied once for each epoch and half: the mark has that of the present one all the same."""
    openings: list[Any] = []

    def hook(guard: rollback.Guard | None, position: int) -> None:
        assert guard is not None
        paths, cursor = guard._loop.last_snapshot._paths, guard._loop.state.cursor
        for end, body in end_marks.read_ends(paths, 0).items():
            if end.batch == position:  # marked just before this batch was handed out
                told = SmallState.of(split(body)[1])
                assert told.trees["cursor"]["epoch"] == cursor.epoch
                name = "local/cursor/opening/rng/torch"
                held = torch.frombuffer(bytearray(told.tensors[name][2]), dtype=torch.uint8)
                assert torch.equal(held, cursor._opening["rng"]["torch"])
                openings.append(bytes(told.tensors[name][2]))

    train(TOY.but(samples=40, epochs=3).with_settings(fast_tier=str(memory)), tmp_path / "run", hook=hook)
    assert len(openings) == 30
    assert len(set(openings)) == 3


def test_a_mark_has_the_buffers_that_there_are(tmp_path: Path, memory: Path) -> None:
    """A forward may make one, give it another tensor, or one that lies in no order; remove it; exchange a module."""

    def change(model: nn.Module, position: int) -> None:
        match position:
            case 3:
                model.register_buffer("late", torch.rand(2))
            case 5:
                model.register_buffer("late", torch.rand(3))
            case 7:
                model.register_buffer("late", torch.rand(8)[::2])
            case 9:
                model.register_buffer("late", None)
            case 11:
                del model.late
            case 13:
                model.add_module("cache", nn.BatchNorm1d(1))
            case 15:
                model.add_module("cache", nn.BatchNorm1d(1))  # another one in its place
                model.cache.running_mean.fill_(7.0)
            case 17:
                model.cache.add_module("inner", nn.BatchNorm1d(1))  # a leaf until then

    def hook(guard: rollback.Guard | None, position: int) -> None:
        assert guard is not None
        for end, body in end_marks.read_ends(guard._loop.last_snapshot._paths, 0).items():
            if end.batch == position:
                told = SmallState.of(split(body)[1])
                there = guard._loop.state.image().local_tensors
                assert told.buffer_names == sorted(name for name in there if "buffers" in name)
                assert all(bytes(told.tensors[name][2]) == _bytes(there[name]) for name in told.buffer_names)
                found.append(len(told.buffer_names))
        change(guard._loop.state.model, position)

    found: list[int] = []
    train(TOY.but(samples=80, epochs=1).with_settings(fast_tier=str(memory)), tmp_path / "run", hook=hook)
    assert found == [3] * 4 + [4] * 6 + [3] * 4 + [6] * 4 + [9] * 2


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def test_a_buffer_that_the_next_step_has_made_is_not_in_what_is_kept(tmp_path: Path, memory: Path) -> None:
    """Though its backward has looked at the buffers meanwhile, for an early mark."""

    def act(guard: rollback.Guard) -> None:
        guard._loop.state.model.register_buffer("late", torch.rand(2))
        guard._loop.last_snapshot._small_state.coming()
        keep(guard)
        (place,) = [path.parent for path in memory.glob("*/*/slot-9*/manifest.json")]
        with ring.open_shards(place, read_manifest(place, in_slot=True))[0] as shard:
            told.extend(json.loads(shard.metadata["local"])["buffers"])

    told: list[str] = []
    (account,) = kept(tmp_path / "run", memory, act)
    assert account.step == AT
    assert told == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_ranks_with_other_buffers_keep_nothing(tmp_path: Path, memory: Path, other: int) -> None:
    def act(guard: rollback.Guard) -> None:
        model, last = guard._loop.state.model, guard._loop.last_snapshot
        model.register_buffer("late", torch.rand(2))
        local = last._small_state.local()
        del model.late
        second = as_one_of_two(guard, other, ended=False)
        second.write(last._standing.newest.end, local.body({}, last._pulse.sent()), local.unchanging)
        kill(other)
        keep(guard)
        guard._loop.run.ranks.world_size = 1

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert account.why_not == "the ranks have not the same buffers"


def test_a_mark_has_the_kept_values_as_a_checkpoint_has_them(tmp_path: Path, memory: Path) -> None:
    found: list[Any] = []

    def hook(guard: rollback.Guard | None, position: int) -> None:
        assert guard is not None
        held = guard._loop.state.kept
        if not position:
            guard.keep(best=float("inf"), seen=(1, [float("nan"), None]), by_number={1: "one", 2: -0.0}, text="\ud800")
        for end, body in end_marks.read_ends(guard._loop.last_snapshot._paths, 0).items():
            if end.batch == position and position:
                told = SmallState.of(split(body)[1]).trees["kept"]
                assert repr(told) == repr(tree.encode(held.state_dict(), "local/kept", {}))
                found.append(told)
        held._kept.best = float(position)

    train(TOY.but(samples=40, epochs=1).with_settings(fast_tier=str(memory)), tmp_path / "run", hook=hook)
    assert [each["best"] for each in found] == [float(number) for number in range(len(found))]
    assert len(found) > 5


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
    ends = [StepEnd(1, 0, step, step, 0, 0) for step in range(6)]
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
    monkeypatch.setattr("rollback.train.last_snapshot.keeper._SETTLE", 0.05)
    found: list[LastSnapshotResult] = []

    def in_the_update(guard: rollback.Guard) -> None:
        def at_the_hook(*_: object) -> None:
            keep(guard)
            found.extend(last_snapshot_result.read_results(guard._loop.last_snapshot._paths))
            handle.remove()

        optimizer = guard._loop.state.optimizer
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
    monkeypatch.setattr("rollback.train.last_snapshot.keeper._SETTLE", 0.05)
    monkeypatch.setattr(writers, "_PART", 24)
    ordinary = writers.write_shard

    def and_change(guard: rollback.Guard, *given: Any) -> Any:
        weight = next(guard._loop.state.model.parameters())
        with torch.no_grad():
            match how:
                case "counted":
                    guard._loop.last_snapshot.note_change()
                case "in place":
                    weight.mul_(1)
                case _:
                    weight.data[0, 0] += 1
        return ordinary(*given)

    def act(guard: rollback.Guard) -> None:
        monkeypatch.setattr(writers, "write_shard", lambda *given: and_change(guard, *given))
        keep(guard)

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    why = {"counted": "in its update behind step 17", "in place": "changed while it was read", "past the count": "copy"}
    assert why[how] in (account.why_not or "")
    assert not [*memory.glob("*/*/slot-9*")], "half a copy is left"


def test_a_step_that_ends_during_the_copy_is_kept_in_its_place(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary, writing, ended = writers.write_shard, threading.Event(), threading.Event()

    def write_slowly(*given: Any) -> Any:
        written = ordinary(*given)
        writing.set()
        assert ended.wait(20)
        return written

    def act(guard: rollback.Guard) -> None:
        monkeypatch.setattr(writers, "write_shard", write_slowly)
        thread = threading.Thread(target=keep, args=(guard,))
        threads.append(thread)
        thread.start()
        assert writing.wait(20)

    def at_each(guard: rollback.Guard | None, position: int) -> None:
        if position == AT + 1 and guard is not None:
            ended.set()
            threads[0].join()
            found.extend(last_snapshot_result.read_results(guard._loop.last_snapshot._paths))

    threads: list[threading.Thread] = []
    found: list[LastSnapshotResult] = []
    kept(tmp_path / "run", memory, act, at_each=at_each)
    (account,) = found
    assert (account.step, account.why_not) == (AT + 1, None)


def test_nothing_stands_while_a_step_is_judged_though_its_update_was_dropped(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a scaler drops does not come to the optimizer, and the parameters stay as they were: but the step counts."""
    stands: list[bool] = []
    guards: list[rollback.Guard] = []
    send = Pulse.send

    def watched(pulse: Pulse, *given: Any) -> None:
        stands.append(guards[0]._loop.last_snapshot._standing.still)
        send(pulse, *given)

    monkeypatch.setattr(Pulse, "send", watched)
    toy = TOY.but(scaler=True, overflow=(12,)).with_settings(fast_tier=str(memory), snapshot_every=50)
    train(toy, tmp_path / "run", hook=lambda guard, position: guards.append(cast(rollback.Guard, guard)))
    assert len(stands) > 12
    assert not any(stands)


RETURNS = {
    "surgical": (Toy(nan=(29,), samples=40, epochs=6, loop="rehearsed epochs", between=True), {"restore"}),
    "screen": (Toy(samples=320, garbage=(50, 55)), {"restore", "undo"}),
}


@pytest.mark.parametrize("policy", RETURNS)
def test_nothing_stands_within_a_return_and_what_follows_it_are_other_steps(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Whether a checkpoint is restored, behind an epoch's last step, or an update undone that was screened out."""
    toy, ways = RETURNS[policy]
    guards: list[rollback.Guard] = []
    within: list[str] = []
    ends: list[StepEnd] = []

    def watched(what: str, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        def go_back(*given: Any) -> Any:
            assert not guards[0]._loop.last_snapshot._standing.still, what
            within.append(what)
            return ordinary(*given)

        return go_back

    def hook(guard: rollback.Guard | None, position: int) -> None:
        assert guard is not None
        guards.append(guard)
        ends.append(guard._loop.last_snapshot._standing.newest.end._replace(timeline=0))

    monkeypatch.setattr(returns, "restore", watched("restore", returns.restore))
    monkeypatch.setattr(StateCopy, "put_back", watched("undo", StateCopy.put_back))
    train(toy.with_settings(fast_tier=str(memory), policy=policy, horizon=10), tmp_path / "run", hook=hook)
    assert set(within) == ways
    assert len({end.step for end in ends}) < len(ends) == len({*ends})


def without_sent(body: bytes) -> bytes:
    """The content of an end mark as that of an early one."""
    local = split(body)[1]
    return struct.pack("<2Q", len(local), 0) + local


def as_one_of_two(guard: rollback.Guard, pid: int, *, ended: bool = True) -> EndMark:
    """Another rank, with a mark of the same step's end. The guard itself stays alone in the end. ended: else that rank
    has come to the step's end before, and has told early of this one."""
    last = guard._loop.last_snapshot
    end = last._standing.newest.end
    body = end_marks.read_ends(last._paths, 0)[end]
    second = EndMark(last._paths, 1)
    if ended:
        second.write(end, body)
    else:
        second.write(end._replace(step=end.step - 1, batch=end.batch - 1), body)
        second.write_early(end, without_sent(body), hold())
    last._members.peers.pidfds[1], last._members.peers._pids = os.pidfd_open(pid), (os.getpid(), pid)
    guard._loop.run.ranks.world_size = 2
    return second


@pytest.mark.parametrize("differs", [False, True])
def test_parameters_that_differ_are_not_kept(tmp_path: Path, memory: Path, other: int, differs: bool) -> None:
    def act(guard: rollback.Guard) -> None:
        second = as_one_of_two(guard, other)
        digest = writers.combined_digest(writers.digests_of_parameters(guard._loop.state))
        second.tell_digest(guard._loop.last_snapshot._standing.newest.end, digest ^ differs)
        keep(guard)
        guard._loop.run.ranks.world_size = 1

    (account,) = kept(tmp_path / "run", memory, act)
    assert ("are others" in (account.why_not or "")) == differs
    assert (account.checkpoint is None) == differs


def test_once_the_ranks_have_been_found_to_differ_no_state_of_one_of_them_is_kept(tmp_path: Path, memory: Path) -> None:
    def drift(guard: rollback.Guard | None, position: int) -> None:
        if position == AT - 1 and guard is not None:
            guard._loop.checkpoints.snapshots.drifted = True

    assert not kept(tmp_path / "run", memory, keep, at_each=drift)
    (fact,) = facts(tmp_path / "run", NoLastSnapshot)
    assert fact.reason == "the ranks no longer have the same state"


def test_what_a_script_did_to_moments_before_its_update_is_not_kept(tmp_path: Path, memory: Path) -> None:
    """As one that makes momentum smaller at the beginning of its loop: it does so once more where it goes on."""

    def act(guard: rollback.Guard) -> None:
        next(iter(guard._loop.state.optimizer.state.values()))["exp_avg"].mul_(0.5)
        keep(guard)

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.why_not == f"the state of step {AT} was changed while it was read"


def test_a_digest_that_another_rank_told_at_another_step_s_end_says_nothing(
    tmp_path: Path, memory: Path, other: int
) -> None:
    """That rank is stopped, say, and does not answer."""

    def act(guard: rollback.Guard) -> None:
        second, end = as_one_of_two(guard, other), guard._loop.last_snapshot._standing.newest.end
        second.tell_digest(
            end._replace(returns=1), writers.combined_digest(writers.digests_of_parameters(guard._loop.state)) ^ 1
        )
        keep(guard)
        guard._loop.run.ranks.world_size = 1

    (account,) = kept(tmp_path / "run", memory, act)
    assert (account.step, account.why_not) == (AT, None)


@pytest.mark.parametrize("differs", [False, True])
def test_weights_that_were_exchanged_between_two_epochs_are_not_kept(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, differs: bool
) -> None:
    """torch does not count such writes."""
    found: list[LastSnapshotResult] = []

    def evaluate(loop: Loop) -> None:
        assert loop.guard is not None
        weights = next(loop.guard._loop.state.model.parameters()).data
        if not found:
            before = weights.clone()
            weights.mul_(1.5 if differs else 1.0)
            keep(loop.guard)
            weights.copy_(before)
            found.extend(last_snapshot_result.read_results(loop.guard._loop.last_snapshot._paths))

    monkeypatch.setattr(Loop, "evaluate", evaluate)
    toy = TOY.but(samples=40, epochs=2, loop="rehearsed epochs", between=True)
    train(toy.with_settings(fast_tier=str(memory), snapshot_every=50), tmp_path / "run")
    (account,) = found
    assert ("are not those of step 10 any more" in (account.why_not or "")) == differs
    assert account.step == (None if differs else 10)


@pytest.mark.parametrize("end", [{"step": AT - 1}, {"returns": 1}, {"attempt": 2}, {"timeline": 1}, {"epoch": 1}])
def test_a_mark_of_another_step_or_of_an_earlier_return_does_not_count(
    tmp_path: Path, memory: Path, other: int, end: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollback.train.last_snapshot.keeper._SETTLE", 0.05)

    def act(guard: rollback.Guard) -> None:
        second = as_one_of_two(guard, other)
        own = guard._loop.last_snapshot._standing.newest.end
        body = end_marks.read_ends(guard._loop.last_snapshot._paths, 0)[own]
        for number in range(2):
            second.write(own._replace(**end, batch=own.batch + number), body)
        keep(guard)
        guard._loop.run.ranks.world_size = 1

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert "rank 1 had not come to the end of step 17" in (account.why_not or "")


def test_a_state_that_is_not_healthy_is_not_kept(tmp_path: Path, memory: Path) -> None:
    (account,) = kept(tmp_path / "run", memory, keep, TOY.but(nan=(AT - 1,)).with_settings(observe_only=True))
    assert account.checkpoint is None
    assert "not healthy" in (account.why_not or "") or "not finite" in (account.why_not or "")


def test_metrics_of_a_script_that_trains_on_meanwhile_spoil_nothing(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the supervisor has died: what is written by then is a checkpoint, and has to be told of."""

    def act(guard: rollback.Guard) -> None:
        recent = guard._loop.run.record.recent

        def meanwhile(**row: Any) -> str:
            recent.append(row)
            return metric_line(**row)

        with monkeypatch.context() as patched:
            patched.setattr("rollback.train.last_snapshot.writers.metric_line", meanwhile)
            keep(guard)

    (account,) = kept(tmp_path / "run", memory, act)
    assert (account.why_not, account.checkpoint is not None) == (None, True)


def test_the_sentinel_is_judged_ahead_as_it_will_be(tmp_path: Path, memory: Path) -> None:
    """Judged ahead from what the ranks have sent; what the guard itself judges later gives the same."""

    def act(guard: rollback.Guard) -> None:
        judge, sentinel = guard._loop.judge, guard._loop.state.sentinel
        before = sentinel.state_dict()
        judged_ahead = judge.judge_ahead([judge._pulse.sent()])
        assert sentinel.state_dict() == before != judged_ahead.sentinel
        judge.judge_pending()
        assert sentinel.state_dict() == judged_ahead.sentinel == judge.judge_ahead([b""]).sentinel
        assert judged_ahead.metric is not None
        assert json.loads(judged_ahead.metric) == guard._loop.run.record.recent[-1]

    kept(tmp_path / "run", memory, act)


def test_the_sentinel_is_not_judged_ahead_while_the_step_is_judged(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether that is under way already, or begins and ends meanwhile."""
    update, tried = Sentinel.update, []

    def act(guard: rollback.Guard) -> None:
        judge = guard._loop.judge

        def meanwhile(sentinel: Sentinel, *given: Any) -> Any:
            if sentinel is guard._loop.state.sentinel:
                with pytest.raises(NotProved, match="being judged"):
                    judge.judge_ahead([judge._pulse.sent()])
                tried.append("under way")
            elif not tried:
                judge.judge_pending()
            return update(sentinel, *given)

        with monkeypatch.context() as patched:
            patched.setattr(Sentinel, "update", meanwhile)
            with pytest.raises(NotProved, match="being judged"):
                judge.judge_ahead([judge._pulse.sent()])

    kept(tmp_path / "run", memory, act)
    assert tried == ["under way"]


def test_the_sentinel_is_not_judged_ahead_where_it_changes_while_it_is_copied(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(self: Sentinel, memo: object) -> Any:
        raise RuntimeError("deque mutated during iteration")

    def act(guard: rollback.Guard) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Sentinel, "__deepcopy__", torn, raising=False)
            with pytest.raises(NotProved, match="being judged"):
                guard._loop.judge.judge_ahead([guard._loop.judge._pulse.sent()])

    kept(tmp_path / "run", memory, act)


def test_a_state_whose_last_step_shows_that_the_scale_collapses_is_not_kept(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(guard: rollback.Guard) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(type(guard._loop.judge._scale), "update", lambda *_: "collapsed")
            keep(guard)

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert account.why_not == "the last step was not healthy"


def test_before_the_checkpoint_of_the_beginning_is_there_nothing_is_kept(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the run's first checkpoint, and good for nothing until its probation is over: an incident until then
    would stop the run, which would have begun anew without it."""

    def act(guard: rollback.Guard) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(guard._loop.checkpoints.catalogue, "as_held", list)
            keep(guard)

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert account.why_not == "the checkpoint of the run's beginning was not there yet, so the run begins anew"


def test_a_state_with_values_that_are_not_finite_is_not_kept(tmp_path: Path, memory: Path) -> None:
    """Though no loss has shown it yet."""

    def act(guard: rollback.Guard) -> None:
        weights = next(guard._loop.state.model.parameters()).data
        weight = weights[0, 0].item()
        weights[0, 0] = float("inf")
        keep(guard)
        weights[0, 0] = weight

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert "not finite" in (account.why_not or "")


def test_a_state_that_may_still_be_undone_is_not_kept(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(guard: rollback.Guard) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(guard._loop.judge, "screens", lambda batch: True)
            keep(guard)

    (account,) = kept(tmp_path / "run", memory, act)
    assert account.checkpoint is None
    assert account.why_not == "each update is screened, and may still be undone"


def test_a_closed_guard_leaves_no_thread_no_descriptor_and_no_model(tmp_path: Path, memory: Path) -> None:
    def closed() -> tuple[threading.Thread, weakref.ref[torch.nn.Module]]:
        found: list[Any] = []

        def hook(guard: rollback.Guard | None, position: int) -> None:
            if guard is not None and not found:
                found.extend([guard._loop.last_snapshot._thread, weakref.ref(guard._loop.state.model)])
                assert open_below(memory) > 0

        train(TOY.with_settings(fast_tier=str(memory)), tmp_path / "run", hook=hook)
        return found[0], found[1]

    thread, model = closed()
    assert not thread.is_alive()
    gc.collect()
    assert model() is None
    assert open_below(memory) == 0


@pytest.mark.parametrize(("kind", "is_kept"), [(Kind.WATCH, True), (Kind.SPIKE, False), (Kind.NONFINITE, False)])
@pytest.mark.parametrize("judged", [False, True])
def test_a_state_is_kept_while_the_loss_stands_out_and_not_where_a_trouble_is_to_be_answered(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, is_kept: bool, judged: bool
) -> None:
    """The sentinel is in the checkpoint, in the middle of what stands out. judged: else the verdict is judged ahead."""
    update = Sentinel.update

    def act(guard: rollback.Guard) -> None:
        said = lambda self, seen: update(self, seen)._replace(kind=kind)  # noqa: E731
        with monkeypatch.context() as patched:
            patched.setattr(Sentinel, "update", said)
            if judged:
                guard._loop.judge.judge_pending()
            keep(guard)

    (account,) = kept(tmp_path / "run", memory, act, TOY.with_settings(observe_only=True))
    assert (account.checkpoint is not None) is is_kept
    assert account.why_not == (None if is_kept else "the last step was not healthy")


def hold(computed: int = 0, effort: int = 0) -> Hold:
    """Of an early mark that is written now."""
    return Hold(time.monotonic_ns(), 60 * 10**9, computed, effort)


def tell_early(guard: rollback.Guard) -> None:
    """Have a guard that is alone leave early marks, as one of several does."""
    last, updates = guard._loop.last_snapshot, guard._loop.step_in_progress.updates
    last._early = EarlyMarks(last._mark, last._device, lambda: updates.telltale, last._small_state, last._coming)


def died_in_its_update(
    run: Path,
    memory: Path,
    other: int,
    act: Callable[[rollback.Guard, EndMark], object],
    toy: Toy = TOY,
    behind: Callable[[int], object] = lambda position: None,
    *,
    lives: bool = False,
) -> LastSnapshotResult:
    """The account of a rank that has come to the end of a step, where another one died behind the sum of its gradients.

    behind: what the script does behind each update. lives: that rank is there still, and does not move.
    """

    def begin(guard: rollback.Guard | None, position: int) -> None:
        if guard is not None and position == 0:
            tell_early(guard)
            guard._loop.state.optimizer.register_step_post_hook(lambda *_: behind(guard.step))

    def at(guard: rollback.Guard) -> None:
        second = as_one_of_two(guard, other, ended=False)
        act(guard, second)
        if not lives:
            kill(other)
        keep(guard)
        guard._loop.run.ranks.world_size = 1

    (account,) = kept(run, memory, at, toy, begin)
    return account


def test_a_rank_that_died_behind_the_sum_has_told_early_what_it_knew(tmp_path: Path, memory: Path, other: int) -> None:
    account = died_in_its_update(tmp_path / "run", memory, other, lambda guard, second: None)
    assert (account.step, account.why_not) == (AT, None)


@pytest.mark.parametrize("died", ["in the epoch's last update", "a step further"])
def test_a_rank_that_has_begun_the_next_epoch_stands_at_two_ends(
    tmp_path: Path, memory: Path, other: int, monkeypatch: pytest.MonkeyPatch, died: str
) -> None:
    """Before and behind the work between two epochs. Only of the first of them there is an early mark."""
    monkeypatch.setattr("rollback.train.last_snapshot.keeper._SETTLE", 0.05)
    found: list[LastSnapshotResult] = []

    def hook(guard: rollback.Guard | None, position: int) -> None:
        assert guard is not None
        last = guard._loop.last_snapshot
        if position == 0:
            tell_early(guard)
        if position != 10:
            return
        second_end, first_end = (standing.end for standing in last._standing.still)
        second, body = EndMark(last._paths, 1), end_marks.read_ends(last._paths, 0)[first_end]
        if died == "a step further":
            second.write(second_end, end_marks.read_ends(last._paths, 0)[second_end])
            second.write(second_end._replace(step=11, batch=11), body)
        else:
            second.write(first_end._replace(step=9, batch=9), body)
            second.write_early(first_end, without_sent(body), hold())
        last._members.peers.pidfds[1] = os.pidfd_open(other)
        guard._loop.run.ranks.world_size = 2
        kill(other)
        keep(guard)
        guard._loop.run.ranks.world_size = 1
        found.extend(last_snapshot_result.read_results(last._paths))

    toy = TOY.but(samples=40, epochs=2, loop="rehearsed epochs", between=True)
    train(toy.with_settings(fast_tier=str(memory), snapshot_every=50), tmp_path / "run", hook=hook)
    (account,) = found
    assert (account.step, account.why_not) == (10, None)


def _it_computes(guard: rollback.Guard, second: EndMark) -> None:
    guard._loop.last_snapshot._members.peers._pids = os.getpid(), os.getpid()  # this process has


def _it_gives_up(guard: rollback.Guard, second: EndMark) -> None:
    early = newest_early(guard._loop.last_snapshot._paths, 1)
    assert early is not None
    second.write_early(early.end, early.body, early.hold._replace(patience=FOREVER))


def _it_may_compute(guard: rollback.Guard, second: EndMark) -> None:
    early = newest_early(guard._loop.last_snapshot._paths, 1)
    assert early is not None
    second.write_early(early.end, early.body, early.hold._replace(effort=60 * 10**9))


@pytest.mark.parametrize(
    ("says", "settle", "counts"),
    [
        (_it_computes, 0.05, False),
        (_it_gives_up, 3600.0, True),
        (_it_may_compute, 0.05, True),
    ],
    ids=["it computes", "it gives up", "it does not compute"],
)
def test_an_early_mark_of_a_rank_that_lives_counts_only_where_it_has_stopped(
    tmp_path: Path,
    memory: Path,
    other: int,
    monkeypatch: pytest.MonkeyPatch,
    says: Callable[[rollback.Guard, EndMark], object],
    settle: float,
    counts: bool,
) -> None:
    """It may still come to the step's end, with something else, if it computes on."""
    monkeypatch.setattr("rollback.train.last_snapshot.keeper._SETTLE", settle)
    account = died_in_its_update(tmp_path / "run", memory, other, says, lives=True)
    assert (account.checkpoint is not None) is counts
    assert counts or "rank 1 had not come to the end of step 17" in (account.why_not or "")


def test_a_rank_that_has_used_more_of_the_processor_than_ever_does_not_count(
    marks: end_marks.EndMarkPaths,
) -> None:
    mark = EndMark(marks, 1)
    mark.write_early(END, b"body", hold(computed=100, effort=50))
    assert early_of_living(marks, 1, END, 150) == b"body"
    assert early_of_living(marks, 1, END, 151) is None
    assert early_of_living(marks, 1, END, None) is None
    assert early_of_living(marks, 1, BEFORE, 150) is None
    mark.leave()
    assert early_of_living(marks, 1, END, 150) is None


def test_a_survivor_that_is_in_its_next_backward_has_still_told_early_of_the_step_before(
    tmp_path: Path, memory: Path, other: int
) -> None:
    """Here this one: it waits there for the rank that is gone."""

    def go_on(guard: rollback.Guard, second: EndMark) -> None:
        last = guard._loop.last_snapshot
        assert last._early is not None
        last._early._in_backward()

    account = died_in_its_update(tmp_path / "run", memory, other, go_on)
    assert (account.step, account.why_not) == (AT, None)


def _of_another_step(guard: rollback.Guard, second: EndMark) -> None:
    early = newest_early(guard._loop.last_snapshot._paths, 1)
    assert early is not None
    second.withdraw()
    second.write_early(early.end._replace(returns=1), early.body, early.hold)


def _long_ago(guard: rollback.Guard, second: EndMark) -> None:
    early = newest_early(guard._loop.last_snapshot._paths, 1)
    assert early is not None
    second.withdraw()
    second.write_early(early.end, early.body, early.hold._replace(patience=0))


def _half(guard: rollback.Guard, second: EndMark) -> None:
    second._map[end_marks.STARTS[2 + second._early] + 5000] ^= 1


UNPROVED: dict[str, tuple[Callable[[rollback.Guard, EndMark], object], str]] = {
    "of another return": (_of_another_step, "had not come to the end of step 17"),
    "withdrawn": (lambda guard, second: second.withdraw(), "once the script logs, counts or draws behind"),
    "left as it should": (lambda guard, second: second.leave(), "had not come to the end of step 17"),
    "half a mark": (_half, "had not come to the end of step 17"),
    "too long ago": (_long_ago, "as never before"),
}


@pytest.mark.parametrize("what", UNPROVED)
def test_an_early_mark_that_is_not_proved_does_not_count(tmp_path: Path, memory: Path, other: int, what: str) -> None:
    act, why = UNPROVED[what]
    account = died_in_its_update(tmp_path / "run", memory, other, act)
    assert account.checkpoint is None
    assert why in (account.why_not or "")


@pytest.mark.parametrize("at", [3, AT - 1])
def test_where_a_survivor_has_drawn_behind_its_update_no_early_mark_counts(
    tmp_path: Path, memory: Path, other: int, at: int
) -> None:
    """In that very step, or ever before."""
    draw = lambda step: torch.rand(1) if step == at else None  # noqa: E731
    account = died_in_its_update(tmp_path / "run", memory, other, lambda guard, second: None, behind=draw)
    assert account.checkpoint is None
    assert "changed what only it knows" in (account.why_not or "")


@pytest.mark.parametrize("behind", [False, True])
def test_a_kept_value_that_changes_behind_the_backward_is_named_once_and_ends_early_marks(
    tmp_path: Path, memory: Path, other: int, behind: bool
) -> None:
    kept_values = list[Any]()

    def count(step: int) -> None:
        kept_values[0].tokens += 8

    def begin(guard: rollback.Guard | None, position: int) -> None:
        if guard is None or position:
            return
        tell_early(guard)
        kept_values.append(guard.keep(tokens=0, best=0.5))
        state = guard._loop.state
        register = state.optimizer.register_step_post_hook if behind else state.model.register_forward_hook
        register(lambda *_: count(guard.step))

    def at(guard: rollback.Guard) -> None:
        as_one_of_two(guard, other, ended=False)
        kill(other)
        keep(guard)
        guard._loop.run.ranks.world_size = 1

    (account,) = kept(tmp_path / "run", memory, at, TOY, begin)
    assert (account.checkpoint is None) is behind, account.why_not
    told = [fact.text for fact in facts(tmp_path / "run", Advice) if fact.code == "values-behind-backward"]
    assert len(told) == behind
    assert all("changes 'tokens', which" in text for text in told)


def test_there_are_early_marks_only_after_steps_in_which_nothing_changed(tmp_path: Path, memory: Path) -> None:
    found: list[end_marks.EarlyMark | None] = []

    def hook(guard: rollback.Guard | None, position: int) -> None:
        if guard is not None:
            if position == 0:
                tell_early(guard)
            found.append(newest_early(guard._loop.last_snapshot._paths, 0))

    train(TOY.with_settings(fast_tier=str(memory), snapshot_every=50), tmp_path / "run", hook=hook)
    first = next(place for place, early in enumerate(found) if early is not None)
    assert first == TRIED + 1
    assert [early.end.step for early in found[first:] if early is not None] == list(range(first, len(found)))


class Foretelling:
    """What a training adds to behind its backward. It does not know of step 8 what that is, and is wrong of step 12."""

    total = 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def coming_state_dict(self) -> dict[str, Any] | None:
        coming = self.total + 1
        return None if coming == 8 else {"total": 99 if coming == 12 else coming}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_what_an_object_foretells_of_a_steps_end_is_in_early_marks_until_it_was_wrong(
    tmp_path: Path, memory: Path
) -> None:
    kept, found = Foretelling(), set()

    def behind(guard: rollback.Guard) -> None:
        if (early := newest_early(guard._loop.last_snapshot._paths, 0)) is not None:
            found.add(early.end.step)
            if early.end.step == guard.step + 1:
                told = SmallState.of(split(early.body)[1]).trees["kept"]["total"]
                assert told == kept.coming_state_dict()
        kept.total += 1

    def hook(guard: rollback.Guard | None, position: int) -> None:
        if guard is not None and position == 0:
            tell_early(guard)
            guard.keep(total=kept)
            guard._loop.state.optimizer.register_step_post_hook(lambda *_: behind(guard))

    train(TOY.with_settings(fast_tier=str(memory), snapshot_every=50), tmp_path / "run", hook=hook)
    assert kept.total > 12
    assert found == {*range(TRIED + 1, 13)} - {8}
    (advice,) = facts(tmp_path / "run", Advice)
    assert advice.code == "logs-behind-backward"


def test_the_last_step_of_an_epoch_has_no_early_mark_and_the_work_behind_it_ends_none(
    tmp_path: Path, memory: Path
) -> None:
    """The evaluation draws. That is no change behind a backward, though the next mark has the name of that step."""
    found: dict[int, int] = {}

    def hook(guard: rollback.Guard | None, position: int) -> None:
        assert guard is not None
        if position == 0:
            tell_early(guard)
        if (early := newest_early(guard._loop.last_snapshot._paths, 0)) is not None:
            found[position] = early.end.step

    toy = TOY.but(samples=40, epochs=3, loop="epochs", between=True)
    train(toy.with_settings(fast_tier=str(memory), snapshot_every=50), tmp_path / "run", hook=hook)
    assert [found[position] for position in (9, 10, 11, 19, 20, 21, 29)] == [9, 9, 11, 19, 19, 21, 29]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("updates", [False, True])
def test_a_rank_that_raises_gives_up_its_step_and_says_whether_it_has_drawn(
    tmp_path: Path, memory: Path, draws: bool, updates: bool
) -> None:
    """Before its update, and in it."""
    found: list[tuple[int, bool]] = []

    class Raised(Exception):
        pass

    def behind(guard: rollback.Guard) -> None:
        if guard.step != AT:
            return
        if draws:
            torch.rand(1)
        last = guard._loop.last_snapshot
        last._done = True  # nothing is to be kept
        last.raised("the test")
        early = end_marks.read_early(last._paths, 0)
        found.extend(sorted((end.step, mark.hold.patience == FOREVER) for end, mark in early.items()))
        raise Raised

    def hook(guard: rollback.Guard | None, position: int) -> None:
        if guard is not None and position == 0:
            tell_early(guard)
            register = (
                guard._loop.state.optimizer.register_step_post_hook
                if updates
                else (guard._loop.state.optimizer.register_step_pre_hook)
            )
            register(lambda *_: behind(guard))

    with pytest.raises(Raised):
        train(TOY.with_settings(fast_tier=str(memory), snapshot_every=50), tmp_path / "run", hook=hook)
    assert found == [(AT, False), *([] if draws else [(AT + 1, True)])]


def test_the_early_mark_is_there_before_any_gradient_of_its_bucket_is_given_to_the_sum(
    marks: end_marks.EndMarkPaths, tmp_path: Path
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model = nn.parallel.DistributedDataParallel(net)
        telltale, mark = net[0].weight, EndMark(marks, 0)
        early = EarlyMarks(mark, NO_DEVICE, lambda: telltale, cast(Any, Reader()), lambda: END)
        early._tried = TRIED
        there: list[bool] = []

        def sum_up(state, bucket):  # type: ignore[no-untyped-def] # DDP refuses annotations that are texts
            if any(parameter is telltale for parameter in bucket.parameters()):
                there.append(newest_early(marks, 0) is not None)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, sum_up)
        for _ in range(3):
            mark.withdraw()
            model(torch.randn(2, 4)).sum().backward()
        assert there == [True, True, True]
    finally:
        dist.destroy_process_group()


def test_early_marks_go_on_by_another_parameter_where_the_script_freezes_theirs(marks: end_marks.EndMarkPaths) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    updates, mark, reader = Updates(torch.optim.SGD(net.parameters()), None, net), EndMark(marks, 0), Reader()
    early = EarlyMarks(mark, NO_DEVICE, lambda: updates.telltale, cast(Any, reader), lambda: END)
    early._tried = TRIED
    there = []
    for frozen in ([], [0], [0, 1], [0], []):
        for number, layer in enumerate(net):
            layer.requires_grad_(number not in frozen)
        early.at_end(BEFORE, reader.coming(), 0)
        mark.withdraw()
        if frozen != [0, 1]:  # as for an evaluation
            net(torch.randn(2, 4)).sum().backward()
        there.append(newest_early(marks, 0) is not None)
    early.stop()
    net[1].requires_grad_(False)
    early.at_end(BEFORE, reader.coming(), 0)
    net(torch.randn(2, 4)).sum().backward()
    assert newest_early(marks, 0) is None
    assert there == [True, True, False, True, True]


COVERED: dict[str, tuple[dict[str, Any], str]] = {
    "a model that is sharded": ({"sharding": "fsdp"}, "the model is sharded"),
    "data that are only read in order": (
        {"loader": "list"},
        "the data can only be read in order, and whether they are at their end, where no run goes on, shows when the "
        "next batch is read",
    ),
    "several hosts": (
        {},
        "the ranks are on several hosts, which can agree only by torchrun's own store, and these ranks have none",
    ),
}


@pytest.mark.parametrize("what", COVERED)
def test_where_there_can_be_no_last_snapshot_the_journal_says_so_at_the_start(
    tmp_path: Path, memory: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, why = COVERED[what]
    toy = TOY.but(samples=12, **changes)
    if what == "several hosts":

        def elsewhere(run: AttachedRun, *given: Any) -> Any:
            with monkeypatch.context() as patched:
                patched.setattr(run.ranks, "host_count", 2)
                return join(run, *given)

        monkeypatch.setattr(survivor, "join", elsewhere)
    if "sharding" in changes:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        train(toy.with_settings(fast_tier=str(memory), snapshot_every=50), tmp_path / "run")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    (fact,) = facts(tmp_path / "run", NoLastSnapshot)
    assert fact.reason == why


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_was_made_for_it_is_closed_where_a_rank_cannot_have_it(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    def watch(peers: Peers, _: object) -> None:
        bells.append(peers._paths.bell(0))
        assert open_below(bells[0]) == 1
        raise OSError("no descriptors are left")

    def hook(guard: rollback.Guard | None, position: int) -> None:
        assert open_below(bells[0]) == 0
        assert "rollback-gpu" not in {thread.name for thread in threading.enumerate() if thread not in before}

    before, bells = threading.enumerate(), list[Path]()
    if on_gpu:
        use_late_gpu(monkeypatch.setattr)
    monkeypatch.setattr(Peers, "watch", watch)
    train(TOY.with_settings(fast_tier=str(memory), snapshot_every=50, last_snapshot="on"), tmp_path / "run", hook=hook)
    (fact,) = facts(tmp_path / "run", NoLastSnapshot)
    assert fact.reason == "the memory for it cannot be had: no descriptors are left"


def test_a_rank_that_can_have_no_thread_to_watch_trains_without_last_snapshots(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "rollback-last":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    train(TOY.but(samples=12).with_settings(fast_tier=str(memory), snapshot_every=50), tmp_path / "run")
    (fact,) = facts(tmp_path / "run", NoLastSnapshot)
    assert fact.reason == "starting a thread (rollback-last): can't start new thread"


class Reader:
    on_gpu: tuple[torch.Tensor, ...] = ()

    def coming(self) -> LocalState:
        return LocalState("[]", b"")

    def values(self) -> dict[str, Any]:
        return {}


def test_a_rank_that_leaves_no_marks_any_more_is_in_the_journal(tmp_path: Path, memory: Path, other: int) -> None:
    def act(guard: rollback.Guard) -> None:
        second = as_one_of_two(guard, other)
        second.tell_stopped("its values have grown")
        end_marks.ring_bell(guard._loop.last_snapshot._paths, 0, end_marks.STOPPED)
        while not facts(tmp_path / "run", NoLastSnapshot):
            pass
        guard._loop.last_snapshot._take_news(end_marks.STOPPED)  # as when another one stops: it is told once of each
        guard._loop.run.ranks.world_size = 1

    assert not kept(tmp_path / "run", memory, act)  # nobody has tried to keep anything
    (fact,) = facts(tmp_path / "run", NoLastSnapshot)
    assert fact.reason == "rank 1: its values have grown"


def test_a_rank_that_does_not_write_the_journal_tells_the_one_that_does(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[tuple[int, bytes]] = []

    def act(guard: rollback.Guard) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(type(guard._loop.run.ranks), "is_rank_0", property(lambda _: False))
            patched.setattr(end_marks, "ring_bell", lambda paths, rank, why=b"!": rung.append((rank, why)))
            guard._loop.last_snapshot._stop("too much")
        assert end_marks.read_stopped(guard._loop.last_snapshot._paths, 0) == "too much"

    kept(tmp_path / "run", memory, act)
    assert rung == [(0, end_marks.STOPPED)]


def test_on_another_host_it_tells_that_of_rank_0(tmp_path: Path, memory: Path) -> None:
    class Elsewhere:
        own = 2

        def tell_stopped(self, why: str) -> None:
            told.append(why)

    told: list[str] = []

    def act(guard: rollback.Guard) -> None:
        members = guard._loop.last_snapshot._members

        def close() -> None:
            told.append("closed")
            members.close()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(guard._loop.run.ranks), "is_rank_0", property(lambda _: False))
            elsewhere = replace(members, hosts=cast(Hosts, Elsewhere()), close=close)
            patched.setattr(guard._loop.last_snapshot, "_members", elsewhere)
            guard._loop.last_snapshot._stop("too much")

    kept(tmp_path / "run", memory, act)
    assert told == ["rank 0: too much", "closed"]


def test_what_not_all_hosts_have_and_what_is_half_written_is_removed_before_an_attempt(memory: Path) -> None:
    tier = FastTier(SlotPaths(memory), 0, leads=True, here=[0], taken={1, 91})
    stray, half, held = 90, 90, 91

    def fill(number: int, *, committed: bool) -> None:
        directory = tier.paths.slot(number)
        directory.mkdir(0o700)
        (directory / shard_name(0)).write_bytes(b"a shard")
        if committed:
            slots.commit(tier.paths, number, MANIFEST, [0])

    fill(held, committed=True)
    for number, committed in ((stray, True), (half, False)):
        fill(number, committed=committed)
        writers.sweep_slots(tier)
        assert tier.paths.numbers() == [held]
    assert slots.is_committed(tier.paths, held)
    tier.close()


_doubles = st.floats(-100, 100).flatmap(
    lambda value: st.lists(st.sampled_from([value, value / 3]), min_size=3, max_size=6)
)
_sent = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=5) | _doubles


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


def test_random_states_as_bytes_are_those_of_the_generator_that_is_there() -> None:
    raw, before = RawRandom(), np.random.get_bit_generator()
    raw.read()
    try:
        np.random.set_bit_generator(np.random.MT19937(5))
        np.random.rand()
        assert torch.equal(tree_of(*raw.read())["numpy"]["words"], rng.capture(cuda=False)["numpy"]["words"])
    finally:
        np.random.set_bit_generator(before)


class _Number(float):
    """As a value of a type of its own is, it is not told by one look."""


class _Items(list[Any]):
    """As above."""


def _slowly(value: Any) -> Any:
    """The same value, of subclasses."""
    if isinstance(value, dict):
        return OrderedDict((key, _slowly(item)) for key, item in value.items())
    if isinstance(value, list):
        return _Items(map(_slowly, value))
    if isinstance(value, tuple):
        return tuple(map(_slowly, value))
    return _Number(value) if isinstance(value, float) else value


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.sampled_from(["$tensor", "a/b"]), inner)
        | st.dictionaries(st.integers() | st.text(), inner)
    ),
)


@given(_plain)
def test_what_is_told_by_one_look_is_encoded_as_all_else(value: Any) -> None:
    assert repr(tree.encode(value, "", {})) == repr(tree.encode(_slowly(value), "", {}))


def test_a_tensor_in_plain_values_has_the_path_of_its_keys() -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree.encode({"a/b": [1.0, {"c": torch.ones(1)}], "d": (float("inf"), torch.ones(2))}, "kept", tensors)
    assert list(tensors) == ["kept/a%2Fb/1/c", "kept/d/1"]


@pytest.mark.parametrize("beside", [None, 3, [torch.zeros(1)]])
def test_a_write_to_a_moment_counts_beside_whatever_an_optimizer_keeps(beside: Any) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    optimizer.state[weight] = {"momentum_buffer": torch.ones(2)} | ({"beside": beside} if beside else {})
    before = writers.versions_of([weight], optimizer)
    optimizer.state[weight]["momentum_buffer"].mul_(0.5)
    assert writers.versions_of([weight], optimizer) != before
