"""Gradients of step 500 multiplied by 10, 1e4 and infinity: seen, undone where it matters, nothing earlier lost."""

import math
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exercise_gradients import FAULT_AT, Trained, train
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.audit.report import AuditReport


@pytest.fixture(autouse=True)
def _sigterm_as_before() -> Iterator[None]:
    """A guard takes SIGTERM as a request to save and stop; the test run does not want that."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def undisturbed() -> Trained:
    return train(1.0)


def audit_of(run: Path) -> AuditReport:
    return compile_audit(read_run_contents(run))


@pytest.mark.parametrize("factor", [pytest.param(1e4, marks=pytest.mark.soak), math.inf])
def test_a_fault_that_would_wreck_the_run_is_replayed_bit_for_bit(
    factor: float, undisturbed: Trained, tmp_path: Path
) -> None:
    guarded = train(factor, tmp_path / "run")
    assert torch.equal(guarded.weights, undisturbed.weights)
    audit = audit_of(tmp_path / "run")
    [incident] = audit.incidents
    assert FAULT_AT <= incident.onset.step <= incident.detection.step < FAULT_AT + 10
    assert incident.restored is not None
    assert incident.restored.step < FAULT_AT  # how far back depends on the disk: steps are shorter than a sync here
    assert incident.outcome == "not_reproduced"
    assert audit.totals.skipped_batches == 0


@pytest.mark.soak
def test_by_default_the_batches_around_the_fault_are_skipped_as_well(tmp_path: Path, undisturbed: Trained) -> None:
    guarded = train(1e4, tmp_path / "run", retry_first=False)
    [incident] = audit_of(tmp_path / "run").incidents
    assert incident.skip is not None
    assert incident.skip.first <= FAULT_AT <= incident.skip.last
    assert incident.outcome == "recovered"
    assert guarded.loss == pytest.approx(undisturbed.loss, rel=0.05)


@pytest.mark.soak
def test_a_fault_that_passes_by_itself_is_recorded_and_left_alone(tmp_path: Path, undisturbed: Trained) -> None:
    guarded = train(10.0, tmp_path / "run")
    audit = audit_of(tmp_path / "run")
    assert not audit.incidents
    assert any(FAULT_AT <= entry.first_step < FAULT_AT + 10 and entry.fate == "recovered" for entry in audit.noticed)
    assert guarded.loss == pytest.approx(undisturbed.loss, rel=0.05)
    assert torch.equal(guarded.weights, train(10.0).weights)
