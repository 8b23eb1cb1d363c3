"""With the fast tier on: the same oracles, what is left behind, and ranks that drift apart."""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from attempts import DIED, Forker
from job_results import LAUNCH, Scenarios
from toy import Toy, facts, require_same, same_skips_from_the_start, train, weights
from warm_server import run_warm

from rollback.checkpoints import ring, tiers
from rollback.checkpoints.format import layout, shard
from rollback.errors import NoUsableCheckpoint
from rollback.facts.training import (
    Advice,
    Attached,
    CheckpointLost,
    Committed,
    Drained,
    Drifted,
    Dropped,
    Evicted,
    LeftDurableRing,
    Planned,
    Quarantined,
    Restored,
    Saving,
    Trouble,
)
from rollback.rundir.paths import RunPaths
from rollback.train.snapshots import memory as memory_of_snapshots

SURGICAL = {"policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 10, "keep": 3, "horizon": 20}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def fast(toy: Toy, base: Path) -> Toy:
    return toy.with_settings(fast_tier=str(base))


@pytest.mark.parametrize("mode", ["at_once", "overlapped", "held"])
def test_as_if_the_bad_batches_had_never_been_there_however_it_is_copied(
    tmp_path: Path, base: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollback.train.snapshots.schedule.usual_capture_mode", lambda *_: (mode, "the test says so"))
    toy, run = fast(Toy(240, augment=True, nan=(37,)), base), tmp_path / "run"
    ended = train(toy, run)
    assert {fact.capture for fact in facts(run, Saving)} == {mode}
    assert {fact.tier for fact in facts(run, Committed)} == {"fast"}
    assert [fact.route for fact in facts(run, Restored)] == ["in_process"]
    assert not facts(run, Dropped)
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), mode)


def test_good_checkpoints_and_the_last_one_are_in_the_ring_at_the_end_and_the_memory_is_given_back(
    tmp_path: Path, base: Path
) -> None:
    run = tmp_path / "run"
    train(fast(Toy(), base).with_settings(checkpoint_every="20"), run)
    newest = facts(run, Committed)[-1].checkpoint
    drained = [fact.checkpoint for fact in facts(run, Drained)]
    assert newest in drained
    left = {fact.checkpoint for fact in facts(run, LeftDurableRing)}  # one more than it has room for, on a slow disk
    assert sorted({*drained} - left) == ring.names(RunPaths(run))
    assert {fact.tier for fact in facts(run, Committed)} == {"fast"}, facts(run)
    assert {fact.tier for fact in facts(run, Evicted)} == {"fast"}, facts(run)
    assert tiers.fast_tier_of(RunPaths(run)) is None
    assert not any(base.iterdir())
    again = train(fast(Toy(), base), run)
    assert facts(run, Attached)[-1].checkpoint == newest
    require_same(weights(again), weights(train(Toy())), "run again")


def test_slots_are_never_more_nor_larger_than_was_said(tmp_path: Path, base: Path) -> None:
    run = tmp_path / "run"

    def look(_guard: object, position: int) -> None:
        if position and position % 10 == 5:
            said = facts(run, Saving)[-1]
            found = list(base.glob("*/*/slot-*"))
            assert len(found) <= said.slots == 5
            assert (
                sum(file.stat().st_size for path in found for file in path.glob("rank-*"))
                <= said.slots * said.slot_bytes
            )

    train(fast(Toy(), base).with_settings(keep=4), run, hook=look)


@pytest.mark.covering
@pytest.mark.parametrize("memory", [True, False], ids=["slots", "no slots"])
@pytest.mark.parametrize("mode", ["at_once", "overlapped"])
def test_a_state_that_has_outgrown_its_room_costs_one_snapshot_and_the_next_has_room(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, memory: bool, mode: str
) -> None:
    """What the scheduler keeps, which goes into the header, grows by half a megabyte and then by two."""
    monkeypatch.setattr("rollback.train.snapshots.schedule.usual_capture_mode", lambda *_: (mode, "the test says so"))
    run, toy = tmp_path / "run", fast(Toy(), base) if memory else Toy()

    def grow(guard: object, position: int) -> None:
        if position in (25, 65):
            guard._loop.state.objects["scheduler"].notes = str(position) * 10_000 * position  # type: ignore[attr-defined]
        said = facts(run, Saving)[-1]
        for file in base.glob("*/*/slot-*/rank-*"):
            assert file.stat().st_size <= said.slot_bytes, "larger than was said"

    ended = train(toy, run, hook=grow, log=tmp_path / "log")
    dropped = facts(run, Dropped)
    assert [fact.step for fact in dropped] == [30, 70]
    assert all("what is kept has grown" in fact.reason for fact in dropped)
    committed = {fact.step for fact in facts(run, Committed)}
    assert committed > {0, 10, 20, 40, 50, 60, 100}
    assert all(any(step < after < step + 10 for after in committed) for step in (30, 70)), "made up for at once"
    assert {fact.capture for fact in facts(run, Saving)} == {mode}
    require_same(weights(ended), weights(train(Toy())), "what is kept has grown")
    again = train(toy, run, log=tmp_path / "log")
    require_same(again, ended, "what has grown is restored")


