"""One run with 1, 2, 4, 2 and again 1 rank: every batch is made of the same samples throughout."""

import json
import os
import signal
from pathlib import Path

import pytest
from job_results import Scenarios
from toy import Toy, consumed, facts, history, train

from rollback.errors import ExitCode
from rollback.facts.training import Accepted, Attached, Finished, Restored
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import RunPaths

TOY = Toy(samples=244, epochs=2, sampler="distributed", batch_size=8, augment=True)  # 31 batches an epoch
STAGES = ((1, 13), (2, 33), (4, 43), (2, 53), (1, None))


def toy_of(ranks: int) -> Toy:
    return TOY.but(batch_size=8 // ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped and started with another number of ranks four times."""
    folder = tmp_path_factory.mktemp("worlds")
    for place, (ranks, told) in enumerate(STAGES):
        (folder / str(place)).mkdir()
        if ranks == 1:
            alone(folder, place, told)
            continue
        scenarios = Scenarios(folder / str(place))
        scenarios.add("job", toy_of(ranks), run=str(folder / "run"), signal=[ranks - 1, told, signal.SIGTERM])
        scenarios.torchrun(ranks)
        assert [scenarios.result("job", rank) for rank in range(ranks)] == [{"exit": 75}] * ranks
    return folder


def alone(folder: Path, place: int, told: int | None) -> None:
    """A stage of one rank, in this process. The last one meets a NaN, and goes back to what other ranks have saved."""

    def stop(_guard: object, position: int) -> None:
        if position == told:
            os.kill(os.getpid(), signal.SIGTERM)

    toy, log = toy_of(1), folder / str(place) / "job-0.log"
    if told is None:
        train(toy.but(nan=(55,)).with_settings(rewind=12, policy="surgical"), folder / "run", log=log)
        return
    with pytest.raises(SystemExit) as left:
        train(toy, folder / "run", hook=stop, log=log)
    assert left.value.code == 75


def samples(folder: Path) -> dict[int, list[int]]:
    """By position, the samples of all ranks together, as they last came by."""
    seen: dict[int, dict[int, list[int]]] = {}
    for place, (ranks, _) in enumerate(STAGES):
        for rank in range(ranks):
            for line in (folder / str(place) / f"job-{rank}.log").read_text().splitlines():
                _, _, position, ids = json.loads(line)
                known = seen.setdefault(position, {})
                if len(known) and rank == 0:
                    known.clear()
                known[rank] = ids
    return {position: sorted(i for ids in ranks.values() for i in ids) for position, ranks in sorted(seen.items())}


def test_every_batch_is_made_of_the_samples_of_an_undisturbed_run(folder: Path, tmp_path: Path) -> None:
    undisturbed, run = consumed(train(TOY)), folder / "run"
    (window,) = history(run).skip_list  # of the NaN
    taken = {position: ids for position, ids in samples(folder).items() if position not in window}
    assert taken == {position: sorted(ids) for position, ids in undisturbed.items() if position not in window}
    assert facts(run, Finished)[-1].step == 62 - len(window)


def test_the_record_says_how_many_ranks_there_were_and_was_taken_over_from(folder: Path) -> None:
    run = folder / "run"
    told = [(fact.world_size, fact.ranks_before) for fact in facts(run, Attached)]
    assert told == [(1, None), (2, 1), (4, 2), (2, 4), (1, 2)]
    assert [fact.after["world_size"] for fact in facts(run, Accepted)] == [2, 4, 2, 1]
    identity = read_identity(RunPaths(run))
    assert identity is not None
    assert (identity.job.world_size, identity.job.data["batch_size"]) == (1, 8)


def test_a_rollback_crosses_a_change_of_ranks(folder: Path) -> None:
    (restored,) = facts(folder / "run", Restored)
    assert restored.step < 53
    ranks_of = {path.name: len(list(path.glob("*.safetensors"))) for path in (folder / "run" / "ring").iterdir()}
    assert ranks_of[restored.checkpoint] in (2, 4)


def test_readers_understand_a_ring_of_several_numbers_of_ranks(folder: Path) -> None:
    assert verify(ReadableRun.at(folder / "run")).exit_code == ExitCode.DONE
    assert compile_audit(read_run_contents(folder / "run")).notices == []
