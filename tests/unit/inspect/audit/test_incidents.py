"""The audit puts together what the ranks saw: on which rank and in which tensor it began."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recorded_run import RecordedRun, incident
from rollback.facts.training import PhaseAnnounced
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.audit.incidents import put_together
from rollback.inspect.audit.report import AuditReport
from rollback.inspect.audit.text import print_audit
from rollback.rundir.evidence import (
    BatchKept,
    LeftOut,
    NamedNorm,
    Norms,
    Origin,
    RankEvidence,
    StepSeen,
    write_evidence,
)


def norms(**exploding: list[str]) -> Norms:
    each = [NamedNorm(name="embed", norm=1.0), NamedNorm(name="head", norm=200.0)]
    kinds: dict[Any, list[str]] = {"large": [], "overflow": [], "nonfinite": [], **exploding}
    return Norms(
        tensors=2, total=200.0, largest=each[::-1], smallest=each, vanishing=[], exploding=kinds, each=each
    )  # fmt: skip


def seen(rank: int, where: Any = None, *, step: int | None = 45, **changed: Any) -> RankEvidence:
    name, local = changed.pop("name", None), changed.pop("local", None)
    origin = Origin(where=where, step=step, name=name, local=local) if where else None
    fields: dict[str, Any] = {
        "incident": 1, "rank": rank, "attempt": 1, "timeline": 0, "onset_step": 45, "detection_step": 49,
        "origin": origin, "gradients": norms(), "gradients_step": 45, "weights": norms(),
        "steps": [StepSeen(step=45, losses=[1.0], grad_norm=200.0, kind=None)], "nonfinite_buffers": [],
        "batch": BatchKept(step=45, file="rank-00000.safetensors", tensors=[], left_out=[]),
    }  # fmt: skip
    return RankEvidence(**{**fields, **changed})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    run.tell(50, incident(1, 45, 49))
    return run


def audit(run: RecordedRun, *evidence: RankEvidence) -> AuditReport:
    for item in evidence:
        path = run.paths.evidence(item.incident, item.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_evidence(path, item)
    return compile_audit(read_run_contents(run.paths.root))


def began(run: RecordedRun, *evidence: RankEvidence) -> str:
    found = audit(run, *evidence).incidents[0].evidence
    assert found is not None
    return found.began


def text(found: AuditReport) -> str:
    stream = io.StringIO()
    print_audit(Console(file=stream, width=200, highlight=False, markup=False), found)
    return stream.getvalue()


def test_a_loss_on_one_rank_comes_before_the_gradients_that_it_spoils_on_all(run: RecordedRun) -> None:
    assert began(run, seen(0, "gradients", name="head"), seen(1, "loss")) == (
        "began in the loss (before backward) on rank 1, in step 45"
    )


def test_the_rank_whose_own_gradient_was_broken_is_named(run: RecordedRun) -> None:
    name = "layers.3.mlp.weight"
    ranks = [seen(0, "gradients", name=name, local=False), seen(1, "gradients", name=name, local=True)]
    assert began(run, *ranks) == f"began in the gradients of {name} on rank 1, in step 45"


def test_where_the_ranks_cannot_be_told_apart_all_are_named(run: RecordedRun) -> None:
    ranks = [seen(rank, "gradients", name="head", local=False) for rank in (0, 1)]
    assert began(run, *ranks) == "began in the gradients of head on every rank, in step 45"


def test_of_many_ranks_the_first_are_named_and_the_others_counted(run: RecordedRun) -> None:
    ranks = [seen(rank, "loss") for rank in range(0, 640, 10)]
    assert "on ranks 0, 10, 20, 30, 40, 50, 60, 70 and 56 more, in step 45" in began(run, *ranks)


def test_what_all_that_wrote_evidence_saw_is_said_of_them_and_of_no_other() -> None:
    ranks = {rank: seen(rank, "loss") for rank in range(0, 640, 10)}
    found = put_together(ranks, 640)
    assert found is not None
    assert found.began == "began in the loss (before backward) on each of the 64 ranks that wrote evidence, in step 45"
    assert found.ranks == []


def test_an_earlier_step_comes_before_an_earlier_place(run: RecordedRun) -> None:
    assert "the gradients of head" in began(run, seen(0, "loss", step=46), seen(1, "gradients", name="head"))


def test_the_state_after_the_incident_is_the_last_place_to_look(run: RecordedRun) -> None:
    found = began(run, seen(0, "buffers", step=None, name="norm.var"), seen(1, "parameters", step=None, name="w"))
    assert found == "began in the parameters: w on rank 1"


def test_what_is_finite_is_told_by_its_largest_gradients(run: RecordedRun) -> None:
    large = seen(
        0, gradients=norms(large=["head"]), steps=[StepSeen(step=45, losses=[9.0], grad_norm=200.0, kind="large")]
    )  # fmt: skip
    found = audit(run, large)
    assert found.incidents[0].evidence is not None
    assert found.incidents[0].evidence.began == "everything was finite; a large norm (200, led by head) in step 45"
    assert found.incidents[0].evidence.exploding == {"nonfinite": 0, "overflow": 0, "large": 1}
    assert found.totals.explosions == {"large": 1}
    assert "1 large (above 100); leading: head 200" in text(found)


def test_the_text_says_where_it_began_and_what_is_kept(run: RecordedRun) -> None:
    kept = BatchKept(step=45, file="../../else.safetensors", tensors=[], left_out=[LeftOut(name="45/x", reason="big")])
    shown = text(audit(run, seen(0, "gradients", name="a\x1b[31mb"), seen(1, batch=kept)))
    assert "began in the gradients of a\\x1b[31mb on rank 0" in shown
    assert "incidents/0001/rank-00001.safetensors" in shown
    assert "else" not in shown
    assert "rank 1: 45/x: big" in shown


def test_an_incident_without_evidence_has_none(run: RecordedRun) -> None:
    assert audit(run).incidents[0].evidence is None


def test_evidence_that_cannot_be_read_or_is_about_something_else_is_left_out_with_a_notice(run: RecordedRun) -> None:
    audit(run, seen(0, "loss"))
    (run.paths.incident(1) / "rank-00001.json").write_text(seen(0).model_dump_json())
    (run.paths.incident(1) / "rank-00002.json").write_text("{")
    found = compile_audit(read_run_contents(run.paths.root))
    assert found.incidents[0].evidence is not None
    assert [entry.rank for entry in found.incidents[0].evidence.batches] == [0]
    assert any("about another" in notice for notice in found.notices)
    assert any("cannot be read" in notice for notice in found.notices)


def test_announced_phases_are_told(run: RecordedRun) -> None:
    run.tell(51, PhaseAnnounced(step=50, batch=100, phase="long context"))
    found = audit(run)
    assert [(entry.step, entry.phase) for entry in found.phases] == [(50, "long context")]
    assert "long context" in text(found)
