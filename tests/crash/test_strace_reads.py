"""A disk that refuses to read a checkpoint, at any system call of a restore, by strace.

Once: it is read again. For good: another copy of it, or the older one. Whichever it is, all ranks take the same and the
run ends exactly; where the directory itself cannot be listed at a start, that start is refused and the next one is as
it should be.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from straced import READS, Place, Server, why_not
from toy import Toy, facts, require_same, skip_list

from counted import Tell
from rollback.checkpoints import tiers
from rollback.facts.training import Attached, Finished, Restored
from rollback.ring.in_run import RingInRun
from rollback.rundir.paths import RunPaths

UNAVAILABLE = why_not()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
TOY = Toy(samples=128, sampler="distributed", max_steps=12, settings={"snapshot_every": 5})
OLDER, NEWEST = "c000000-s00000000", "c000001-s00000005"
ENDED = 99
REFUSED = "refused"
FOR_GOOD = "1+"
READ_TENSORS = {"preadv", "preadv2"}  # which of the two depends on the C library


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("straced_ranks.py", warm=True)
    yield server
    server.close()


class Job:
    """The toy on two ranks. Everything that an attempt leaves is in `now`, which is put back for each fault."""

    def __init__(self, server: Server, folder: Path, toy: Toy, batch: int | None) -> None:
        """batch: at which the thread that trains is traced; None: from before the guard is made."""
        self.server, self.folder, self.toy, self.batch = server, folder, toy, batch
        self.now, self.saved = folder / "now", folder / "saved"
        self.run = self.now / "run"
        self.now.mkdir()
        self.fresh: dict[str, list[dict[str, str]]] = {}

    def ask(self, **request: object) -> list[int]:
        self.server.ask(json.dumps({"toy": self.toy.to_json(), "run": str(self.run), **request}))
        return list(self.server.answer()["statuses"])

    def keep(self) -> None:
        shutil.copytree(self.now, self.saved)

    def put_back(self) -> None:
        shutil.rmtree(self.now)
        shutil.copytree(self.saved, self.now)

    def portraits(self, run: Path) -> list[dict[str, str]]:
        return [dict(json.loads(Path(f"{run}-portrait-{rank}.json").read_text())) for rank in range(2)]

    def as_if_undisturbed(self) -> list[dict[str, str]]:
        """What a run with the same skip list from the start ends with."""
        skips = skip_list(self.run)
        key = json.dumps(skips)
        if key not in self.fresh:
            run = self.folder / f"fresh-{len(self.fresh)}"
            toy = self.toy.but(nan=()).with_settings(skip=skips, fast_tier="off")
            self.server.ask(json.dumps({"toy": toy.to_json(), "run": str(run)}))
            assert self.server.answer()["statuses"] == [0, 0], Path(f"{run}.txt").read_text()
            self.fresh[key] = self.portraits(run)
        return self.fresh[key]

    def traced(self, rank: int, at: Place | None) -> tuple[list[int], list[Place]]:
        self.put_back()
        request = {"toy": self.toy.to_json(), "run": str(self.run), "trace_training": [rank, self.batch]}
        self.server.ask(json.dumps(request))
        places = self.places_of_newest()
        strace = self.server.trace(self.folder / "strace", at, "error=EIO", calls=READS, paths=places)
        return list(self.server.answer()["statuses"]), strace.calls()

    def places_of_newest(self) -> Sequence[Path]:
        """The directories that the newest checkpoint is in, and its files."""
        ring = self.run / "ring"
        found = [place.directory for place in tiers.in_slots(RunPaths(self.run)) if place.name == NEWEST]
        directories = [*found, ring / NEWEST]
        files = [path / name for path in directories for name in ("manifest.json", *SHARDS)]
        return [ring, *directories, *files]

    def fail_at(self, rank: int, place: Place) -> str:
        """Which checkpoint was used. Fails unless the run ends as an undisturbed one."""
        statuses, _ = self.traced(rank, place)
        told = f"rank {rank}, EIO at {place}:\n" + Path(f"{self.run}.txt").read_text()
        used = REFUSED
        if statuses != [0, 0]:
            assert 1 in statuses, told
            assert 0 not in statuses, told
            assert "RunDirectoryError: " in told, told
            assert self.ask() == [0, 0], told
        else:
            fact = facts(self.run, Attached if self.batch is None else Restored)[-1]
            used = fact.checkpoint
        assert facts(self.run, Finished), told
        for found, wanted in zip(self.portraits(self.run), self.as_if_undisturbed(), strict=True):
            require_same(found, wanted, told)
        return used

    def fail_at_each(self, every: int) -> str:
        """How it went. At calls of each rank, `every` apart, once each; and for good, for each kind of call."""
        once, for_good = [], []
        for rank in range(2):
            statuses, places = self.traced(rank, None)
            assert statuses == [0, 0], Path(f"{self.run}.txt").read_text()
            kinds = {name for name, _ in places}
            assert {"openat", "read"} <= kinds
            assert kinds & READ_TENSORS
            for place in places[rank::every]:
                once.append(self.fail_at(rank, place))
                assert once[-1] in (NEWEST, REFUSED), f"rank {rank}, EIO once at {place}: a sound checkpoint is lost"
            for name in sorted(kinds & {"read", *READ_TENSORS}):
                for_good.append(self.fail_at(rank, (name, FOR_GOOD)))
                assert for_good[-1] == OLDER, f"rank {rank}, EIO at {name} for good"
        count = len(once) + len(for_good)
        return f"{count} passed of {count}; of {len(once)} that failed once {once.count(REFUSED)} starts were refused"


SHARDS = ("rank-00000.safetensors", "rank-00001.safetensors")


def broken_off(server: Server, folder: Path, fast_tier: str) -> Job:
    """An attempt that died with the newest checkpoint committed; with a fast tier, it is in a slot and in the ring."""
    folder.mkdir(exist_ok=True)
    memory = folder / "now" / "memory"
    toy = TOY.with_settings(fast_tier=str(memory) if fast_tier == "slots" else "off")
    job = Job(server, folder, toy, None)
    memory.mkdir()
    assert ENDED in job.ask(end_at=9), Path(f"{job.run}.txt").read_text()
    if fast_tier == "slots":
        (place,) = [place for place in tiers.in_slots(RunPaths(job.run)) if place.name == NEWEST]
        RingInRun(RunPaths(job.run)).put(place.manifest, place.directory)
    job.keep()
    return job


def test_a_disk_that_cannot_be_read_at_a_start(server: Server, tmp_path: Path, tell: Tell) -> None:
    tell(broken_off(server, tmp_path, "no slots").fail_at_each(every=120))


@pytest.mark.soak
@pytest.mark.parametrize("fast_tier", ["no slots", "slots"])
def test_a_disk_that_cannot_be_read_at_any_call_of_a_start(
    server: Server, tmp_path: Path, tell: Tell, fast_tier: str
) -> None:
    tell(broken_off(server, tmp_path, fast_tier).fail_at_each(every=1))


def in_training(server: Server, folder: Path) -> Job:
    """An attempt that goes back to the newest checkpoint in process."""
    toy = TOY.but(samples=192, max_steps=20, nan=(15,), nan_rank=1)  # when the newest is good, and the next one is not
    job = Job(server, folder, toy, 15)
    job.keep()
    return job


@pytest.mark.soak
def test_a_disk_that_cannot_be_read_in_a_rollback(server: Server, tmp_path: Path, tell: Tell) -> None:
    tell(in_training(server, tmp_path).fail_at_each(every=40))


@pytest.mark.soak
def test_a_disk_that_cannot_be_read_at_any_call_of_a_rollback(server: Server, tmp_path: Path, tell: Tell) -> None:
    tell(in_training(server, tmp_path).fail_at_each(every=1))
