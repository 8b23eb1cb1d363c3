"""`--policy screen`: updates judged one by one behind a rollback, and only what stands out is skipped.

Oracle: bit for bit the run that was given the resulting skip list from the start.
"""

import signal
from pathlib import Path

import pytest
from attempts import DIED, Forker
from job_results import Scenarios
from selection import by_default
from toy import Toy, facts, history, require_same, same_skips_from_the_start, skipped, train

from rollback.facts.training import (
    Attached,
    Concluded,
    Incident,
    Planned,
    Restored,
    ScreenedOut,
    Stopped,
    Window,
)
from rollback.inspect.audit.verify import check_integrity

SCREEN = {"policy": "screen", "horizon": 10}
EPOCHS = Toy(samples=120, epochs=4, garbage=(70, 77))
QUICK = {
    "shuffled": Toy(samples=320, augment=True, garbage=(50, 65)),
    "accumulation": Toy(samples=640, accumulate=2, garbage=(120, 135)),
    "scaler": Toy(samples=320, scaler=True, overflow=(12, 56), garbage=(50, 60)),
    "epochs": EPOCHS.but(loop="epochs", between=True),
}
WIDE = {
    "workers": Toy(workers=2, augment=True, garbage=(60, 75)),
    "callable": Toy(loader="drawn", max_steps=90, garbage=(60, 75)),
    "iterator": Toy(loader="iterator", max_steps=90, garbage=(60, 75)),
    "list": Toy(loader="list", sampler="sequential", garbage=(60, 75)),
    "stateful": Toy(loader="stateful", garbage=(60, 75)),
    "stateful with workers": Toy(loader="stateful", workers=1, garbage=(60, 75)),
    "a range of epochs": EPOCHS,
    "updates over epochs": Toy(samples=124, epochs=8, accumulate=2, garbage=(120, 134)),
    "updates over guard.epochs": Toy(samples=124, epochs=8, accumulate=2, garbage=(120, 134), loop="epochs"),
    "a shorter last update": Toy(samples=124, epochs=8, accumulate=2, garbage=(130, 147), by_epoch=True, loop="epochs"),
    "a hidden buffer": Toy(level="hidden", garbage=(60, 75)),
    "to the end": Toy(garbage=(90, 99)),
}


def bad_updates(toy: Toy) -> Window:
    """The batches of the updates with a bad batch."""
    assert toy.garbage is not None
    first, last = toy.garbage
    return Window(first=first - first % toy.accumulate, last=last + -(last + 1) % toy.accumulate)


@pytest.mark.parametrize("job", by_default({**QUICK, **WIDE}, "accumulation", "epochs"))
def test_a_bad_stretch_costs_its_own_batches_and_the_run_is_as_if_they_had_never_been_there(
    tmp_path: Path, job: str
) -> None:
    toy, run = {**QUICK, **WIDE}[job].with_settings(**SCREEN), tmp_path / "run"
    ended = train(toy, run)
    (plan,) = facts(run, Planned)
    assert (plan.skip, plan.screen.first) == (None, plan.batch)
    assert {fact.incident for fact in facts(run, ScreenedOut)} == {0}
    assert [fact.outcome for fact in facts(run, Concluded)] == ["recovered"]
    (window,) = Window.merged(history(run).skip_list)
    if job != "a shorter last update":  # there the window leaves whole updates of its epoch
        assert window == bad_updates(toy)
    assert sorted(skipped(run)) == list(range(window.first, window.last + 1))
    assert check_integrity(run).disagreements == []
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), job)


def test_a_fault_that_does_not_come_back_costs_no_data(tmp_path: Path) -> None:
    toy, run = Toy(samples=320, garbage=(50, 54), once=True).with_settings(**SCREEN), tmp_path / "run"
    ended = train(toy, run)
    assert (len(facts(run, Restored)), facts(run, ScreenedOut), skipped(run)) == (1, [], {})
    require_same(ended, train(toy.but(garbage=None)), "replayed")


def test_a_nan_is_skipped_with_its_batch_alone_and_a_stretch_of_them_is_screened(tmp_path: Path) -> None:
    """The second one directly behind the first shows a stretch; good batches between the others are trained on."""
    toy = Toy(samples=320, nan=(50, 51, 53, 56), settings={"policy": "screen", "rewind": None, "skip_after": None})
    ended = train(toy, tmp_path / "run")
    assert sorted(skipped(tmp_path / "run")) == [50, 51, 53, 56]
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "NaN")


def test_where_too_much_stands_out_the_run_stops_before_incidents_cost_more_than_they_may(tmp_path: Path) -> None:
    toy = Toy(samples=1600, garbage=(60, 399)).with_settings(**SCREEN, max_skipped="5%")
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped:
        train(toy, run)
    assert stopped.value.code == 76
    assert "max_skipped (5%) allows 68" in facts(run, Stopped)[0].account
    assert len(Window.merged(history(run).skip_list)) == 1
    assert len(skipped(run)) <= 68


@pytest.mark.parametrize(
    ("job", "kills"),
    [
        ("shuffled", [{"signal": [57, signal.SIGKILL]}]),
        *(
            pytest.param(job, kills, marks=pytest.mark.soak)
            for job in ("shuffled", "accumulation", "scaler", "epochs")
            for kills in (
                [{"die": ["before", "screened_out", 1]}],
                [{"die": ["after", "screened_out", 1]}, {"die": ["after", "screened_out", 3]}],
                [{"die": ["before", "screened_out", 4]}, {"die": ["before", "skipped", 2]}],
            )
        ),
    ],
)
def test_killed_in_the_middle_of_a_screen_it_goes_on_in_the_screen(
    tmp_path: Path, forker: Forker, job: str, kills: list[dict[str, list[object]]]
) -> None:
    toy, run, log = QUICK[job].with_settings(**SCREEN), tmp_path / "run", tmp_path / "log"
    for kill in kills:
        assert forker.status(toy, run, log=str(log), **kill) in (DIED, -signal.SIGKILL)
    ended = forker.finish(toy, run, log=log)
    assert len(facts(run, Attached)) == 1 + len(kills)
    assert len(facts(run, Incident)) == 1
    assert Window.merged(history(run).skip_list) == [bad_updates(toy)]
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), job)


@pytest.mark.soak
@pytest.mark.parametrize("sharding", [None, "fsdp"])
@pytest.mark.parametrize(("rank", "batch"), [(0, 52), (1, 57), (1, 65)])
def test_a_rank_of_two_killed_in_a_screen(tmp_path: Path, sharding: str | None, rank: int, batch: int) -> None:
    toy = Toy(samples=640, sampler="distributed", garbage=(50, 65), augment=True, width=17, sharding=sharding)
    toy = toy.with_settings(**SCREEN, snapshot_every=5)
    job = Scenarios(tmp_path)
    job.add("job", toy, signal=[rank, batch, signal.SIGKILL, 1])
    code, output = job.launch(job.run("job"))
    assert code == 0, output[-6000:]
    assert len(facts(job.run("job"), Attached)) == 2
    assert Window.merged(history(job.run("job")).skip_list) == [bad_updates(toy)]
    (tmp_path / "again").mkdir()
    again = Scenarios(tmp_path / "again")
    again.add("job", toy, skips_of=str(job.run("job")))
    again.torchrun(2)
    for one in (0, 1):
        require_same(job.portrait("job", one), again.portrait("job", one), f"rank {one}")
