"""The supervisor of a guarded job with loader workers is killed: what it leaves, how soon, and where it goes on."""

import time
from pathlib import Path

import psutil
from job_results import Scenarios
from launching import is_gone
from test_preemption import HELD, LONG, is_training
from toy import facts, require_same
from waiting import LIMIT, wait_for

from rollback.facts.training import Attached, Committed
from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths

AT_ONCE = 5.0  # seconds


def test_ranks_and_their_loader_workers_end_with_a_killed_supervisor_and_the_same_command_goes_on_exactly(
    tmp_path: Path,
) -> None:
    scenarios, lost = Scenarios(tmp_path), tmp_path / "it-is-lost"
    # Ranks that are held commit nothing: where the disk is slow, there would be no checkpoint before the hold.
    scenarios.add("lost", LONG.but(patient=True), holds=[HELD, str(lost)])
    run = scenarios.run("lost")
    job = scenarios.start_launch(run)
    wait_for(lambda: is_training(run))
    wait_for(lambda: any(fact.step > 0 for fact in facts(run, Committed)))
    ranks = [psutil.Process(beat.pid) for beat in read_heartbeats(RunPaths(run).ranks).values()]
    left = [process for rank in ranks for process in (rank, *rank.children(recursive=True))]
    assert len(left) >= 4, "these are not two ranks with a worker each"
    job.kill()
    killed = time.monotonic()
    wait_for(lambda: all(is_gone(process) for process in left))
    assert time.monotonic() - killed < AT_ONCE, "they outlived their supervisor"
    job.communicate(timeout=LIMIT)
    lost.touch()
    code, output = scenarios.launch(run)
    assert code == 0, output
    assert [fact.step > 0 for fact in facts(run, Attached)] == [False, True], "it began anew"
    undisturbed = Scenarios(tmp_path / "undisturbed")
    undisturbed.folder.mkdir()
    undisturbed.add("lost", LONG)
    undisturbed.torchrun(2)
    for rank in range(2):
        require_same(scenarios.portrait("lost", rank), undisturbed.portrait("lost", rank), f"rank {rank}")
