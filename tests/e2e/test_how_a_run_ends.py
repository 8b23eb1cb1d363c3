"""How a run ends: the state at the end of training is kept, the run knows that it is complete, more can be asked."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attempts import Forker
from job_results import LAUNCH
from launching import Launch, launching
from safetensors.torch import load_file
from selection import by_default, soak
from toy import Toy, facts, require_same, train, weights
from waiting import wait_for
from warm_server import run_warm

import rollback
from rollback.checkpoints import ring, tiers
from rollback.checkpoints.fast_tier import slots
from rollback.errors import ExitCode
from rollback.facts.history import fold
from rollback.facts.training import (
    Attached,
    AttemptStarted,
    Blamed,
    Committed,
    Evicted,
    FinalStateLost,
    Finished,
    RunEnded,
    Saving,
    ScriptLeft,
    StuckAtExit,
    Window,
)
from rollback.inspect.ring.at_url import ReadableRun, readable
from rollback.inspect.ring.export import export
from rollback.ring.url.fetch import fetch
from rollback.ring.url.store import Store
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.train.ending import TrainingEnd

TINY = Path(__file__).parent / "jobs" / "tiny.py"
EPOCHS = Toy(samples=120, epochs=2)  # of 30 steps each
JOBS = {
    "range": EPOCHS.but(between=True),
    "epochs": EPOCHS.but(loop="epochs", between=True),
    "a list": EPOCHS.but(loader="list"),
    "a stateful loader": EPOCHS.but(loader="stateful"),
    "epochs broken off": EPOCHS.but(loop="epochs", between=True, leave_after=17),
    "max_steps": EPOCHS.but(max_steps=43),
    "max_steps at an epoch's end": EPOCHS.but(max_steps=30),
    "a callable": Toy(loader="drawn", max_steps=43),
}


def state(portrait: dict[str, str]) -> dict[str, str]:
    """All but what was consumed, which an attempt knows of itself only."""
    return {name: text for name, text in portrait.items() if not name.startswith("/consumed")}


def more(toy: Toy) -> Toy:
    return toy.but(max_steps=70) if toy.max_steps else toy.but(epochs=4)


@pytest.mark.parametrize("last", [9, 99])
def test_an_end_of_a_run_whose_every_batch_is_skipped_is_told(
    tmp_path: Path, last: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train(Toy(samples=120).but(settings={"skip": [{"first": 0, "last": last}]}), tmp_path / "run")
    told = "nothing was trained: each of the 30 batches is skipped"
    assert (told in capsys.readouterr().err) is (last == 99)


@pytest.mark.parametrize("kind", by_default(JOBS, "range", "max_steps"))
def test_the_state_at_the_end_is_kept_and_the_same_script_has_nothing_left_to_do(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    toy, run = JOBS[kind], tmp_path / "run"
    train(toy, run)
    (finished,) = facts(run, Finished)
    newest = facts(run, Committed)[-1]
    assert (finished.checkpoint, finished.step, finished.batch) == (newest.checkpoint, newest.step, newest.batch)
    handed_out: list[int] = []
    again = train(toy, run, hook=lambda _, position: handed_out.append(position))
    assert handed_out == []
    assert facts(run, Attached)[-1].checkpoint == newest.checkpoint
    assert facts(run, Finished)[-1] == finished
    assert facts(run, Committed)[-1] == newest
    assert "nothing was left to train behind step" in (said := capsys.readouterr().err)
    assert "another run directory for another training" in said
    require_same(weights(again), weights(train(toy, tmp_path / "once more")), kind)


@pytest.mark.parametrize(
    "kind", by_default(JOBS, "epochs", "epochs broken off", "max_steps at an epoch's end", "a callable")
)
def test_where_more_is_asked_for_it_goes_on_from_the_end_bit_for_bit(tmp_path: Path, kind: str) -> None:
    toy, run = JOBS[kind], tmp_path / "run"
    train(toy, run)
    at = facts(run, Finished)[0].step
    extended = train(more(toy), run)
    assert [fact.step for fact in facts(run, Attached)] == [0, at]
    require_same(state(extended), state(train(more(toy), tmp_path / "at once")), kind)


@pytest.mark.parametrize("loop", ["epochs", *soak("range")])
def test_a_rollback_behind_the_end_of_a_complete_run_may_go_back_to_that_end(tmp_path: Path, loop: str) -> None:
    toy, run = EPOCHS.but(loop=loop, between=True), tmp_path / "run"
    train(toy, run)
    bad = toy.but(epochs=4, nan=(80,)).with_settings(policy="surgical", skip_after=0, rewind=0, snapshot_every=50)
    ended = train(bad, run)
    fresh = train(bad.but(nan=()).with_settings(skip=[{"first": 80, "last": 80}]), tmp_path / "fresh")
    assert [fact.step for fact in facts(run, rollback.facts.training.Restored)] == [60]
    names = [name for name in weights(fresh) if loop == "epochs" or name.startswith("/optimizer/param_groups")]
    require_same({n: ended[n] for n in names}, {n: fresh[n] for n in names}, loop)


def test_what_is_kept_behind_an_epoch_that_was_not_the_last_is_let_go_of(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(EPOCHS.but(epochs=3).with_settings(fast_tier="off"), run)
    kept = {fact.step: fact.checkpoint for fact in facts(run, Committed)}
    gone = {fact.checkpoint for fact in facts(run, Evicted)}
    assert {kept[30], kept[60]} <= gone
    assert kept[90] in ring.names(RunPaths(run))


def test_a_crash_between_two_epochs_goes_on_in_a_pass_that_has_a_batch(tmp_path: Path, forker: Forker) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    toy = EPOCHS.but(epochs=3, loop="epochs", between=True)
    assert forker.status(toy, run, log=str(log), die=["after", "committed", 4]) != 0
    assert facts(run, Committed)[-1].step == 30, "behind the first epoch"
    ended = forker.finish(toy, run, log=log)
    assert facts(run, Attached)[-1].step == 20
    require_same(ended, train(toy, tmp_path / "undisturbed"), "after the crash")


@pytest.mark.parametrize(
    ("max_steps", "hint"), [(None, "let the guard end the loop: max_steps=N"), (17, "Take the `break` out of the loop")]
)
def test_the_last_step_of_a_script_that_breaks_off_is_judged_where_that_needs_no_peer_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], max_steps: int | None, hint: str
) -> None:
    run = tmp_path / "run"
    train(EPOCHS.but(epochs=1, leave_after=17, max_steps=max_steps), run)
    assert not facts(run, Finished)
    (left,) = facts(run, ScriptLeft)
    assert (left.step, left.unjudged) == (17, 0)
    judged = [json.loads(line)["step"] for line in RunPaths(run).metrics.read_text().splitlines()]
    assert judged == list(range(17))
    said = capsys.readouterr().err
    assert "has left its loop over the guard, at step 17" in said
    assert hint in said


def test_a_script_that_breaks_off_without_any_checkpoint_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = EPOCHS.but(epochs=1, leave_after=17).with_settings(observe_only=True, snapshot_every=0)
    train(toy, tmp_path / "run")
    assert "at step 17. No checkpoint has been taken. To end there" in capsys.readouterr().err


def test_a_script_that_was_told_to_stop_and_leaves_at_an_epoch_s_end_is_not_done_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own handler has it leave between two epochs. Whether it would have trained another one, nobody knows."""
    run, before = tmp_path / "run", signal.signal(signal.SIGTERM, lambda *_: None)
    toy = EPOCHS.but(epochs=1, loop="epochs", between=True)

    def tell_in_the_last_batch(_: object, position: int) -> None:
        if position == 29:
            signal.raise_signal(signal.SIGTERM)

    try:
        train(toy.but(loop="range"), run, hook=tell_in_the_last_batch)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not facts(run, Finished)
    (left,) = facts(run, ScriptLeft)
    assert (left.step, left.checkpoint) == (30, facts(run, Committed)[-1].checkpoint)
    assert f"It was told to stop, and goes on from there ({left.checkpoint})" in capsys.readouterr().err
    ended = train(toy.but(epochs=2), run)
    assert [fact.step for fact in facts(run, Attached)] == [0, 30]
    require_same(state(ended), state(train(toy.but(epochs=2), tmp_path / "at once")), "resumed")


