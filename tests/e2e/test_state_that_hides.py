"""What no state_dict has, and what no loss shows: buffers with `persistent=False`, statistics that are NaN."""

import signal
from pathlib import Path

import pytest
from attempts import Forker
from selection import by_default, soak
from toy import Toy, facts, require_same, same_skips_from_the_start, train

from rollback.facts.training import Advice, Attached, Concluded, Dropped, Finished, Incident, Planned
from rollback.train.state import state


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


NOISES = ["torch", "numpy", "twister", "python"]


@pytest.mark.parametrize("noise", by_default(NOISES, "torch", "twister"))
def test_a_random_generator_of_the_script_s_own_comes_back_after_a_kill(
    tmp_path: Path, forker: Forker, noise: str
) -> None:
    toy = Toy(noise=noise, samples=160, epochs=3, loop="epochs")
    assert (
        forker.status(toy, tmp_path / "run", log=str(tmp_path / "log"), signal=[68, signal.SIGKILL]) == -signal.SIGKILL
    )
    ended = forker.finish(toy, tmp_path / "run", log=tmp_path / "log")
    require_same(ended, train(toy, tmp_path / "undisturbed"), noise)
    require_same(ended, train(toy), f"{noise}, without a guard")


@pytest.mark.parametrize("noise", by_default(NOISES, "numpy", "python"))
def test_a_random_generator_of_the_script_s_own_goes_with_a_rollback(tmp_path: Path, noise: str) -> None:
    """Into the epoch before, too, which the script seeds one of them for."""
    toy, run = Toy(noise=noise, samples=160, epochs=3, loop="epochs", nan=(42,)), tmp_path / "run"
    ended = train(toy, run)
    assert [plan.action for plan in facts(run, Planned)] == ["rollback"]
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), noise)


def test_tensors_that_are_no_buffers_are_named_once(tmp_path: Path) -> None:
    toy, run = Toy(level="hidden"), tmp_path / "run"
    for steps in (20, 40):
        train(toy.but(max_steps=steps), run)
    (advice,) = facts(run, Advice)
    assert advice.code == "tensors-not-kept"
    assert "'0.plain'" in advice.text
    assert "level" not in advice.text


@pytest.mark.parametrize("fast_tier", ["auto", *soak("off")])
def test_a_statistic_that_is_nan_is_in_no_checkpoint_and_is_an_incident(tmp_path: Path, fast_tier: str) -> None:
    toy, run = Toy(level="aside", nan_input=(57,)).with_settings(fast_tier=fast_tier), tmp_path / "run"
    ended = train(toy, run)
    (incident,) = facts(run, Incident)
    assert (incident.verdict, incident.rule, incident.cause) == ("nonfinite", "nonfinite-state", "the buffer '0.level'")
    assert (incident.onset_step, incident.detection_step) == (50, 59), "from the checkpoint before it on"
    assert "NaN" in incident.explanation
    (plan,) = facts(run, Planned)
    assert plan.action == "rollback"
    assert plan.step == 40
    assert plan.skip.first <= 57 <= plan.skip.last
    assert [fact.outcome for fact in facts(run, Concluded)] == ["recovered"]
    assert [fact.step for fact in facts(run, Dropped)] == [60]
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "a statistic")


def test_a_statistic_that_is_nan_at_the_very_end_is_answered_before_the_run_is_complete(tmp_path: Path) -> None:
    toy, run = Toy(level="aside", nan_input=(97,)), tmp_path / "run"
    ended = train(toy, run)
    assert [fact.action for fact in facts(run, Planned)] == ["rollback"]
    (finished,) = facts(run, Finished)
    assert finished.checkpoint is not None
    assert "nan" not in ended["/model/0.level"]
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "at the end")


def test_an_observer_is_told_of_a_statistic_that_is_nan_once_and_nothing_is_touched(tmp_path: Path) -> None:
    toy = Toy(level="aside", nan_input=(57,)).with_settings(observe_only=True)
    ended = train(toy, tmp_path / "run")
    assert [fact.action for fact in facts(tmp_path / "run", Planned)] == ["observe"]
    assert [fact.step for fact in facts(tmp_path / "run", Dropped)] == [60]
    require_same(ended, train(toy, tmp_path / "again"), "observed")
    assert "nan" in ended["/model/0.level"]


def test_what_was_infinite_on_purpose_is_no_trouble_after_a_resume_either(tmp_path: Path) -> None:
    toy, run = Toy(level="hidden"), tmp_path / "run"
    train(toy.but(max_steps=40), run, log=tmp_path / "log")
    require_same(train(toy, run, log=tmp_path / "log"), train(toy, tmp_path / "undisturbed"), "a mask")
    assert not facts(run, Incident)
