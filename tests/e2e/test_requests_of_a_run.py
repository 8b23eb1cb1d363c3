"""What operators ask of a run: carried out at a step's end, at the next start, or refused with a reason."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest
from asking import answers, asking, hand_in
from attempts import DIED, Forker
from selection import soak
from toy import Hook, Toy, consumed, facts, history, require_same, same_skips_from_the_start, skipped, train

from rollback import Guard
from rollback.checkpoints import pins, tiers
from rollback.control.asking import rewind_request
from rollback.facts.history import Case
from rollback.facts.training import (
    Answered,
    BecameGood,
    Concluded,
    Evicted,
    Incident,
    Planned,
    Quarantined,
    Requested,
    Restored,
    SampleQuarantine,
    SkipAdded,
    Stopped,
    Window,
)
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.ring.in_run import RingInRun
from rollback.rundir.journal import journal
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import names

TOY = Toy(280, augment=True)  # 70 batches, a checkpoint every 10 steps
SKIP = (44, 48)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    return train(TOY)


@pytest.fixture(scope="module")
def as_if_never_there(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    skip = [{"first": SKIP[0], "last": SKIP[1]}]
    return train(TOY.with_settings(skip=skip), tmp_path_factory.mktemp("fresh") / "run")


def the_case(run: Path) -> Case:
    (case,) = history(run).cases
    return case


def test_a_rewind_goes_back_to_the_newest_checkpoint_at_or_before_the_step(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run = tmp_path / "run"
    portrait = train(TOY, run, hook=asking(57, lambda: hand_in(run, "rewind", to=44, why="a hunch")))
    case = the_case(run)
    assert (case.incident.verdict, case.incident.cause, case.incident.explanation) == (
        "requested",
        "ann@site",
        "a hunch",
    )
    # 57 ends, its beat is read at the end of 58, and that step is the last that ends before all turn to the request.
    assert case.restored is not None
    assert (case.restored.step, case.restored.steps_lost, case.restored.route) == (40, 19, "in_process")
    assert [fact.outcome for fact in facts(run, Concluded)] == ["carried_out"]
    ((carried_out, text),) = answers(run).values()
    assert carried_out
    assert "back at step 40, batch 40" in text
    require_same(portrait, undisturbed, "rewound without a skip")


def test_a_rewind_with_a_skip_is_as_if_the_batches_had_never_been_there(
    tmp_path: Path, as_if_never_there: dict[str, str]
) -> None:
    run = tmp_path / "run"
    portrait = train(TOY, run, hook=asking(57, lambda: hand_in(run, "rewind", to=44, skip=SKIP)))
    assert sorted(skipped(run)) == list(range(SKIP[0], SKIP[1] + 1))
    require_same(portrait, as_if_never_there, "rewound with a skip")


def by_command(run: Path, at: int, to: int, then: Hook | None = None) -> tuple[Hook, list[str | None]]:
    """A hook that asks at batch `at` for a rewind as `rollback rewind` does, and the notices that it is given."""
    notices: list[str | None] = []

    def hook(guard: Guard | None, position: int) -> None:
        if then is not None:
            then(guard, position)
        if position == at and guard is not None:
            guard._loop.step_in_progress.show("training")  # or the command thinks it is not there yet
        ask(guard, position)

    def request() -> None:
        prepared = rewind_request(run, to, None, "ann@site", "")
        notices.append(prepared.notice)
        prepared.hand_in()

    ask = asking(at, request)
    return hook, notices


def test_a_rewind_may_go_back_to_what_only_a_pin_keeps(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """The ranks hold it no longer; who asks sees it in the ring."""
    run = tmp_path / "run"

    def pin(_guard: object, position: int) -> None:
        if position == 15:
            pins.pin(RunPaths(run), "c000001-s00000010")

    hook, _ = by_command(run, at=67, to=15, then=pin)
    portrait = train(TOY.with_settings(keep=3), run, hook=hook)
    assert [fact.step for fact in facts(run, Restored)] == [10], answers(run)
    assert not facts(run, Quarantined)
    require_same(portrait, undisturbed, "rewound to a pinned checkpoint")


@pytest.mark.parametrize("good", [False, *soak(True)], ids=["candidate", "good"])
def test_a_rewind_may_go_back_to_what_has_left_the_fast_tier_and_is_in_the_ring(
    tmp_path: Path, undisturbed: dict[str, str], good: bool
) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()

    def drain(_guard: object, position: int) -> None:
        if position == 25 and not facts(run, Requested):  # of a candidate, the drainer does it when an attempt ends
            (place,) = [place for place in tiers.in_slots(RunPaths(run)) if place.manifest.step == 20]
            RingInRun(RunPaths(run)).put(place.manifest, place.directory)

    hook, _ = by_command(run, at=67, to=25, then=drain)
    settings = {"keep": 3, "probation": 8 if good else 90, "checkpoint_every": "1000", "keep_durable": 9}
    portrait = train(TOY.with_settings(fast_tier=str(memory), **settings), run, hook=hook)
    assert "c000002-s00000020" in {fact.checkpoint for fact in facts(run, Evicted) if fact.tier == "fast"}
    assert ("c000002-s00000020" in {fact.checkpoint for fact in facts(run, BecameGood)}) == good
    assert [fact.step for fact in facts(run, Restored)] == [20], answers(run)
    require_same(portrait, undisturbed, "rewound to what has left the fast tier")


def test_a_rewind_may_go_back_to_what_is_in_memory_alone(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    hook, notices = by_command(run, at=57, to=44)
    portrait = train(TOY.with_settings(fast_tier=str(memory), checkpoint_every="1000"), run, hook=hook)
    assert notices == ["the newest checkpoint at or before step 44 is c000004-s00000040, of step 40"]
    assert [fact.step for fact in facts(run, Restored)] == [40], answers(run)
    require_same(portrait, undisturbed, "rewound to what is in memory")


def test_a_rewind_goes_no_further_back_than_was_told(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """The snapshot of step 60 pushes that of step 40 out of the ring, while the ranks have not come to it."""
    run = tmp_path / "run"
    hook, notices = by_command(run, at=60, to=44)
    portrait = train(TOY.with_settings(keep=3), run, hook=hook)
    assert notices == ["the newest checkpoint at or before step 44 is c000004-s00000040, of step 40"]
    ((carried_out, text),) = answers(run).values()
    assert not carried_out
    assert "refused: c000004-s00000040, of step 40, was there when this was asked, and cannot be used any more" in text
    require_same(portrait, undisturbed, "not rewound")


def test_batches_before_the_restored_checkpoint_are_part_of_the_run_and_stay_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(TOY, run, hook=asking(57, lambda: hand_in(run, "rewind", to=44, skip=(38, 45))))
    assert history(run).skip_list == [Window(first=40, last=45)]


def test_a_skip_passes_over_what_is_still_to_come(tmp_path: Path) -> None:
    run, toy = tmp_path / "run", TOY.but(workers=1)
    portrait = train(toy, run, hook=asking(57, lambda: hand_in(run, "skip", skip=(50, 66), why="duplicates")))
    (added,) = facts(run, SkipAdded)
    assert (added.window, added.who, added.why) == (Window(first=59, last=66), "ann@site", "duplicates")
    assert sorted(skipped(run)) == list(range(59, 67))
    require_same(portrait, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "skipped")


def test_samples_are_left_out_and_taken_in_again_as_an_operator_asks(tmp_path: Path, forker: Forker) -> None:
    """Also by a start whose attempt was killed in between: what was read is read again."""
    run, log = tmp_path / "run", tmp_path / "log"
    toy = TOY.but(samples=160, epochs=3, workers=1)
    ask = [48, {"order": "quarantine", "samples": [7, 8]}]
    assert forker.status(toy, run, log=str(log), ask=ask, die=["after", "good", 6]) == DIED
    hand_in(run, "release", samples=[8], why="mended")
    hand_in(run, "quarantine", samples=[4000])
    portrait = forker.finish(toy, run, log=log)
    first, second = facts(run, SampleQuarantine)
    assert (first.samples, first.batch, first.who) == ((7, 8), 50, "ann@site")
    assert (second.samples, second.released) == ((7,), (8,))
    assert [carried_out for carried_out, _ in answers(run).values()] == [True, True, False]
    assert "the data set has 160 samples, and no sample 4000" in list(answers(run).values())[2][1]
    assert compile_audit(read_run_contents(run)).requests[0].samples == [7, 8]
    require_same(portrait, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "told from the start")
    read = [ids for batch, ids in consumed(portrait).items() if batch >= 80]
    assert 7 not in {sample for ids in read for sample in ids}
    assert sum(map(len, read)) == 160


def test_a_sample_that_is_left_out_again_is_so_in_a_run_that_is_told_from_the_start(tmp_path: Path) -> None:
    run, toy = tmp_path / "run", TOY.but(samples=160, epochs=5)
    orders = [(30, "quarantine"), (70, "release"), (100, "quarantine")]
    hooks = [asking(at, partial(hand_in, run, order, samples=[7])) for at, order in orders]

    def hook(guard: Guard | None, position: int) -> None:
        for ask in hooks:
            ask(guard, position)

    portrait = train(toy, run, hook=hook)
    assert [fact.samples for fact in facts(run, SampleQuarantine)] == [(7,), (), (7,)]
    require_same(portrait, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "told from the start")


def test_an_operator_s_order_leaves_what_was_ordered_for_later_batches_as_it_is(tmp_path: Path) -> None:
    """Also where another run is told from the start what this one left out."""
    lists = [{"batch": 60, "samples": [7]}, {"batch": 90, "samples": []}]
    run, toy = tmp_path / "run", TOY.but(samples=160, epochs=5).with_settings(skip_samples=lists)
    ask = asking(30, lambda: hand_in(run, "quarantine", samples=[9]))
    portrait = train(toy, run, hook=ask)
    *given, asked, again, at_last = facts(run, SampleQuarantine)
    assert [(fact.batch, fact.samples) for fact in given] == [(60, (7,)), (90, ())]
    assert asked.batch < 60
    assert [fact.samples for fact in (asked, again, at_last)] == [(9,), (7, 9), (9,)]
    read = consumed(portrait)
    assert 7 not in {sample for batch in range(60, 90) for sample in read[batch]}
    assert 9 not in {sample for batch, ids in read.items() if batch >= asked.batch for sample in ids}
    require_same(portrait, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "told from the start")


def test_a_loader_without_indices_leaves_no_sample_out(tmp_path: Path) -> None:
    run, toy = tmp_path / "run", Toy(loader="iterator", max_steps=40)
    train(toy, run, hook=asking(10, lambda: hand_in(run, "quarantine", samples=[7])))
    ((carried_out, text),) = answers(run).values()
    assert not carried_out
    assert "no data set indices" in text


def test_a_stop_saves_and_leaves_a_run_that_goes_on_exactly(
    tmp_path: Path, forker: Forker, undisturbed: dict[str, str]
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    assert forker.status(TOY, run, log=str(log), ask=[33, {"order": "stop", "why": "maintenance"}]) == 75
    (stopped,) = facts(run, Stopped)
    assert (stopped.reason, stopped.step) == ("preempted", 35)
    assert stopped.account == "asked to stop by ann@site (maintenance)"
    assert RunPaths(run).checkpoint(stopped.checkpoint).is_dir()
    assert [carried_out for carried_out, _ in answers(run).values()] == [True]
    require_same(forker.finish(TOY, run, log=log), undisturbed, "stopped and started again")
    assert len(facts(run, Stopped)) == 1, "the stop ended the next launch too"


def test_two_requests_at_once_are_carried_out_in_their_order(tmp_path: Path) -> None:
    run = tmp_path / "run"
    requests = (lambda: hand_in(run, "rewind", to=30), lambda: hand_in(run, "skip", skip=(35, 39)))
    portrait = train(TOY, run, hook=asking(57, *requests))
    taken = facts(run, Requested)
    assert [(fact.order, fact.step) for fact in taken] == [("rewind", 59), ("skip", 30)]
    assert [carried_out for carried_out, _ in answers(run).values()] == [True, True]
    require_same(portrait, same_skips_from_the_start(TOY, run, tmp_path / "fresh"), "rewound, then told to skip")


def without_room(disk: pytest.MonkeyPatch, asks: Hook, first: int, last: int | None) -> Hook:
    """A hook that asks, and lets the journal take nothing from one batch on, and all again at another."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def hook(guard: Guard | None, position: int) -> None:
        if position == first:
            disk.setattr(journal, "append_lines", full)
        if position == last:
            disk.undo()
        asks(guard, position)

    return hook


