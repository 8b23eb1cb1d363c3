"""Machine after machine is lost: each goes on from the URL alone, and the end is that of an undisturbed run."""

import random
import signal
from pathlib import Path

from attempts import Forker
from toy import Toy, facts, require_same

from rollback.facts.training import Attached

SEED = 20260815
LOSSES = 3


def test_a_run_whose_machine_is_lost_again_and_again_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    toy = Toy(samples=640, max_steps=120, settings={"snapshot_every": 5})
    ringed = toy.with_settings(ring=f"file://{tmp_path}/ring")
    log = tmp_path / "log"
    with Forker() as forker:
        undisturbed = forker.finish(toy, tmp_path / "undisturbed", log=tmp_path / "undisturbed-log")
        began = []
        for number in range(LOSSES):
            machine = tmp_path / f"machine-{number}"
            status = forker.status(ringed, machine, log=str(log), kill_after=dice.uniform(1.0, 4.0))
            told = Path(f"{machine}.txt").read_text()
            assert status in (0, -signal.SIGKILL), f"seed {SEED}, machine {number}: {told}"
            began += [fact.step for fact in facts(machine, Attached)][-1:]
        portrait = forker.finish(ringed, tmp_path / "last", log=log)
        require_same(portrait, undisturbed, f"seed {SEED}")
    began += [fact.step for fact in facts(tmp_path / "last", Attached)][-1:]
    print("went on at steps", began)
    assert began == sorted(began), "no machine falls back behind what the one before it had"
    assert began[-1] > 0