def test_a_script_that_was_told_to_stop_behind_its_last_epoch_is_done_when_it_comes_again(tmp_path: Path) -> None:
    """Its loop over `range` has no batch left then, and no other word of that this was the end."""
    run, before = tmp_path / "run", signal.signal(signal.SIGTERM, lambda *_: None)

    def tell_in_the_last_batch(_: object, position: int) -> None:
        if position == 59:
            signal.raise_signal(signal.SIGTERM)

    try:
        first = train(EPOCHS, run, hook=tell_in_the_last_batch)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not facts(run, Finished)
    (left,) = facts(run, ScriptLeft)
    again = train(EPOCHS, run)
    (finished,) = facts(run, Finished)
    assert (finished.step, finished.checkpoint) == (60, left.checkpoint)
    require_same(state(again), state(first), "at its end")


def test_an_exception_in_mid_run_is_no_end(tmp_path: Path) -> None:
    def raise_at_40(_: object, position: int) -> None:
        if position == 40:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(EPOCHS, tmp_path / "run", hook=raise_at_40)
    assert not facts(tmp_path / "run", Finished, ScriptLeft)


def test_where_the_state_at_the_end_cannot_be_kept_that_is_said_with_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, commit = tmp_path / "run", ring.commit

    def full(paths: RunPaths, manifest: object) -> None:
        if getattr(manifest, "step", 0) > 55:
            raise OSError(28, "No space left on device")
        commit(paths, manifest)  # type: ignore[arg-type]

    monkeypatch.setattr("rollback.checkpoints.ring.commit", full)
    toy = EPOCHS.with_settings(fast_tier="off")
    train(toy, run)
    assert not facts(run, Finished)
    (lost,) = facts(run, FinalStateLost)
    assert (lost.step, lost.steps) == (60, 10)
    assert "the last 10 updates are in no checkpoint" in capsys.readouterr().err
    monkeypatch.undo()
    again = train(toy, run)
    assert facts(run, Finished)[-1].step == 60, "once there is room, the same script trains them again"
    require_same(weights(again), weights(train(toy, tmp_path / "fresh")), "trained again")


