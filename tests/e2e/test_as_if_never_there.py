"""Oracle A: a run that met bad batches and rolled back ends, bit for bit, as one that was told to skip them at once."""

from pathlib import Path

import pytest
from selection import by_default, soak
from toy import Toy, consumed, facts, require_same, same_skips_from_the_start, skip_list, skipped, train, weights

from rollback.cli.options.settings import read_settings
from rollback.facts.training import Incident, Planned, Restored, Window

JOBS = {
    "shuffled": Toy(280, augment=True),
    "sequential": Toy(280, sampler="sequential"),
    "distributed sampler": Toy(sampler="distributed", epochs=2, samples=240),
    "workers": Toy(280, workers=2, augment=True),
    "callable": Toy(loader="drawn", max_steps=70),
    "iterator": Toy(loader="iterator", max_steps=70),
    "list": Toy(280, loader="list", sampler="sequential"),
    "stateful": Toy(280, loader="stateful", workers=0),
    "accumulation": Toy(480, accumulate=2),
    "scaler": Toy(280, scaler=True, overflow=(12, 65)),
}


@pytest.mark.parametrize("job", by_default(JOBS, "workers", "iterator", "stateful", "accumulation", "scaler"))
def test_a_non_finite_loss(tmp_path: Path, job: str) -> None:
    toy = JOBS[job].but(nan=(57,))
    run = tmp_path / "run"
    ended = train(toy, run)
    incident, plan, restored = facts(run, Incident, Planned, Restored)
    assert (incident.verdict, incident.ranks) == ("nonfinite", (0,))
    assert incident.onset_batch <= 57 <= incident.detection_batch
    assert plan.skip.first == plan.batch <= 57 <= plan.skip.last
    assert restored.route == "in_process"
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), job)


@pytest.mark.parametrize("job", by_default(["shuffled", "workers", "callable", "accumulation"], "callable"))
def test_a_stretch_of_garbage_that_one_rollback_does_not_get_past(tmp_path: Path, job: str) -> None:
    whole_steps = JOBS[job].accumulate
    longer: dict[str, int] = {"max_steps": 100} if JOBS[job].max_steps else {"samples": 400 * whole_steps}
    toy = (
        JOBS[job]
        .but(**longer, garbage=(60 * whole_steps, 84 * whole_steps))
        .with_settings(snapshot_every=5, skip_after=0)
    )
    run = tmp_path / "run"
    ended = train(toy, run)
    first, second = facts(run, Planned)[:2]
    assert (second.escalation, second.skip.first) == (1, first.skip.last + 1)
    assert {incident.verdict for incident in facts(run, Incident)} == {"spike"}
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), job)


def test_consumed_and_skipped_samples_are_together_what_an_unguarded_run_reads(tmp_path: Path) -> None:
    toy = Toy(280, nan=(37, 63))
    run = tmp_path / "run"
    read, kept, passed_over = consumed(train(toy)), consumed(train(toy, run)), skipped(run)
    assert not kept.keys() & passed_over.keys()
    assert {**kept, **passed_over} == read


def test_batches_skipped_at_the_user_s_wish_cost_no_rollback(tmp_path: Path) -> None:
    toy = Toy(140, nan=(20, 21), settings={"skip": [{"first": 20, "last": 21}]})
    train(toy, tmp_path / "run")
    assert facts(tmp_path / "run", Incident) == []
    assert skip_list(tmp_path / "run") == [{"first": 20, "last": 21}]
    assert sorted(skipped(tmp_path / "run")) == [20, 21]


@pytest.mark.parametrize(
    "toy",
    [
        Toy(epochs=2, samples=120, between=True),
        Toy(240, scaler=True, overflow=(12,)),
        Toy(240, accumulate=2),
        *soak(
            Toy(augment=True),
            Toy(workers=2),
            Toy(sampler="distributed", epochs=2, samples=200),
            Toy(loader="list", epochs=2, samples=200),
            Toy(loader="stateful"),
        ),
    ],
    ids=lambda toy: f"{toy.loader}-{toy.sampler}-{toy.workers}-{toy.epochs}-{toy.accumulate}-{toy.scaler}",
)
def test_a_healthy_run_is_bit_for_bit_what_it_is_without_a_guard(tmp_path: Path, toy: Toy) -> None:
    guarded = train(toy, tmp_path / "run")
    assert facts(tmp_path / "run", Incident) == []
    require_same(guarded, train(toy), "with and without a guard")


def test_observing_only_changes_nothing_and_says_what_it_would_have_done(tmp_path: Path) -> None:
    toy = Toy(300, garbage=(60, 70)).with_settings(observe_only=True)
    watched = train(toy, tmp_path / "run")
    require_same(weights(watched), weights(train(toy)), "observed and unguarded")
    plan = facts(tmp_path / "run", Planned)[0]
    assert plan.action == "observe"
    assert plan.checkpoint is not None
    assert facts(tmp_path / "run", Restored) == []


def test_a_run_that_is_only_observed_and_stays_not_finite_is_one_incident(tmp_path: Path) -> None:
    train(Toy(240, nan=(40,)).with_settings(observe_only=True), tmp_path / "run")
    (incident,) = facts(tmp_path / "run", Incident)
    assert incident.onset_step == 40


def test_the_skips_of_a_run_are_those_that_it_passed_over_where_it_was_given_some_too_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy, run = JOBS["callable"].but(max_steps=40), tmp_path / "run"
    train(toy, run)
    late = toy.but(max_steps=70).with_settings(skip=[{"first": n, "last": n + 4} for n in (10, 38, 50)])
    ended = train(late, run)
    said = capsys.readouterr().err
    assert "skip 10:14: batches 10:14 cannot be skipped any more: the run goes on at batch 40" in said
    assert "skip 38:42: batches 38:39 cannot be skipped any more" in said
    assert "skip 50:54" not in said
    skips = read_settings({}, run).skip
    assert skips == (Window(first=40, last=42), Window(first=50, last=54))
    told = toy.but(max_steps=70).with_settings(skip=[window.model_dump() for window in skips])
    require_same(weights(ended), weights(train(told, tmp_path / "told")), "--skips-of")
