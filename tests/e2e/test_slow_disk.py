"""A disk or bucket that holds a write up for as long as it likes: training goes on, nothing is committed half written.

No clock decides: the writer waits at a gate that the training loop itself opens, many steps later.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty import Bucket
from selection import soak
from toy import Toy, facts, require_same, train

from rollback.checkpoints import ring
from rollback.errors import ExitCode
from rollback.facts.training import Committed, Drained, DrainFailed, Dropped
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.ring import in_run
from rollback.rundir.paths import RunPaths
from rollback.train.snapshots import pipeline

TOY = Toy(samples=1200, patient=False)  # 300 steps, a snapshot every 10
HELD_FROM, STEPS = 15, 40


class Gate:
    """Where a writer waits. Opened for good by the loop; `reached` once somebody stands before it."""

    def __init__(self) -> None:
        self.shut, self.reached, self._open = False, threading.Event(), threading.Event()

    def wait(self) -> None:
        if self.shut and not self._open.is_set():
            self.reached.set()
            assert self._open.wait(20), "the loop did not come to the batch at which the gate opens"

    def before(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **more: Any) -> Any:
            self.wait()
            return act(*arguments, **more)

        return slow

    def open(self) -> None:
        self._open.set()


def held_up(gate: Gate, during: Callable[[], None]) -> tuple[Callable[[object, int], None], list[int]]:
    """A hook that shuts the gate, counts the steps that pass while a writer stands before it, and opens it."""
    steps: list[int] = []

    def hook(_guard: object, position: int) -> None:
        gate.shut |= position == HELD_FROM
        if gate.reached.is_set() and len(steps) < STEPS:
            steps.append(position)
            during()
            if len(steps) == STEPS:
                gate.open()

    return hook, steps


@pytest.mark.parametrize("operation", ["the shard is written", *soak("the checkpoint is committed")])
def test_training_goes_on_while_the_disk_holds_a_save_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    run, gate, seen = tmp_path / "run", Gate(), set()
    owner, name = (pipeline, "write_direct") if operation.startswith("the shard") else (ring, "write_file")
    monkeypatch.setattr(owner, name, gate.before(getattr(owner, name)))
    hook, steps = held_up(gate, lambda: seen.add(tuple(ring.names(RunPaths(run)))))
    ended = train(TOY, run, hook=hook)
    assert len(steps) == STEPS, "steps that were done while the writer stood still"
    (before,) = seen
    committed = facts(run, Committed)
    assert [fact.checkpoint for fact in committed[: len(before)]] == list(before), "nothing half written is there"
    assert committed[len(before)].step <= steps[0], "what was held up has landed"
    assert all(fact.step >= steps[-1] for fact in committed[len(before) + 1 :]), "those in between were postponed"
    assert not facts(run, Dropped)
    assert verify(ReadableRun.at(run)).exit_code == ExitCode.DONE
    require_same(ended, train(TOY), operation)


def test_training_and_its_snapshots_go_on_while_the_disk_holds_up_the_copy_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, memory, gate, seen = tmp_path / "run", tmp_path / "memory", Gate(), set()
    memory.mkdir()
    gate.shut = True
    monkeypatch.setattr(in_run, "write_direct", gate.before(in_run.write_direct))
    hook, steps = held_up(gate, lambda: seen.update(ring.names(RunPaths(run))))
    ended = train(TOY.with_settings(fast_tier=str(memory)), run, hook=hook)
    assert len(steps) == STEPS
    assert seen == set(), "nothing half written is a checkpoint"
    assert {fact.tier for fact in facts(run, Committed)} == {"fast"}
    assert len([fact for fact in facts(run, Committed) if steps[0] <= fact.step <= steps[-1]]) >= 1, (
        "snapshots do not wait"
    )
    assert facts(run, Committed)[-1].checkpoint in [fact.checkpoint for fact in facts(run, Drained)]
    assert not facts(run, DrainFailed)
    assert verify(ReadableRun.at(run)).exit_code == ExitCode.DONE
    require_same(ended, train(TOY), "the copy was held up")


@pytest.mark.parametrize("kind", ["rank-00000.safetensors", *soak("manifest.json")])
def test_training_goes_on_while_the_bucket_holds_an_upload_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: Bucket, kind: str
) -> None:
    run, gate, seen = tmp_path / "run", Gate(), set()
    gate.shut = True
    store = bucket.store

    def slow(key: str, data: bytes) -> None:
        if os.path.basename(key) == kind:
            gate.wait()
        store(key, data)

    monkeypatch.setattr(bucket, "store", slow)
    hook, steps = held_up(gate, lambda: seen.update(key for key in bucket.objects if key.endswith("manifest.json")))
    ended = train(TOY.with_settings(ring="faulty://bucket/run"), run, hook=hook)
    assert len(steps) == STEPS
    assert seen == set(), "at a URL a checkpoint exists when its manifest does"
    assert facts(run, Committed)[-1].checkpoint in [fact.checkpoint for fact in facts(run, Drained)]
    assert not facts(run, DrainFailed)
    assert verify(ReadableRun.at(run)).exit_code == ExitCode.DONE
    require_same(ended, train(TOY), kind)
