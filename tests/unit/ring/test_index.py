"""The index of a ring at a URL: what it names of the record, which must not outgrow what is read of an index."""

from pathlib import Path

import pytest

from rollback.ring.url import index as index_module
from rollback.ring.url.index import describe, first_index, next_index, read_indexes, record_paths
from rollback.ring.url.record import upload
from rollback.ring.url.store import Store
from rollback.rundir.paths import RunPaths


def test_what_ranks_saw_of_very_many_incidents_leaves_the_index_one_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_LIMIT", index_module._LIMIT >> 10)
    monkeypatch.setattr(index_module, "_EVIDENCE", index_module._EVIDENCE >> 10)
    paths, store = RunPaths(tmp_path / "run"), Store((tmp_path / "ring").as_uri())
    for incident in range(9800, 10_001):
        path = paths.evidence(incident, 0)
        path.parent.mkdir(parents=True)
        path.write_text(f"of incident {incident}")
    paths.identity.write_text("{}")
    (tmp_path / "ring").mkdir()
    index = next_index(before := first_index("a-run-id", "w"), "w", (), (), upload(store, paths, before))
    store.put("index-1.json", index.to_json())
    assert read_indexes(store) == [index]
    newest = [f"incidents/{incident}/rank-00000.json" for incident in range(10_000, 10_000 - 16, -1)]
    assert record_paths(paths) == [*sorted(newest), "run.json"]
    assert describe(b"of incident 10000") in [piece for kept in index.record for piece in kept.pieces]
