"""Pins while a run goes on: what is pinned stays, and nothing else is different for it."""

import errno
from pathlib import Path

import pytest
from toy import Toy, facts, require_same, train

from rollback.checkpoints import pins, ring
from rollback.facts.training import Attached, Evicted, Planned
from rollback.rundir.paths import RunPaths

TOY = Toy(samples=320, settings={"keep": 3})
FIRST, SECOND = "c000000-s00000000", "c000001-s00000010"


def pin_at(run: Path, batch: int, *names: str) -> object:
    def hook(_guard: object, position: int) -> None:
        if position == batch:
            for name in names:
                pins.pin(RunPaths(run), name)

    return hook


def unpin_at(run: Path, batch: int, *names: str) -> object:
    def hook(_guard: object, position: int) -> None:
        if position == batch:
            for name in names:
                pins.unpin(RunPaths(run), name)

    return hook


def evicted(run: Path) -> list[str]:
    return [fact.checkpoint for fact in facts(run, Evicted)]


def test_a_pinned_checkpoint_stays_and_the_others_come_and_go_as_ever(tmp_path: Path) -> None:
    usual, run = tmp_path / "usual", tmp_path / "run"
    undisturbed = train(TOY, usual)
    ended = train(TOY, run, hook=pin_at(run, 15, SECOND))
    require_same(ended, undisturbed, "with a pin")
    assert ring.names(RunPaths(run)) == [SECOND, *ring.names(RunPaths(usual))]
    assert evicted(run) == [name for name in evicted(usual) if name != SECOND]


def test_what_is_unpinned_leaves_with_the_next_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pins_first = pin_at(run, 15, FIRST, SECOND)
    lets_go = unpin_at(run, 65, SECOND)

    def hook(guard: object, position: int) -> None:
        pins_first(guard, position)
        lets_go(guard, position)

    train(TOY, run, hook=hook)
    left = evicted(run)
    assert SECOND in left
    assert left.index(SECOND) > 0
    assert FIRST not in left
    assert ring.names(RunPaths(run))[0] == FIRST


def test_what_the_disk_does_not_let_go_leaves_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    usual, run, evict, refused = tmp_path / "usual", tmp_path / "run", ring.evict, []
    train(TOY, usual)

    def refuse_once(paths: RunPaths, name: str) -> bool:
        if not refused:
            refused.append(name)
            raise OSError(errno.EROFS, "Read-only file system")
        return evict(paths, name)

    monkeypatch.setattr(ring, "evict", refuse_once)
    train(TOY, run)
    assert f"evicting checkpoint {refused[0]}" in capfd.readouterr().err
    assert ring.names(RunPaths(run)) == ring.names(RunPaths(usual))
    assert sorted(evicted(run)) == sorted(evicted(usual))


def test_a_resumed_run_finds_the_pinned_one_again_and_lets_it_go_when_it_is_unpinned(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(TOY.but(max_steps=45), run, hook=pin_at(run, 15, SECOND))
    assert SECOND in ring.names(RunPaths(run))
    pins.unpin(RunPaths(run), SECOND)
    train(TOY, run)
    assert facts(run, Attached)[-1].checkpoint != SECOND
    assert SECOND not in ring.names(RunPaths(run))
    assert evicted(run).count(SECOND) == 1


def test_a_pinned_checkpoint_beyond_a_restored_one_stays_on_disk_and_is_never_used_again(tmp_path: Path) -> None:
    toy = TOY.but(nan=(44,)).with_settings(keep=8)
    run, beyond = tmp_path / "run", "c000004-s00000040"
    undisturbed = train(toy, tmp_path / "usual")
    ended = train(toy.but(max_steps=60), run, hook=pin_at(run, 43, beyond))
    (plan,) = facts(run, Planned)
    assert beyond in plan.discards
    assert beyond in ring.names(RunPaths(run))
    ended = train(toy, run)
    require_same(
        {name: text for name, text in ended.items() if name.startswith(("/model", "/optimizer"))},
        {name: text for name, text in undisturbed.items() if name.startswith(("/model", "/optimizer"))},
        "with a pinned checkpoint that was discarded",
    )
    assert beyond in ring.names(RunPaths(run))
    assert beyond not in evicted(run)
