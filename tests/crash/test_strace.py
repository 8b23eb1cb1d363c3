"""A process killed at any system call of a save, by strace: the old checkpoint or both, and the run goes on exactly."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from selection import soak
from straced import Place, Server, Strace, spread, why_not
from toy import Toy, facts, require_same

from checkpoints import whole, write_checkpoint
from counted import Tell
from rollback.checkpoints import ring
from rollback.errors import ExitCode
from rollback.facts.training import Attached
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.rundir.paths import RunPaths

UNAVAILABLE = why_not()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
FAIL = {"ENOSPC": {"fsync"}, "EIO": {"fsync", "openat", "openat2"}}
"""Calls that fail with each error besides those that change something: a full disk can be read."""
OLD, NEW = "c000000-s00000010", "c000001-s00000020"


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param, warm=request.param == "straced_ranks.py")  # a fork copies what was imported
    yield server
    server.close()


Saved = tuple[RunPaths, int, Strace]


def save(server: Server, root: Path, at: Place | None = None, fault: str = "signal=KILL") -> Saved:
    """A second checkpoint is saved beside an old one, and what `fault` says becomes of it `at` a call."""
    paths = RunPaths(root)
    paths.root.mkdir()
    write_checkpoint(paths, 0, 10)
    server.ask(str(root))
    strace = server.trace(Path(f"{root}-strace"), at, fault)
    return paths, int(server.answer()), strace


@pytest.mark.parametrize("at_every_call", [False, *soak(True)], ids=["changes", "every call"])
@pytest.mark.parametrize("server", ["saver.py"], indirect=True)
def test_a_save_killed_at_every_call_leaves_the_old_checkpoint_or_both(
    server: Server, tmp_path: Path, tell: Tell, at_every_call: bool
) -> None:
    """By default at the first call, and at each that comes directly behind a change: all that a disk may be left as."""
    paths, status, strace = save(server, tmp_path / "undisturbed")
    assert status == 0
    assert ring.names(paths) == [OLD, NEW]
    places, changes = strace.calls(), strace.changes()
    assert {"mkdirat", "openat", "write", "renameat"} <= {name for name, _ in changes}
    seen = []
    for number, place in enumerate(places):
        if not at_every_call and number > 0 and places[number - 1] not in changes:
            continue
        paths, status, strace = save(server, tmp_path / str(number), place)
        assert status == -signal.SIGKILL, place
        assert strace.calls() == places[: number + 1], "it died somewhere else"
        ring.sweep(paths)
        names = ring.names(paths)
        assert all(whole(paths, name) for name in names), place
        seen.append(names)
        later = write_checkpoint(paths, 2, 30)
        assert ring.names(paths) == [*names, later]
    assert seen == sorted(seen), "once there, it stays"
    assert seen[0] == [OLD]
    assert seen[-1] == [OLD, NEW]
    assert len(seen) > len(changes)
    tell(f"{len(seen)} passed of {len(seen)}")


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("server", ["saver.py"], indirect=True)
def test_a_disk_that_fails_at_any_call_of_a_save_leaves_no_false_checkpoint(
    server: Server, tmp_path: Path, tell: Tell, error: str
) -> None:
    _, status, strace = save(server, tmp_path / "undisturbed")
    assert status == 0
    changes = strace.changes()
    places = [place for place in strace.calls() if place in changes or place[0] in FAIL[error]]
    for number, place in enumerate(places):
        paths, status, _ = save(server, tmp_path / str(number), place, f"error={error}")
        assert status in (0, 5), place
        ring.sweep(paths)
        names = ring.names(paths)
        assert all(whole(paths, name) for name in names), place
        assert NEW in names if status == 0 else OLD in names, place
    tell(f"{len(places)} passed of {len(places)}")


TOY = Toy(samples=96, sampler="distributed", max_steps=9, settings={"snapshot_every": 5})
BEFORE_THE_SAVE = 4


class Job:
    """The toy on two ranks, undisturbed and killed in the save of step 5, or in that of the final state."""

    def __init__(self, server: Server, folder: Path, toy: Toy = TOY) -> None:
        self.server, self.folder, self.toy = server, folder, toy
        undisturbed = folder / "undisturbed"
        assert self.attempt(undisturbed) == [0, 0], (folder / "undisturbed.txt").read_text()
        self.portraits = [self.portrait(undisturbed, rank) for rank in range(2)]
        self.places = {rank: self.trace(rank) for rank in range(2)}

    def attempt(self, run: Path) -> list[int]:
        self.server.ask(json.dumps({"toy": self.toy.to_json(), "run": str(run)}))
        return list(self.server.answer()["statuses"])

    def portrait(self, run: Path, rank: int) -> dict[str, str]:
        return dict(json.loads(Path(f"{run}-portrait-{rank}.json").read_text()))

    def traced(self, run: Path, rank: int, kill_at: Place | None) -> tuple[list[int], list[Place]]:
        request = {"toy": self.toy.to_json(), "run": str(run), "trace": [rank, BEFORE_THE_SAVE]}
        self.server.ask(json.dumps(request))
        strace = self.server.trace(self.folder / "strace", kill_at)
        return list(self.server.answer()["statuses"]), strace.calls()

    def trace(self, rank: int) -> list[Place]:
        statuses, places = self.traced(self.folder / f"traced-{rank}", rank, None)
        assert statuses == [0, 0]
        return places

    def die_and_resume(self, rank: int, place: Place) -> int:
        """The step that the next attempt began at. Fails unless the run ends as an undisturbed one."""
        run = self.folder / f"{rank}-{place[0]}-{place[1]}"
        statuses, _ = self.traced(run, rank, place)
        assert statuses[rank] == -signal.SIGKILL, (place, statuses)
        if ring.names(RunPaths(run)):  # else all is in memory
            assert verify(ReadableRun.at(run)).exit_code == ExitCode.DONE, verify(ReadableRun.at(run))
        assert self.attempt(run) == [0, 0], Path(f"{run}.txt").read_text()
        for other in range(2):
            told = f"rank {rank} killed at {place[0]} {place[1]}, portrait of rank {other}"
            require_same(self.portrait(run, other), self.portraits[other], told)
        return int(facts(run, Attached)[-1].step)

    def die_and_resume_at(self, places: dict[int, list[Place]], to: tuple[int, ...] = (0, 5, 9)) -> int:
        """How many. to: steps at which some of the next attempts begin: some saves were undone and some were done."""
        began = {self.die_and_resume(rank, place) for rank, chosen in places.items() for place in chosen}
        assert set(to) <= began <= {0, 5, 9}
        return sum(map(len, places.values()))


@pytest.mark.parametrize("server", ["straced_ranks.py"], indirect=True)
def test_two_ranks_of_which_one_is_killed_in_a_save_go_on_exactly(server: Server, tmp_path: Path, tell: Tell) -> None:
    job = Job(server, tmp_path)
    count = job.die_and_resume_at({rank: spread(job.places[rank], 1) for rank in range(2)})
    tell(f"{count} passed of {count}")


@pytest.mark.soak
@pytest.mark.parametrize("server", ["straced_ranks.py"], indirect=True)
@pytest.mark.parametrize("fast_tier", [False, True], ids=["no slots", "slots"])
@pytest.mark.parametrize("toy", [TOY, TOY.but(sharding="fsdp", width=17)], ids=["replicated", "sharded"])
def test_two_ranks_of_which_one_is_killed_at_every_call_of_a_save_go_on_exactly(
    server: Server, tmp_path: Path, tell: Tell, fast_tier: bool, toy: Toy
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    job = Job(server, tmp_path, toy.with_settings(fast_tier=str(memory) if fast_tier else "off"))
    # In a slot the last call of a save is the rename that commits it, so none need be done before all calls are; it is
    # done only where one rank's last look at its slot comes behind the other rank's commit.
    count = job.die_and_resume_at(job.places, to=(0, 5) if fast_tier else (0, 5, 9))
    tell(f"{count} passed of {count}")