@pytest.mark.soak
def test_a_rank_killed_at_random_moments_goes_on_from_memory(tmp_path: Path, base: Path) -> None:
    seed, killed, run = 11, 0, tmp_path / "run"
    moments = random.Random(seed)
    toy = fast(
        Toy(samples=800, epochs=2, augment=True, nan=(60,), patient=False, loop="epochs", settings=SURGICAL), base
    )
    with Forker() as forker:
        forker.finish(toy, tmp_path / "warm-up")  # the first attempt of a process is several times slower
        began = time.monotonic()
        undisturbed = forker.finish(toy, tmp_path / "undisturbed", log=tmp_path / "undisturbed-log")
        takes = time.monotonic() - began
        while killed < 4:
            delay = moments.uniform(0.1, 0.5) * takes
            status = forker.status(toy, run, log=str(tmp_path / "log"), kill_after=delay)
            assert status in (0, -signal.SIGKILL), Path(f"{run}.txt").read_text()
            if status == 0:
                break
            killed += 1
        ended = forker.finish(toy, run, log=tmp_path / "log")
    assert killed, "it was too quick for the test"
    require_same(ended, undisturbed, f"seed {seed}, {killed} kills")


def test_a_slot_that_cannot_be_believed_is_passed_over(tmp_path: Path, base: Path) -> None:
    """The newest is damaged in memory; an older one, from memory or from the ring, is used."""
    toy, run = fast(Toy(nan=(57,)), base), tmp_path / "run"

    def damage(_guard: object, position: int) -> None:
        if position == 55:
            place = next(place for place in tiers.locate(RunPaths(run)) if place.manifest.step == 40)
            assert place.tier == "fast"
            file = place.directory / "rank-00000.safetensors"
            with file.open("r+b") as shard:
                shard.seek(file.stat().st_size // 2)
                shard.write(bytes([255 - shard.read(1)[0]]))

    ended = train(toy, run, hook=damage)
    assert facts(run, Restored)[0].step in (30, 40)
    assert facts(run, Planned)
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "damaged slot")


@pytest.mark.parametrize("left", ["ring", "nothing"])
def test_what_memory_has_ahead_of_a_run_directory_that_was_put_back_is_not_gone_on_from(
    tmp_path: Path, base: Path, left: str
) -> None:
    """Its journal does not know of the batches that were skipped meanwhile. What it knows of is used, from memory too.
    Where nothing that it knows of is left, what memory has is better than nothing, and that is said."""
    toy, run, copy = fast(Toy(240, augment=True), base), tmp_path / "run", tmp_path / "copy"
    skipping = toy.with_settings(skip=[{"first": 33, "last": 36}])
    with Forker() as forker:
        assert forker.status(toy, run, signal=[25, signal.SIGKILL, 0]) == -signal.SIGKILL
        shutil.copytree(run, copy)
        assert forker.status(skipping, run, signal=[55, signal.SIGKILL, 0]) == -signal.SIGKILL
        newest = facts(run, Committed)[-1].checkpoint
        assert newest in {place.name for place in tiers.in_slots(RunPaths(run))}
        shutil.rmtree(run)
        shutil.copytree(copy, run)
        if left == "nothing":
            shutil.rmtree(run / "ring")
            for place in tiers.in_slots(RunPaths(run)):
                shutil.rmtree(place.directory)
        ended = forker.finish(toy, run)
        undisturbed = forker.finish(toy, tmp_path / "undisturbed")
    output = Path(f"{run}.txt").read_text()
    if left == "nothing":
        assert facts(run, Attached)[-1].checkpoint == newest
        assert [fact.code for fact in facts(run, Advice)] == ["skips-unknown"]
        return
    went_on = facts(run, Attached)[-1]
    assert went_on.step == 20, output
    assert f"checkpoint {newest} cannot be used: the journal lacks lines that were there" in output
    assert newest in {fact.checkpoint for fact in facts(run, Quarantined)}
    require_same(weights(ended), weights(undisturbed), "put back")