def test_where_memory_does_not_take_the_state_at_the_end_the_run_directory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, commit = tmp_path / "run", slots.commit
    (tmp_path / "memory").mkdir()

    def full(paths: slots.SlotPaths, number: int, manifest: object, here: object) -> None:
        if getattr(manifest, "step", 0) > 55:
            raise OSError(28, "No space left on device")
        commit(paths, number, manifest, here)  # type: ignore[arg-type]

    monkeypatch.setattr("rollback.checkpoints.fast_tier.slots.commit", full)
    train(EPOCHS.with_settings(fast_tier=str(tmp_path / "memory")), run)
    (finished,) = facts(run, Finished)
    assert facts(run, Committed)[-1].tier == "durable"
    assert finished.checkpoint in ring.names(RunPaths(run))
    assert facts(run, Saving)[-1].slots == 0


@pytest.mark.parametrize("where", ["url", *soak("run directory")])
def test_a_complete_run_leaves_nothing_in_memory_whatever_attempt_made_it(tmp_path: Path, where: str) -> None:
    """A crash between a slot's commit and its line in the journal leaves one that nobody would ever copy."""
    run, base, url = tmp_path / "run", tmp_path / "memory", tmp_path / "bucket"
    base.mkdir()
    toy = EPOCHS.with_settings(fast_tier=str(base), **({"ring": f"file://{url}"} if where == "url" else {}))

    def commit_unseen(guard: rollback.Guard | None, position: int) -> None:
        if position == 59:
            newest = max(tiers.in_slots(RunPaths(run)), key=lambda place: place.manifest.seq)
            unseen = newest.directory.with_name("slot-77")
            shutil.copytree(newest.directory, unseen)
            manifest = newest.manifest.model_copy(update={"seq": 999, "name": f"c000999-s{newest.manifest.step:08d}"})
            (unseen / "manifest.json").write_bytes(manifest.to_json())
            assert tiers.fast_tier_of(RunPaths(run)) is not None

    train(toy, run, hook=commit_unseen)
    (finished,) = facts(run, Finished)
    assert finished.checkpoint in ring.names(RunPaths(run)), "all that is worth keeping"
    assert not any(base.iterdir())
    if where == "url":
        elsewhere = RunPaths(tmp_path / "elsewhere")
        elsewhere.root.mkdir()
        fetch(Store(f"file://{url}"), elsewhere, print)
        assert fold(read_journal(elsewhere.train_journal).records).final == finished.checkpoint
        assert finished.checkpoint in ring.names(elsewhere)
        with readable(f"file://{url}") as place:
            assert export(place, None, tmp_path / "model.safetensors").checkpoint == finished.checkpoint


