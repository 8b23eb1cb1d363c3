"""A script that has loaded a snapshot of its own, and what it takes of the guard then."""

import pytest
import torch
from accelerate import Accelerator

from rollback.errors import UsageError
from rollback.trainers.adopt.enumeration import ScriptProgress
from rollback.trainers.adopt.notices import ScriptNotices
from rollback.trainers.adopt.own_resume import OwnResume


@pytest.mark.parametrize(
    ("loads", "trains", "gathers", "refused"),
    [(True, False, False, True), (True, True, False, False), (True, False, True, False), (False, False, False, False)],
)
def test_the_first_batch_of_a_pass_is_passed_over_where_the_next_one_is_asked_for(
    loads: bool, trains: bool, gathers: bool, refused: bool
) -> None:
    progress = ScriptProgress(batches=5)
    resume = OwnResume(progress, ScriptNotices(strict=False))
    if loads:
        resume.note_load()
    resume.note_script_pass()
    resume.require_trained()
    resume.require_trained()  # reading has raised, and the script asks again
    progress.batches += 1
    progress.gathers = gathers
    if trains:
        resume.note_backward()
    if refused:
        with pytest.raises(UsageError, match="does not train on the first batch"):
            resume.require_trained()
    else:
        resume.require_trained()


def test_a_loop_that_gathers_the_batches_of_an_update_passes_over_none() -> None:
    progress = ScriptProgress(holds=True)
    resume = OwnResume(progress, ScriptNotices(strict=False))
    resume.note_load()
    resume.note_script_pass()
    progress.batches += 1
    resume.require_trained()


def test_what_accelerate_prepares_is_no_snapshot_of_the_scripts_and_what_it_loads_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resume, load = OwnResume(ScriptProgress(), ScriptNotices(strict=False)), torch.optim.Optimizer.load_state_dict

    def watched(optimizer: torch.optim.Optimizer, state_dict: dict[str, object]) -> None:
        resume.note_load()
        load(optimizer, state_dict)

    watched.__globals__["__name__"], name = "rollback.watched", __name__
    try:
        monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", watched)
        optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
        assert not resume._loaded
        optimizer.load_state_dict(optimizer.state_dict())
        assert resume._loaded
    finally:
        watched.__globals__["__name__"] = name
