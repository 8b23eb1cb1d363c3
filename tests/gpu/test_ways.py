"""Each way to train on a device, in one process: a healthy run is the unguarded one, and one with a bad batch is the
run that was told from the start to leave it out. Bit for bit, with kernels that are deterministic."""

from pathlib import Path

import pytest
from job_results import Scenarios
from on_devices import DEVICES, WAYS
from toy import facts, require_same

from rollback.facts.training import Incident, Restored


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_as_if_nothing_had_been_there(tmp_path: Path, way: str, device: str) -> None:
    toy = WAYS[way].but(device=device)
    bad = toy.but(nan=(57,))
    scenarios = Scenarios(tmp_path, limit=900)  # a compiler takes minutes on a busy machine
    scenarios.add("healthy", toy)
    scenarios.add("unguarded", toy, run=None)
    scenarios.add("bad", bad)
    scenarios.add("told", bad, skips_of=str(scenarios.run("bad")))
    output = scenarios.python()
    require_same(scenarios.portrait("healthy", 0), scenarios.portrait("unguarded", 0), f"{way}\n{output}")
    require_same(scenarios.portrait("bad", 0), scenarios.portrait("told", 0), f"{way}\n{output}")
    assert not facts(scenarios.run("healthy"), Incident)
    (restored,) = facts(scenarios.run("bad"), Restored)
    assert restored.route == "in_process"
