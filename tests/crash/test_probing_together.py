"""Several nodes of a job ask at the same moment whether the ring's URL can be used."""

from collections.abc import Iterator
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