def test_export_takes_the_final_state_of_a_complete_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    seen: list[torch.Tensor] = []

    def see(guard: rollback.Guard | None, position: int) -> None:
        assert guard is not None
        seen[:] = [guard._loop.state.model.state_dict()["0.weight"]]  # the live tensor

    train(EPOCHS, run, hook=see)
    done = export(ReadableRun.at(run), None, tmp_path / "model.safetensors")
    assert (done.step, done.checkpoint) == (60, facts(run, Finished)[0].checkpoint)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], seen[0])
    assert export(ReadableRun.at(run), "newest-good", tmp_path / "good.safetensors").step < 60


# Under a supervisor ----------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Launch]:
    with launching(tmp_path, with_torchrun=False, script=TINY) as launch:
        yield launch


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Launch]:
    with launching(tmp_path, with_torchrun=False) as launch:
        yield launch


def test_the_same_command_on_a_complete_run_says_so_and_starts_nothing(tiny: Launch) -> None:
    assert tiny.finish("")[0] == ExitCode.DONE
    assert tiny.facts(RunEnded)[-1].reason == "training is complete at step 6"
    code, output = tiny.finish("")
    assert code == ExitCode.DONE
    assert "the run is complete: trained to step 6" in output
    assert "nothing left to do" in output
    assert len(tiny.facts(AttemptStarted)) == 1
    code, output = tiny.finish("--keep 5")
    assert code == ExitCode.DONE
    assert "What differs now: argument --keep: not given -> 5; the ranks go on" in output
    assert "nothing was left to train behind step 6" in output
    assert len(tiny.facts(AttemptStarted)) == 2
    assert len(facts(tiny.run, Committed)) == len({fact.step for fact in facts(tiny.run, Committed)})


def test_a_module_whose_file_asks_for_more_since_then_goes_on(tmp_path: Path) -> None:
    """A module's name is no path, so its content is no part of the command."""
    command = [*LAUNCH, "--nproc", "1", "-m", "job"]
    for epochs, says in (
        (1, "done;"),
        (1, "nothing left to do"),
        (2, "now: the script has other content"),
    ):
        loop = f"enumerate(batch for _ in guard.epochs({epochs}) for batch in guard)"
        (tmp_path / "job.py").write_text(TINY.read_text().replace("enumerate(guard)", loop))
        os.utime(tmp_path / "job.py", (epochs, epochs))  # Python keeps what it compiled of a size and a second
        launched = run_warm(command, cwd=tmp_path, capture_output=True)
        assert launched.returncode == ExitCode.DONE, launched.stderr
        assert says in launched.stderr
    assert [fact.step for fact in facts(tmp_path / "runs" / "job", Finished)] == [6, 12]