def test_what_the_journal_has_no_room_for_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rank 0 died before there is room, checkpoints from behind the skipped batches were left, and no word of
    these."""
    run = tmp_path / "run"
    requests = (lambda: hand_in(run, "skip", skip=(54, 57)), lambda: hand_in(run, "quarantine", samples=[277]))
    portrait = train(TOY, run, hook=without_room(monkeypatch, asking(50, *requests), 45, 60))
    (carried_out, text), _ = answers(run).values()
    assert not carried_out
    assert "batches 54:57 cannot be skipped any more" in text
    assert not skipped(run)
    (left_out,) = facts(run, SampleQuarantine)
    assert left_out.batch >= 60, "carried out when there was room again"
    require_same(portrait, same_skips_from_the_start(TOY, run, tmp_path / "fresh"), "told of its own record")


def test_a_stop_waits_for_no_room_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor behind an order that does."""
    run, came_to = tmp_path / "run", list[int]()
    ask = asking(50, lambda: hand_in(run, "skip", skip=(54, 57)), lambda: hand_in(run, "stop"))

    def asks(guard: Guard | None, position: int) -> None:
        came_to.append(position)
        ask(guard, position)

    with pytest.raises(SystemExit):
        train(TOY, run, hook=without_room(monkeypatch, asks, 45, None))
    assert max(came_to) < 54


