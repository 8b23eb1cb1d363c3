"""Where the loss is up and the curve cannot tell why, the model is asked by a batch that it knew.

Oracle: bit for bit the same run without probes, where the answer is that the data are harder.
"""

from pathlib import Path

import pytest
from job_results import Scenarios
from probed import FAULT_AT, Case, run_case
from selection import soak
from toy import facts, require_same

from rollback.facts.probes import NotProbed, Probed
from rollback.facts.training import Incident, Planned, Restored
from rollback.inspect.audit.verify import check_integrity

PROBED = Path(__file__).parents[1] / "support" / "probed.py"


def of_two_ranks(folder: Path, cases: dict[str, Case]) -> Scenarios:
    job = Scenarios(folder, PROBED)
    for name, case in cases.items():
        job.add(name, case)
    job.torchrun(2)
    return job


def the_answer(run: Path) -> Probed:
    (answer,) = facts(run, Probed)
    assert answer.kept_step < answer.onset_step <= FAULT_AT + 5 < answer.step
    return answer


def require_same_but_for_the_probe(one: dict[str, str], other: dict[str, str], batches: int) -> None:
    more = int(one.pop("handed out")) - int(other.pop("handed out"))
    assert more == batches
    require_same(one, other, "with a probe and without")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    labels = Case("labels", workers=1, steps=135)
    one_cannot = Case("labels", workers=1, steps=135, odd="object on the last rank")
    cases = {
        "labels": labels, "never asked": Case(**{**vars(labels), "probe": False}), "weights": Case("weights"),
        "one cannot": one_cannot,
    }  # fmt: skip
    return of_two_ranks(tmp_path_factory.mktemp("two"), cases)


def test_wrong_labels_leave_the_model_as_it_is_and_the_run_as_it_would_have_been(two_ranks: Scenarios) -> None:
    run = two_ranks.run("labels")
    assert the_answer(run).finding == "data"
    assert facts(run, Incident, NotProbed) == []
    assert facts(two_ranks.run("never asked"), Probed) == []
    for rank in (0, 1):
        one, other = (two_ranks.portrait(name, rank) for name in ("labels", "never asked"))
        require_same_but_for_the_probe(one, other, 1)


def test_where_one_rank_cannot_take_part_none_does(two_ranks: Scenarios) -> None:
    run = two_ranks.run("one cannot")
    (why,) = facts(run, NotProbed)
    assert "Path" in why.reason
    assert facts(run, Probed, Incident) == []
    for rank in (0, 1):
        require_same(two_ranks.portrait("one cannot", rank), two_ranks.portrait("never asked", rank), f"rank {rank}")


def test_moved_weights_are_an_incident_since_they_were_moved_and_are_put_back(two_ranks: Scenarios) -> None:
    run = two_ranks.run("weights")
    answer = the_answer(run)
    assert answer.finding == "model"
    (incident,), (plan,), (restored,) = facts(run, Incident), facts(run, Planned), facts(run, Restored)
    assert (incident.verdict, incident.rule, incident.onset_step) == ("damaged", "probe-loss", answer.onset_step)
    assert f"the probe batch of step {answer.kept_step} had loss {answer.loss_then:.6g}" in incident.explanation
    assert restored.step == plan.step <= FAULT_AT
    assert check_integrity(run).disagreements == []
    assert (
        two_ranks.portrait("weights", 0)["/model/line.weight"] == two_ranks.portrait("weights", 1)["/model/line.weight"]
    )


def test_behind_the_rollback_it_is_as_if_the_weights_had_never_been_moved(tmp_path: Path) -> None:
    one = run_case(Case("weights"), tmp_path / "one")
    assert the_answer(tmp_path / "one").finding == "model"
    (plan,) = facts(tmp_path / "one", Planned)
    never = Case(None, probe=False, skip=((plan.skip.first, plan.skip.last),))
    other = run_case(never, tmp_path / "other")
    for portrait in (one, other):
        del portrait["handed out"]
        for batch in range(plan.skip.first, plan.skip.last + 1):  # handed out at first, and skipped behind the rollback
            portrait.pop(f"/consumed/{batch}", None)
    require_same(one, other, "rolled back, and never moved")


@pytest.mark.parametrize(
    "case",
    [
        Case("labels", loader="iterable"),
        Case("labels", accumulate=2),
        Case("labels", odd="gradients"),
        Case("labels", odd="noise"),
        pytest.param(Case("labels", workers=2, accumulate=2), marks=pytest.mark.soak),
    ],
    ids=lambda case: f"{case.loader}-{case.accumulate}-{case.workers}-{case.odd}",
)
def test_whatever_the_loader_is_and_the_update_is_made_of(tmp_path: Path, case: Case) -> None:
    one = run_case(case, tmp_path / "one")
    other = run_case(Case(**{**vars(case), "probe": False}), tmp_path / "other")
    answer = the_answer(tmp_path / "one")
    assert answer.finding == "data"
    assert answer.loss_now == pytest.approx(
        answer.loss_then, rel=0.02
    )  # under the same noise, it has learned nearly all
    require_same_but_for_the_probe(one, other, case.accumulate)


class Died(Exception):
    pass


def test_a_process_that_dies_in_a_probe_has_done_nothing_that_counts(tmp_path: Path) -> None:
    def die() -> bool:
        raise Died

    with pytest.raises(Died):
        run_case(Case("labels"), tmp_path / "one", die)
    assert facts(tmp_path / "one", Probed, NotProbed) == []
    one = run_case(Case("labels"), tmp_path / "one")
    assert the_answer(tmp_path / "one").finding == "data"  # of a batch that the second process has kept
    other = run_case(Case("labels", probe=False), tmp_path / "other")
    for portrait in (one, other):
        for name in [name for name in portrait if name.startswith(("/consumed", "handed"))]:  # of the last attempt only
            del portrait[name]
    require_same(one, other, "died in a probe")


def test_a_script_that_leaves_its_loop_in_a_probe_has_the_model_of_before(tmp_path: Path) -> None:
    one = run_case(Case("labels"), tmp_path / "one", lambda: True)
    step = int(one["/steps"])
    assert facts(tmp_path / "one", Probed) == []
    other = run_case(Case("labels", steps=step), tmp_path / "other")
    for portrait in (one, other):
        del portrait["handed out"]
        portrait.pop(f"/consumed/{step}", None)
    require_same(one, other, "left in a probe")


@pytest.mark.parametrize(
    ("odd", "reason"), [("hidden", "no parameters or buffers"), *soak(("object", "a batch cannot be kept"))]
)
def test_where_it_could_not_be_exact_there_is_no_probe(tmp_path: Path, odd: str, reason: str) -> None:
    case = Case("labels", odd=odd)
    one = run_case(case, tmp_path / "one")
    (why,) = facts(tmp_path / "one", NotProbed)
    assert reason in why.reason
    assert facts(tmp_path / "one", Probed) == []
    require_same(one, run_case(Case(**{**vars(case), "probe": False}), tmp_path / "other"), "not asked")
