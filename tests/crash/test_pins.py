"""Pins: a pinned checkpoint is never evicted, however the operator's command and rank 0 get in each other's way."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import whole, write_checkpoint
from mortal import OPERATIONS, Mortal
from rollback.checkpoints import pins, ring
from rollback.errors import UsageError
from rollback.rundir.paths import RunPaths

OLD, NEW = "c000000-s00000010", "c000001-s00000020"
Act = Callable[[RunPaths], object]


def fresh_ring(root: Path) -> RunPaths:
    paths = RunPaths(root)
    paths.root.mkdir()
    for seq in range(2):
        write_checkpoint(paths, seq, 10 + 10 * seq)
    return paths


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    paths = fresh_ring(tmp_path / "run")
    pins.pin(paths, OLD)
    pins.pin(paths, OLD)
    assert pins.pinned(paths) == [OLD]
    assert not ring.evict(paths, OLD)
    assert ring.evict(paths, NEW)
    assert ring.names(paths) == [OLD]
    assert whole(paths, OLD)
    pins.unpin(paths, OLD)
    assert ring.evict(paths, OLD)
    assert ring.names(paths) == pins.pinned(paths) == []


@pytest.mark.parametrize("name", ["c000009-s00000090", "../elsewhere", "", "."])
def test_what_is_not_in_the_ring_cannot_be_pinned_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    paths = fresh_ring(tmp_path / "run")
    with pytest.raises(UsageError, match="there is no checkpoint"):
        pins.pin(paths, name)
    assert not paths.pins.exists()


def test_what_is_not_pinned_cannot_be_unpinned(tmp_path: Path) -> None:
    paths = fresh_ring(tmp_path / "run")
    pins.pin(paths, NEW)
    with pytest.raises(UsageError, match=f"{OLD} is not pinned") as raised:
        pins.unpin(paths, OLD)
    assert raised.value.hint == f"pinned: {NEW}"


def test_where_it_cannot_be_told_whether_it_is_pinned_it_stays(tmp_path: Path) -> None:
    paths = fresh_ring(tmp_path / "run")
    paths.pins.write_text("not a directory")
    with pytest.raises(OSError, match="Not a directory"):
        ring.evict(paths, OLD)
    assert whole(paths, OLD)


def interleaved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outer: Act, inner: Act
) -> Iterator[tuple[RunPaths, bool, bool]]:
    """Do `outer` once for each of its file operations, with all of `inner` right before that operation.

    Yields the run and whether outer and inner went through (False: told that there is no such checkpoint).
    """
    count, at, paths, went = 0, 0, RunPaths(tmp_path), False

    def through(act: Act) -> bool:
        try:
            return act(paths) is not False
        except UsageError:
            return False

    def watched(really: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, went
            if threading.current_thread() is not threading.main_thread():  # what another test has left behind
                return really(*args, **kwargs)
            count += 1
            if count == at:
                went = through(inner)
            return really(*args, **kwargs)

        return operation

    for name in [*OPERATIONS, "lstat"]:
        monkeypatch.setattr(f"os.{name}", watched(getattr(__import__("os"), name)))
    while count >= at:
        paths = fresh_ring(tmp_path / f"at-{at}")
        count, at, went = 0, at + 1, False
        outer_went = through(outer)
        if count >= at:
            yield paths, outer_went, went


def evict(paths: RunPaths) -> object:
    return ring.evict(paths, OLD)


def pin(paths: RunPaths) -> object:
    return pins.pin(paths, OLD)


def require_kept_if_pinned(paths: RunPaths, pinned: bool) -> None:
    ring.sweep(paths)
    assert pinned == (pins.pinned(paths) == [OLD])
    if pinned:
        assert OLD in ring.names(paths)
    assert all(whole(paths, name) for name in ring.names(paths))


def test_pinning_at_any_moment_of_an_eviction_keeps_the_checkpoint_or_says_that_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = set()
    for paths, evicted, pinned in interleaved(monkeypatch, tmp_path, evict, pin):
        require_kept_if_pinned(paths, pinned)
        assert evicted != pinned
        seen.add(pinned)
    assert seen == {True, False}


def test_an_eviction_at_any_moment_of_pinning_keeps_the_checkpoint_or_the_pin_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = set()
    for paths, pinned, evicted in interleaved(monkeypatch, tmp_path, pin, evict):
        require_kept_if_pinned(paths, pinned)
        assert evicted != pinned
        seen.add(pinned)
    assert seen == {True, False}


def test_dying_at_any_moment_of_an_eviction_keeps_what_was_pinned_in_sight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pin comes when rank 0 has just found none; then rank 0 dies."""
    mortal = Mortal(monkeypatch)

    def evict_unaware(paths: RunPaths) -> None:
        asked: list[str] = []

        def unaware(paths: RunPaths, name: str) -> bool:
            asked.append(name)
            return pins.is_pinned(paths, name) if len(asked) > 1 else False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "is_pinned", unaware)
            assert not ring.evict(paths, OLD)

    def pinned_ring(root: Path) -> RunPaths:
        paths = fresh_ring(root)
        pins.pin(paths, OLD)
        return paths

    paths = pinned_ring(tmp_path / "undisturbed")
    total = mortal.live(lambda: evict_unaware(paths))
    assert total >= 4
    for at in range(1, total + 1):
        paths = pinned_ring(tmp_path / f"dies-at-{at}")
        mortal.die(at, lambda paths=paths: evict_unaware(paths))  # type: ignore[misc]
        require_kept_if_pinned(paths, True)
