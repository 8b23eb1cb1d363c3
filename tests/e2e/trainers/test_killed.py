"""A protected job is killed, or told to stop, under `rollback launch`: the run ends bit for bit as the undisturbed."""

from pathlib import Path

import pytest
from compared_runs import PHASES, TOLD, require_undisturbed
from job_results import Scenarios
from selection import soak
from toy import facts, require_same
from trainer_job import JOB, LIMIT, MODULES, TrainerJob

from rollback.facts.training import Attached

TRAINER = TrainerJob(bad_at=(32,), bad_rank=1, samples=76, accumulate=2, evaluate=3, save=4)
ACCELERATE = TrainerJob(loop="accelerate", bad_at=(32,), bad_rank=1, samples=76, accumulate=2)


def test_a_rank_that_is_killed_in_a_rollback_costs_nothing(tmp_path: Path) -> None:
    """In the second epoch, while the rollback goes back into the first one."""
    require_undisturbed(tmp_path, TRAINER.but(samples=44), ["in the middle of the rollback"])


BEHIND_THE_SUM = TrainerJob(samples=30, accumulate=2, evaluate=6, save=14, settings={"snapshot_every": 50})
"""15 batches in an epoch: the last of 8 updates has one. It logs in every fifth step."""
IN_LIGHTNING = BEHIND_THE_SUM.but(loop="lightning", more={"timer": False})


@pytest.mark.parametrize(
    ("job", "deaths"),
    [
        (BEHIND_THE_SUM, [(1, "on_pre_optimizer_step", 6, 7), (0, "on_step_end", 11, 11)]),
        *soak((BEHIND_THE_SUM, [(0, "on_optimizer_step", 8, 9), (0, "on_step_end", 5, 0), (1, "on_evaluate", 12, 0)])),
        *soak((BEHIND_THE_SUM, [(1, "on_step_end", 8, 0), (1, "on_save", 14, 0)])),
        (IN_LIGHTNING, [(1, "on_before_optimizer_step", 6, 7)]),
        *soak(
            (
                IN_LIGHTNING,
                [(0, "on_train_batch_end", 12, 12), (0, "on_train_batch_end", 5, 0), (1, "on_validation_start", 11, 0)],
            )
        ),
    ],
    ids=["within an epoch", "others", "in an epoch's last step", "in Lightning", "others in Lightning"],
)
def test_a_rank_that_is_killed_behind_the_sum_of_gradients_costs_no_step(
    tmp_path: Path, job: TrainerJob, deaths: list[tuple[int, str, int, int]]
) -> None:
    """At steps that the Trainer neither logs nor evaluates nor saves, within an epoch. At others the run goes on from
    its checkpoint, and ends as undisturbed, too."""
    undisturbed = Scenarios(tmp_path, JOB, MODULES, LIMIT)
    undisturbed.add("undisturbed", job)
    undisturbed.torchrun(2)
    for rank, event, step, resumed in deaths:
        killed = Scenarios(tmp_path / f"{event} {step}", JOB, MODULES, LIMIT)
        killed.folder.mkdir()
        killed.add("killed", job, dies=[rank, event, step])
        run, memory = killed.run("killed"), killed.folder / "memory"
        memory.mkdir()
        code, output = killed.launch(run, "--fast-tier", str(memory))
        assert code == 0, output[-8000:]
        assert [fact.step for fact in facts(run, Attached)] == [0, resumed], output[-8000:]
        for each in (0, 1):
            require_same(killed.portrait("killed", each), undisturbed.portrait("undisturbed", each), event)


@pytest.mark.soak
@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_a_rank_of_a_sharded_model_that_is_killed_costs_nothing(tmp_path: Path, loop: str) -> None:
    job = TrainerJob(loop=loop, sharded=True, samples=44, accumulate=2, bad_at=(32,), bad_rank=1, evaluate=3)
    require_undisturbed(tmp_path, job, ["in a step"])