def test_a_script_that_leaves_in_mid_run_as_if_all_were_well_is_not_done(rank: Launch) -> None:
    code, output = rank.finish("leave")
    assert code == ExitCode.FAILED, output
    assert "the script left its loop over the guard before that had ended, last seen at step 4" in output
    assert len(rank.facts(AttemptStarted)) == 1, "it would do so again"


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)", *soak("raise ZeroDivisionError")])
def test_no_way_to_leave_in_mid_run_is_told_as_finished(tmp_path: Path, how: str) -> None:
    script = tmp_path / "leaving.py"
    text = TINY.read_text().replace("    loss = (model", f"    if batch == 3:\n        {how}\n    loss = (model")
    script.write_text(f"import sys\n{text}")
    with launching(tmp_path, with_torchrun=False, script=script) as job:
        code, output = job.finish("", "--restart-budget", "0")
        assert code == ExitCode.FAILED, output
        assert ("left its loop over the guard before" in output) == how.endswith("exit(0)")
        assert not facts(job.run, Finished)


def test_a_batch_at_which_the_script_ends_itself_with_an_error_is_skipped_and_no_crash_loop(tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    text = TINY.read_text().replace(
        "    loss = (model", "    if guard.batch == 3:\n        sys.exit(1)\n    loss = (model"
    )
    script.write_text(f"import sys\n{text}")
    with launching(tmp_path, with_torchrun=False, script=script) as job:
        code, output = job.finish("", "--restart-budget", "2")
        assert code == ExitCode.DONE, output
        (blamed,) = job.facts(Blamed)
        assert isinstance(blamed, Blamed)
        assert blamed.window == Window(first=3, last=3)
        assert "SystemExit: 1" in blamed.error


def test_a_rank_that_leaves_its_loop_alone_is_named_where_its_peers_have_lost_it(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    by_itself = '    if batch == 3 and os.environ["RANK"] == "1":\n        break\n'
    script.write_text(TINY.read_text().replace("    loss = (model", f"{by_itself}    loss = (model"))
    with launching(tmp_path, with_torchrun=True, script=script) as job:
        code, output = job.finish("", "--restart-budget", "0", ranks=2)
        assert code == ExitCode.FAILED, output
        assert "rank 1 had left the script at step 3, without an error" in output


def test_ranks_that_are_through_and_do_not_end_are_ended_and_the_run_is_done(rank: Launch) -> None:
    rank.program[1] = "from rollback.supervisor.diagnosis import hang\nhang.AT_EXIT = 1.0\n" + rank.program[1]
    supervisor = rank.start("be_stuck_at_exit")
    (process,) = rank.wait_for_heartbeats(1)
    output, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.DONE, output
    (stuck,) = rank.facts(StuckAtExit)
    assert stuck.ranks == (0,)
    assert not process.is_running() or process.status() == "zombie"


def test_a_rank_that_works_on_behind_its_training_is_left_alone(rank: Launch) -> None:
    """Its guard is closed, and its signs of life go on, in its script and then in what others do at the exit."""
    rank.program[1] = "from rollback.supervisor.diagnosis import hang\nhang.AT_EXIT = 1.0\n" + rank.program[1]
    code, output = rank.finish("work_on")
    assert code == ExitCode.DONE, output
    assert not rank.facts(StuckAtExit)
    assert (rank.folder / "worked-on").exists()


def test_a_stop_is_no_end(tiny: Launch) -> None:
    supervisor = tiny.start("--hold")
    wait_for(lambda: tiny.paths.train_journal.exists() and facts(tiny.run, Attached))
    supervisor.send_signal(signal.SIGTERM)
    output, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == ExitCode.RESUMABLE, output
    assert not facts(tiny.run, Finished)
    assert tiny.finish("--hold")[0] == ExitCode.DONE
    assert facts(tiny.run, Finished)[-1].step == 6


def test_a_rank_that_keeps_its_end_shows_which_end_that_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the data end earlier on one rank than on the others, that is how they are told apart."""
    keep, seen = TrainingEnd.keep_state, []

    def look(end: TrainingEnd, *args: object, **more: object) -> None:
        seen.append(read_heartbeats(RunPaths(tmp_path).heartbeat(0).parent)[0].doing)
        keep(end, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainingEnd, "keep_state", look)
    train(Toy(samples=32), tmp_path)
    assert seen == ["saving at the end of the data"]
