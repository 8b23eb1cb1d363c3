"""A crash after any number of file operations leaves the old checkpoint or the new one, never neither.

The operations of a change to the ring are counted; then, for every N, the change is made again and the process "dies"
at its Nth operation, or the power fails. After what the next attempt does first (`sweep`) the ring must be whole.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import LAYOUTS, damage, lay_out_as, whole, write_checkpoint
from mortal import Died, Mortal
from rollback.checkpoints import ring
from rollback.rundir.paths import RunPaths


@pytest.fixture(params=["the process dies", "the power fails", "the power fails and names are lost"])
def mortal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Mortal:
    mortal = Mortal(monkeypatch)
    if request.param == "the process dies":
        monkeypatch.setattr(mortal, "lose_power", lambda root: None)
    elif request.param == "the power fails and names are lost":
        monkeypatch.setattr(mortal, "lose_power", mortal.lose_names)
    return mortal


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out_as(request.param, monkeypatch)


def for_every_crash(
    mortal: Mortal,
    tmp_path: Path,
    prepare: Callable[[RunPaths], Any],
    change: Callable[[RunPaths], object],
    judge: Callable[[RunPaths], None],
) -> int:
    """Die at every operation of `change`, each time in a fresh directory; now and then in the sweep too; then judge.

    And die behind the last one: what `change` did is done then.
    """

    def change_and_die(paths: RunPaths) -> None:
        change(paths)
        raise Died

    paths = RunPaths(tmp_path / "undisturbed")
    paths.root.mkdir()
    prepare(paths)
    total = mortal.live(lambda: change(paths))
    done = ring.names(paths)
    judge(paths)
    for at in range(1, total + 2):
        paths = RunPaths(tmp_path / f"dies-at-{at}")
        paths.root.mkdir()
        prepare(paths)
        mortal.die(at, lambda paths=paths: change_and_die(paths))  # type: ignore[misc]
        mortal.lose_power(paths.root)
        assert at <= total or ring.names(paths) == done
        if at % 3 == 0 and any(path.name.startswith(".") for path in paths.ring.iterdir()):
            mortal.die(1, lambda paths=paths: ring.sweep(paths))  # type: ignore[misc]
        ring.sweep(paths)
        assert not [path for path in paths.ring.iterdir() if path.name.startswith(".")]
        judge(paths)
    return total


@pytest.mark.usefixtures("layout")
def test_dying_while_a_checkpoint_is_written_leaves_the_old_one_or_both(mortal: Mortal, tmp_path: Path) -> None:
    old, new = "c000000-s00000010", "c000001-s00000020"
    seen = set()

    def judge(paths: RunPaths) -> None:
        names = ring.names(paths)
        assert names in ([old], [old, new])
        assert all(whole(paths, name) for name in names)
        seen.add(len(names))
        later = write_checkpoint(paths, 2, 30)
        assert ring.names(paths) == [*names, later]

    total = for_every_crash(
        mortal,
        tmp_path,
        lambda paths: write_checkpoint(paths, 0, 10),
        lambda paths: write_checkpoint(paths, 1, 20),
        judge,
    )
    assert seen == {1, 2}
    assert total > 12


def test_dying_while_the_first_checkpoint_is_written_leaves_none_or_a_whole_one(mortal: Mortal, tmp_path: Path) -> None:
    def judge(paths: RunPaths) -> None:
        assert all(whole(paths, name) for name in ring.names(paths))

    for_every_crash(
        mortal, tmp_path, lambda paths: paths.ring.mkdir(), lambda paths: write_checkpoint(paths, 0, 0), judge
    )


@pytest.mark.usefixtures("layout")
def test_dying_while_one_is_committed_and_another_evicted_leaves_at_least_one(mortal: Mortal, tmp_path: Path) -> None:
    old, new = "c000000-s00000010", "c000001-s00000020"

    def change(paths: RunPaths) -> None:
        write_checkpoint(paths, 1, 20)
        ring.evict(paths, old)

    def judge(paths: RunPaths) -> None:
        names = ring.names(paths)
        assert names in ([old], [old, new], [new])
        assert all(whole(paths, name) for name in names)

    for_every_crash(mortal, tmp_path, lambda paths: write_checkpoint(paths, 0, 10), change, judge)


def test_dying_while_one_is_quarantined_loses_neither_it_nor_a_sound_one(mortal: Mortal, tmp_path: Path) -> None:
    sound, bad, worse = "c000000-s00000010", "c000001-s00000020", "c000002-s00000030"

    def prepare(paths: RunPaths) -> None:
        for seq in range(3):
            name = write_checkpoint(paths, seq, 10 + 10 * seq)
            if seq:
                damage(paths.checkpoint(name) / "rank-00001.safetensors")
        ring.quarantine(paths, worse)

    def judge(paths: RunPaths) -> None:
        held = ring.names(paths)
        kept = sorted(path.name for path in paths.quarantine.iterdir()) if paths.quarantine.exists() else []
        assert whole(paths, sound)
        assert (bad in held) != (bad in kept)
        assert worse in kept
        if bad in held:
            ring.quarantine(paths, bad)
        assert ring.names(paths) == [sound]
        assert sorted(path.name for path in paths.quarantine.iterdir()) == [bad, worse]

    for_every_crash(mortal, tmp_path, prepare, lambda paths: ring.quarantine(paths, bad), judge)