@pytest.mark.parametrize("by_callback", [False, True])
def test_a_protected_job_that_is_told_to_stop_is_saved_and_goes_on(tmp_path: Path, by_callback: bool) -> None:
    """Also where a callback of the script answers the signal, by the end of the training: it is none."""
    job = TRAINER.but(samples=32, bad_at=(), stops_when_told=by_callback)
    require_undisturbed(tmp_path, job, ["by SIGTERM"])


def test_a_training_that_a_callback_has_stopped_stays_stopped_when_a_rank_is_killed_behind_it(tmp_path: Path) -> None:
    """In mid-epoch, and what the Trainer does behind an epoch is done although the process died before."""
    by_epoch = {"logging_strategy": "epoch", "eval_strategy": "epoch"}
    require_undisturbed(tmp_path, TrainerJob(samples=32, stop_at=7, more=by_epoch), ["behind the end"])


def test_a_stopped_training_that_is_asked_for_more_has_the_end_of_its_epoch_once(tmp_path: Path) -> None:
    """What is logged there, and evaluated, would be lost, and the next epoch's loss be of both."""
    scenarios = Scenarios(tmp_path, JOB, MODULES, LIMIT)
    stopped = TrainerJob(samples=18, stop_at=7, more={"logging_strategy": "epoch", "eval_strategy": "epoch"})
    scenarios.add("stopped", stopped)
    scenarios.python()
    logged = scenarios.portrait("stopped", 0)
    scenarios.add("stopped", stopped.but(epochs=3))
    said = scenarios.python()
    assert said.count("goes on with that run") == 1, "the second of two trainings of this process"
    ended = scenarios.portrait("stopped", 0)
    first = [name for name in logged if name.startswith(("/logs/0/", "/logs/1/"))]
    assert {name: ended[name] for name in first} == {name: logged[name] for name in first}
    steps = [ended.get(f"/logs/{number}/step") for number in range(6)]
    assert steps == ["7", "7", "16", "16", "25", "25"], "a loss and an evaluation each"


@pytest.mark.soak
def test_a_first_evaluation_in_a_new_process_draws_no_seed_for_workers_that_persist(tmp_path: Path) -> None:
    job = TrainerJob(samples=32, evaluate=10, workers=1, more={"dataloader_persistent_workers": True})
    require_undisturbed(tmp_path, job, ["in a step"])


def test_an_evaluation_on_start_is_made_where_the_run_begins_alone(tmp_path: Path) -> None:
    """It would be logged as that of step 0 again, with the weights that the run goes on with."""
    require_undisturbed(tmp_path, TrainerJob(samples=28, more={"eval_on_start": True}), ["in a step"])
    printed = [file.read_text() for file in sorted((tmp_path / "0").rglob("attempt-*/rank-00000.out"))]
    assert [text.count("'eval_loss'") for text in printed] == [1, 0]


@pytest.mark.soak
def test_the_same_of_accelerates_loader_of_an_evaluation(tmp_path: Path) -> None:
    job = ACCELERATE.but(bad_at=(), samples=16, epochs=5, evaluate=1, workers=1)
    require_undisturbed(tmp_path, job, ["in a step"])


def test_a_new_process_tells_the_samplers_of_accelerate_which_epoch_follows(tmp_path: Path) -> None:
    job = ACCELERATE.but(bad_at=(), samples=16, epochs=4, evaluate=1, more={"use_seedable_sampler": True})
    require_undisturbed(tmp_path, job, ["in a step"])


@pytest.mark.soak
def test_what_accelerate_saves_under_numbers_has_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """Behind a kill and behind a rollback: no number is left out, and none is met again."""
    require_undisturbed(tmp_path, ACCELERATE.but(evaluate=1, save=4), ["in a step"])


@pytest.mark.soak
@pytest.mark.parametrize("job", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
def test_each_way_to_be_told_to_stop(tmp_path: Path, job: TrainerJob) -> None:
    require_undisturbed(tmp_path, job.but(bad_at=()), list(TOLD))


@pytest.mark.soak
@pytest.mark.parametrize("job", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
def test_a_rank_that_is_killed_anywhere_costs_nothing(tmp_path: Path, job: TrainerJob) -> None:
    require_undisturbed(tmp_path, job, list(PHASES))