def test_a_request_waits_while_an_incident_is_answered(tmp_path: Path) -> None:
    """The NaN of batch 57 and the request of batch 56 ride on neighbouring beats."""
    run, toy = tmp_path / "run", TOY.but(nan=(57,))
    portrait = train(toy, run, hook=asking(56, lambda: hand_in(run, "skip", skip=(62, 64))))
    kinds = [fact.kind for fact in facts(run, Incident, Restored, Requested, Answered)]
    assert kinds == ["incident", "restored", "request", "answer"]
    require_same(portrait, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "incident and request")


def test_what_a_trouble_after_a_rewind_is_a_repeat_of(tmp_path: Path) -> None:
    """A rewind that somebody asked for answers no trouble, so the next trouble is a first one."""
    run, toy = tmp_path / "run", TOY.but(nan=(43,))
    train(toy, run, hook=asking(37, lambda: hand_in(run, "rewind", to=30)))
    _, plan = facts(run, Planned)
    assert (plan.repeats, plan.escalation) == (None, 0)
    assert [fact.outcome for fact in facts(run, Concluded)] == ["carried_out", "recovered"]


REFUSED = {
    "not there yet": ({"order": "rewind", "to": 90}, "has not come to step 90"),
    "before the ring": ({"order": "rewind", "to": 5}, "no checkpoint at or before step 5"),
    "in the past": ({"order": "skip", "skip": (20, 30)}, "rollback rewind RUN --to STEP --skip 20:30"),
    "before the checkpoint": ({"order": "rewind", "to": 44, "skip": (20, 30)}, "begins with batch 40"),
    "of another launch": ({"order": "stop", "launch": "elsewhere:1:then"}, "a launch that is over"),
}


