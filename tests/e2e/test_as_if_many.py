"""What is done where there are thousands of ranks, by four of them."""

import signal
from pathlib import Path

from job_results import Scenarios
from toy import Toy, facts, require_same

from rollback.checkpoints import ring
from rollback.errors import ExitCode
from rollback.facts.training import Attached, Incident, Restored
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import FORMAT_OF_PACKS, RunPaths

JOB = Path(__file__).parent / "jobs" / "as_if_many.py"
RANKS, ILL, KILLED = 4, 2, 3
SETTINGS = {
    "policy": "surgical", "skip_after": 0, "rewind": 0, "snapshot_every": 5, "keep": 3, "horizon": 20,
    "fast_tier": "off",
}  # fmt: skip
TOY = Toy(samples=960, sampler="distributed", nan=(25,), nan_rank=ILL, patient=False, settings=SETTINGS)


def test_ranks_that_share_files_go_back_and_are_started_again_from_them_exactly(tmp_path: Path) -> None:
    scenarios = Scenarios(tmp_path, JOB)
    run = RunPaths(scenarios.run("job"))
    fewer = f'sed -i \'s/"format": 5/"format": 4/\' {run.identity}'  # as if the first attempt had had fewer ranks
    scenarios.add("job", TOY, signal=[KILLED, 40, signal.SIGKILL, 1], shell=[0, 35, fewer])
    code, output = scenarios.launch(run.root, "--last-snapshot", "off", ranks=RANKS)
    assert code == 0, output[-8000:]
    (incident,), (back,) = facts(run.root, Incident), facts(run.root, Restored)
    first, second = facts(run.root, Attached)
    assert (first.checkpoint, back.route) == (None, "in_process")
    assert second.step > back.step
    for name in ring.names(run):
        files = {path.name for path in run.checkpoint(name).iterdir()}
        assert files == {"pack-00000-00001.shards", "pack-00002-00003.shards", "manifest.json"}
    assert (identity := read_identity(run)) is not None
    assert identity.format == FORMAT_OF_PACKS
    told = {path.stem for path in run.incident(incident.incident).glob("rank-*.json")}
    assert (incident.ranks, told) == ((ILL,), {"rank-00000", f"rank-{ILL:05d}"}), "who saw it, and one to compare with"
    assert verify(ReadableRun.at(run.root)).exit_code is ExitCode.DONE
    undisturbed = Scenarios(tmp_path / "undisturbed")
    undisturbed.folder.mkdir()
    undisturbed.add("job", TOY, skips_of=str(run.root))
    undisturbed.torchrun(RANKS)
    for rank in range(RANKS):
        require_same(scenarios.portrait("job", rank), undisturbed.portrait("job", rank), f"rank {rank}")
