"""What no state_dict has, and what no loss shows: buffers with `persistent=False`, statistics that are NaN."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from attempts import Forker
from toy import Toy, facts, require_same, same_skips_from_the_start, train

from rollback.events import Advice, Attached, Planned
from rollback.train import state


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with Forker() as forker:
        yield forker


def test_a_buffer_that_no_state_dict_has_comes_back_after_a_kill(tmp_path: Path, forker: Forker) -> None:
    toy, run, log = Toy(level="hidden"), tmp_path / "run", tmp_path / "log"
    assert forker.status(toy, run, log=str(log), signal=[68, signal.SIGKILL]) == -signal.SIGKILL
    require_same(forker.finish(toy, run, log=log), train(toy, tmp_path / "undisturbed"), "hidden level")


def test_a_nan_in_a_buffer_that_no_state_dict_has_goes_with_a_rollback(tmp_path: Path) -> None:
    toy, run = Toy(level="hidden", nan_input=(57,)), tmp_path / "run"
    ended = train(toy, run)
    assert [plan.action for plan in facts(run, Planned)] == ["rollback"]
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "hidden level")


def test_a_checkpoint_from_before_such_buffers_were_kept_is_read_and_what_it_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    toy, run = Toy(level="hidden"), tmp_path / "run"
    with monkeypatch.context() as before:
        before.setattr(state, "nonpersistent", lambda *_: {})
        train(toy.but(max_steps=40), run)
    capfd.readouterr()
    train(toy, run)
    said = [line for line in capfd.readouterr().err.splitlines() if "has no values for the buffers" in line]
    assert len(said) == 1, said
    assert "'0.level'" in said[0]
    assert facts(run, Attached)[-1].step == 40


def test_tensors_that_are_no_buffers_are_named_once(tmp_path: Path) -> None:
    toy, run = Toy(level="hidden"), tmp_path / "run"
    for steps in (20, 40):
        train(toy.but(max_steps=steps), run)
    (advice,) = facts(run, Advice)
    assert advice.code == "tensors-not-kept"
    assert "'0.plain'" in advice.text
    assert "level" not in advice.text