def test_without_memory_checkpoints_go_to_the_ring(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollback.train.snapshots.tier_choice.free_memory", lambda _: 300_000)
    run = tmp_path / "run"
    ended = train(fast(Toy(), base), run)
    saving = facts(run, Saving)[-1]
    assert saving.slots == 0
    assert "no room for four slots" in saving.reason
    assert {fact.tier for fact in facts(run, Committed)} == {"durable"}
    require_same(ended, train(Toy()), "without memory")


def test_a_tier_that_fails_in_mid_run_is_left_and_training_goes_on(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def fill(_guard: object, position: int) -> None:
        if position == 35:
            monkeypatch.setattr("rollback.checkpoints.fast_tier.slots.uncommit", full)

    ended = train(fast(Toy(), base).with_settings(keep=3), run, hook=fill)
    assert "No space left" in facts(run, Saving)[-1].reason
    assert [fact.tier for fact in facts(run, Committed)][-1] == "durable"
    monkeypatch.undo()
    require_same(ended, train(Toy()), "the tier failed")


def test_what_was_taken_at_an_epoch_s_end_and_let_go_again_is_not_missed(
    tmp_path: Path, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The attempt ends when the newest checkpoint on record is one that was not the end of training."""
    toy, run = fast(Toy(samples=120, epochs=2), base).with_settings(snapshot_every=13), tmp_path / "run"
    with Forker() as forker:
        assert forker.status(toy, run, log=str(tmp_path / "log"), signal=[36, signal.SIGKILL]) == -signal.SIGKILL
    assert facts(run, Committed)[-1].step == 30
    assert [fact.checkpoint for fact in facts(run, Evicted)] == [facts(run, Committed)[-1].checkpoint]
    train(toy, run)
    told = capfd.readouterr().err
    assert "resuming at step 26, batch 26 (" in told
    assert "is missing" not in told


@pytest.mark.parametrize("counted", [True, False], ids=["in place", "through .data"])
@pytest.mark.parametrize("since", [0, 20])
def test_parameters_that_move_outside_the_optimizer_tear_one_snapshot_at_most(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, counted: bool, since: int
) -> None:
    """Torch counts only the one kind of write; the other one is looked for in the first steps, which tear nothing."""
    monkeypatch.setattr(
        "rollback.train.snapshots.schedule.usual_capture_mode", lambda *_: ("overlapped", "the test says so")
    )
    run = tmp_path / "run"

    def meddle(guard: object, position: int) -> None:
        if position < since:
            return
        with torch.no_grad():
            weights = next(guard._loop.state.model.parameters())  # type: ignore[attr-defined]
            (weights if counted else weights.data).mul_(1.0 if counted else 1.001)

    train(fast(Toy(), base), run, hook=meddle)
    torn = facts(run, Dropped)
    assert len(torn) == (since > 0 and counted)
    if torn:
        assert "outside of optimizer.step() while they were copied" in torn[0].reason
        assert "a schedule-free optimizer in its eval()" in torn[0].reason
        assert any(torn[0].step < fact.step < torn[0].step + 5 for fact in facts(run, Committed)), "made up for"
    assert len(facts(run, Committed)) >= 5
    assert not facts(run, Trouble)


def test_two_ranks(tmp_path: Path, base: Path) -> None:
    scenarios = Scenarios(tmp_path)
    bad = fast(Toy(192, epochs=2, sampler="distributed", nan=(29,), nan_rank=1, augment=True), base)
    scenarios.add("bad", bad)
    scenarios.add("fresh", bad, skips_of=str(scenarios.run("bad")))
    healthy = fast(Toy(208, sampler="distributed"), base)
    scenarios.add("drift", healthy, flip=[1, 13])
    scenarios.torchrun(2)
    for rank in range(2):
        require_same(scenarios.portrait("bad", rank), scenarios.portrait("fresh", rank), f"rank {rank}")
    assert {fact.tier for fact in facts(scenarios.run("bad"), Committed)} == {"fast"}
    drifted = facts(scenarios.run("drift"), Drifted)
    assert drifted[0].step == 20, "the first snapshot after the bit had changed"
    assert drifted[0].ranks == (0, 1), "of two, none is the majority"
    assert max(fact.step for fact in facts(scenarios.run("drift"), Committed)) == 10
    assert [fact.code for fact in facts(scenarios.run("drift"), Advice)][:1] == ["replicas-differ"]


def test_an_average_of_the_weights_that_begins_to_differ_between_ranks_is_in_no_later_checkpoint(
    tmp_path: Path,
) -> None:
    """Each rank stores a part of it, so a checkpoint would have a mixture."""
    run = tmp_path / "run"
    done = run_warm(
        [*LAUNCH, "--nproc", "2", "--run", str(run), str(Path(__file__).parent / "jobs" / "average.py"), "6"],
        timeout=180, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert (
        "the tensors of the optimizer or of named objects (an average of the weights, for instance) of ranks 0, 1"
        in done.stdout
    )
    drifted = facts(run, Drifted)
    assert {fact.ranks for fact in drifted} == {(0, 1)}, done.stdout
    assert all(fact.step <= 6 for fact in facts(run, Committed)), done.stdout
    assert done.returncode == 74, done.stdout


def test_a_host_where_memory_is_switched_off_holds_nobody_up(tmp_path: Path, base: Path) -> None:
    """As by ROLLBACK_FAST_TIER or another command line there: the ranks would wait in different collectives."""
    scenarios = Scenarios(tmp_path, limit=60.0)
    toy = fast(Toy(96, sampler="distributed"), base)
    scenarios.add("one without", toy, otherwise=[1, {"fast_tier": "off"}, None])
    scenarios.torchrun(2)
    assert (
        "on rank 1 it is switched off, and on rank 0 it is not" in facts(scenarios.run("one without"), Saving)[0].reason
    )
    assert {fact.tier for fact in facts(scenarios.run("one without"), Committed)} == {"durable"}
    for rank in range(2):
        assert scenarios.portrait("one without", rank)


def test_a_place_for_slots_that_is_not_there_is_said_once_and_what_is_in_memory_is_not_taken_for_lost(
    tmp_path: Path, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    toy = fast(Toy(), base).with_settings(checkpoint_every="1000")
    with pytest.raises(ArithmeticError):
        train(toy.but(breaking=(50,)), run, log=log)
    memory = {place.name for place in tiers.in_slots(RunPaths(run))} - set(ring.names(RunPaths(run)))
    assert memory, "otherwise it tests nothing"
    capfd.readouterr()
    wrong = tmp_path / "not" / "there"
    ended = train(fast(toy, wrong), run, log=log)
    told = capfd.readouterr().err
    assert told.count(f"checkpoints are written to the run directory: {wrong} cannot be used (") == 1, told
    assert "in memory alone, and this attempt cannot go back there" in told
    assert "is gone from" not in told
    assert not facts(run, CheckpointLost)
    require_same(weights(ended), weights(train(Toy())), "without a place for slots")


def test_where_memory_is_lost_before_anything_had_reached_the_ring_that_is_said(tmp_path: Path, base: Path) -> None:
    """No copy of the ring could help, nor does it miss anything: the advice is another one."""
    run = tmp_path / "run"
    toy = fast(Toy(), base).with_settings(checkpoint_every="1000")
    with Forker() as forker:
        assert forker.status(toy, run, die=["after", "committed", 1]) == DIED
    assert not ring.names(RunPaths(run)), "otherwise it tests nothing"
    shutil.rmtree(base)
    with pytest.raises(NoUsableCheckpoint, match=r"none had reached .*/run/ring yet") as refused:
        train(toy, run)
    assert "in the ring any more" not in refused.value.message
    assert "restore" not in str(refused.value.hint)


@pytest.mark.parametrize("memory", [True, False], ids=["slots", "no slots"])
def test_a_checkpoint_whose_trees_nobody_would_read_again_is_not_made(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    """What the scheduler keeps grows to more than half of what is believed of a header, and then beyond it."""
    limit = 1 << 19
    for module, name in ((layout, "MOST_SPACE"), (memory_of_snapshots, "MOST_SPACE"), (shard, "HEADER_LIMIT")):
        monkeypatch.setattr(module, name, limit - 4096 * (name == "MOST_SPACE"))
    run, toy = tmp_path / "run", fast(Toy(), base) if memory else Toy()

    def grow(guard: object, position: int) -> None:
        if position in (25, 65):
            guard._loop.state.objects["scheduler"].notes = "x" * (10_000 * position)  # type: ignore[attr-defined]

    ended = train(toy, run, hook=grow, log=tmp_path / "log")
    require_same(weights(ended), weights(train(Toy())), "what is kept has grown")
    kept, *beyond = facts(run, Dropped)
    assert "what is kept has grown" in kept.reason
    assert beyond
    assert all("kept as arrays of NumPy" in fact.reason for fact in beyond), beyond
    newest = max(fact.step for fact in facts(run, Committed))
    assert 50 <= newest < 70
    require_same(weights(train(toy, run)), weights(ended), "from the newest that can be read")
    assert facts(run, Attached)[-1].step == newest
    assert not facts(run, Quarantined)