def test_what_cannot_be_done_is_refused_with_the_reason_and_training_goes_on(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run, toy = tmp_path / "run", TOY.with_settings(keep=3)
    handed_in: dict[str, str] = {}

    def all_of_them() -> None:
        for name, (request, _) in REFUSED.items():
            handed_in[name] = hand_in(run, **request)  # type: ignore[arg-type]

    portrait = train(toy, run, hook=asking(57, all_of_them))
    for name, (_, reason) in REFUSED.items():
        carried_out, text = answers(run)[handed_in[name]]
        assert not carried_out
        assert reason in text
    assert not facts(run, Incident, SkipAdded)
    require_same(portrait, undisturbed, "refused")


def rubbish(run: Path) -> None:
    folder = run / "requests"
    folder.mkdir()
    (folder / "000000-00000000.json").write_text('{"order": "rewind"}')
    (folder / "000001-00000000.json").write_text("[" * 100_000)
    (folder / "000002-00000000.json").write_bytes(b"\xff\x00" * 50)
    os.mkfifo(folder / "000003-00000000.json")
    (folder / "000004-00000000.json").symlink_to("/dev/zero")
    (folder / "000005-00000000.json").mkdir()
    (folder / "000006-00000000.json").write_bytes(b" " * (1 << 20))
    (folder / "000007-00000000.json").write_text('{"order": "stop", "who": "x", "at": "", "to": 1e400}')
    (folder / "000040-00000000.json").write_text('{"order": "stop", "who": "\\u001b[2J", "at": ""}')
    (folder / "rm -rf.json").write_text("not a name of a request")
    for number in range(8, 40):
        (folder / f"{number:06d}-00000000.json").write_text("")


def test_rubbish_among_the_requests_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    run = tmp_path / "run"
    portrait = train(TOY, run, hook=asking(37, lambda: rubbish(run), lambda: hand_in(run, "skip", skip=(62, 64))))
    told = answers(run)
    assert len(told) == 42
    assert not any("\x1b" in text for _, text in told.values())
    assert [name for name, (carried_out, _) in told.items() if carried_out] == names(RunPaths(run))[-1:]
    require_same(portrait, same_skips_from_the_start(TOY, run, tmp_path / "fresh"), "rubbish")
    audit = compile_audit(read_run_contents(run))
    assert [entry.state for entry in audit.requests].count("refused") == 41


@pytest.mark.parametrize(
    "request_", [{"order": "rewind", "to": 44, "skip": [41, 45]}, *soak({"order": "skip", "skip": [62, 66]})]
)
def test_a_run_that_is_not_running_does_it_at_its_next_start(
    tmp_path: Path, forker: Forker, request_: dict[str, object]
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    assert forker.status(TOY, run, log=str(log), signal=[57, 9]) == -9
    hand_in(run, **request_)  # type: ignore[arg-type]
    portrait = forker.finish(TOY, run, log=log)
    taken = facts(run, Requested)
    assert [(fact.order, fact.step) for fact in taken] == [(request_["order"], 50)]
    require_same(portrait, same_skips_from_the_start(TOY, run, tmp_path / "fresh"), "at the next start")


def test_a_run_that_is_to_end_before_where_it_stands_goes_back_first_as_it_was_asked(
    tmp_path: Path, forker: Forker
) -> None:
    """No batch is left of the fewer epochs that are asked for now, before the order is carried out."""
    run, log = tmp_path / "run", tmp_path / "log"
    toy = TOY.but(samples=160, epochs=3, loop="epochs")  # 40 batches each
    assert forker.status(toy, run, log=str(log), signal=[97, 9]) == -9
    hand_in(run, "rewind", to=44, skip=[41, 45])
    shorter = toy.but(epochs=2)
    portrait = forker.finish(shorter, run, log=log)
    assert [carried_out for carried_out, _ in answers(run).values()] == [True]
    require_same(portrait, same_skips_from_the_start(shorter, run, tmp_path / "fresh"), "shortened")


@pytest.mark.parametrize(("loop", "to"), [("range", 74), *soak(("range", 34), ("epochs", 74), ("epochs", 34))])
def test_a_run_that_is_complete_goes_back_at_its_next_start(tmp_path: Path, forker: Forker, loop: str, to: int) -> None:
    """It was asked to when it was just ending. Its last pass begins again only for what the script does behind it, and
    would have no batch."""
    run, log = tmp_path / "run", tmp_path / "log"
    toy = TOY.but(samples=160, epochs=2, loop=loop).with_settings(keep=8)  # 40 batches each
    forker.finish(toy, run, log=log)
    hand_in(run, "rewind", to=to, skip=[to + 1, to + 3])
    portrait = forker.finish(toy, run, log=log)
    assert [carried_out for carried_out, _ in answers(run).values()] == [True]
    require_same(portrait, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "went back from its end")
    assert history(run).finished is not None


@pytest.mark.parametrize("kind", ["plan", "restored", *soak("request", "incident", "outcome")])
def test_a_rewind_that_a_crash_interrupts_is_carried_out_once(
    tmp_path: Path, forker: Forker, as_if_never_there: dict[str, str], kind: str
) -> None:
    """Before one fact is after the one before it."""
    run, log = tmp_path / "run", tmp_path / "log"
    ask = [57, {"order": "rewind", "to": 44, "skip": SKIP}]
    assert forker.status(TOY, run, log=str(log), ask=ask, die=["after", kind, 1]) == DIED
    portrait = forker.finish(TOY, run, log=log)
    assert len(facts(run, Requested)) == len(facts(run, Answered)) == len(facts(run, Restored)) == 1
    assert [carried_out for carried_out, _ in answers(run).values()] == [True]
    require_same(portrait, as_if_never_there, f"died after {kind}")


def test_a_stop_that_a_crash_interrupts_does_not_stop_the_next_launch(
    tmp_path: Path, forker: Forker, undisturbed: dict[str, str]
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    ask = [33, {"order": "stop"}]
    assert forker.status(TOY, run, log=str(log), ask=ask, die=["before", "stopped", 1]) == DIED
    require_same(forker.finish(TOY, run, log=log), undisturbed, "goes on")
    ((carried_out, _),) = answers(run).values()
    assert not carried_out
