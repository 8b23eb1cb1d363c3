"""Several nodes of a job ask at the same moment whether the ring's URL can be used."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import faulty
import pytest
from waiting import wait_for

from rollback.errors import RingUnavailable
from rollback.ring.url import store as storing
from rollback.ring.url.store import Store
from rollback.supervisor import draining
from rollback.supervisor.draining import reach

NODES = 8


@pytest.fixture
def bucket() -> Iterator[faulty.Bucket]:
    bucket = faulty.new_bucket("shared")
    bucket.delay = 0.05
    yield bucket
    del faulty.BUCKETS["shared"]


def test_nodes_that_probe_a_slow_url_at_once_do_not_take_each_other_s_object_for_theirs(bucket: faulty.Bucket) -> None:
    with ThreadPoolExecutor(NODES) as pool:
        for ended in [pool.submit(Store("faulty://shared/run").probe) for _ in range(NODES)]:
            ended.result()
    assert not bucket.objects


def test_a_node_that_follows_writes_nothing_to_see_whether_the_url_answers(bucket: faulty.Bucket) -> None:
    bucket.delay = 0.0
    assert reach("faulty://shared/run", writing=False) is not None
    assert {operation.partition(" ")[0] for operation in bucket.operations} == {"get"}
    bucket.fail(1, "for ever")
    with pytest.raises(RingUnavailable):
        Store("faulty://shared/run", patience=0.05).probe(writing=False)


def test_a_node_that_others_may_wait_for_asks_longer_where_that_may_help(
    bucket: faulty.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_PATIENCE_AT_START", 0.01)
    bucket.delay, said = 0.0, list[str]()
    bucket.fail(1, "for ever")

    def say(line: str) -> None:
        said.append(line)
        bucket.heal()

    assert reach("faulty://shared/run", writing=False, expected=60.0, say=say) is not None
    assert "it is tried again for 60 s" in said[0]


def test_a_launch_says_that_its_url_does_not_answer(bucket: faulty.Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may be patient for minutes before it fails."""
    monkeypatch.setattr(storing, "STUCK", 0.05)
    find, said = bucket.find, list[str]()

    def answer_once_that_is_said(key: str) -> bytes:
        wait_for(lambda: said)
        return find(key)

    monkeypatch.setattr(bucket, "find", answer_once_that_is_said)
    assert reach("faulty://shared/run", writing=False, say=said.append) is not None
    assert said == ["nothing has got through to faulty://shared/run for 0 s; it is tried again"]


def test_what_takes_long_here_is_not_told_as_a_url_that_does_not_answer(
    bucket: faulty.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that fetches first reads what checkpoints are on its own disk."""
    looks, said, now = list[Callable[[], None]](), list[str](), [0.0]
    find = bucket.find

    def watched(name: str, every: float, look: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        looks.append(look)
        return contextlib.nullcontext()

    def answer_late(key: str) -> bytes:
        now[0] += storing.STUCK + 1
        looks[0]()
        return find(key)

    monkeypatch.setattr(storing, "called_every", watched)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = Store("faulty://shared/run")
    with store.told_if_stuck(said.append):
        for _ in range(2):
            store.get("key", 1)
            now[0] += 1000.0
            looks[0]()
        assert said == []
        monkeypatch.setattr(bucket, "find", answer_late)
        store.get("key", 1)
    assert said == ["nothing has got through to faulty://shared/run for 5 s; it is tried again"]
