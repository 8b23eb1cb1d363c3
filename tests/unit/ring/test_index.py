"""The index of a ring at a URL: what it names of the record, which must not outgrow what is read of an index."""

import os
from pathlib import Path

import pytest

from rollback.errors import IndexDamaged
from rollback.ring.url import index as index_module
from rollback.ring.url.index import PIECE, describe, first_index, next_index, read_indexes, record_paths
from rollback.ring.url.record import download, read_record_file, upload
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


@pytest.mark.parametrize(
    ("content", "told", "hint"),
    [
        (b"\n<!DOCTYPE html><html>Sign in</html>", "index-0.json is a web page; index-1.json is a web page", "proxy"),
        (b'{"generation": 1', "index-0.json is damaged (", "restore the index from a copy"),
    ],
)
def test_a_page_that_answers_in_the_place_of_an_index_is_no_damage(
    tmp_path: Path, content: bytes, told: str, hint: str
) -> None:
    store = Store((tmp_path / "ring").as_uri())
    for slot in (0, 1):
        store.put(f"index-{slot}.json", content)
    with pytest.raises(IndexDamaged) as refused:
        read_indexes(store)
    assert told in refused.value.message
    assert hint in (refused.value.hint or "")


def test_metrics_whose_end_a_power_loss_took_are_at_the_url_as_they_went_on(tmp_path: Path) -> None:
    """They are not synced, so the disk may have less of them afterwards than the URL has."""
    paths, store = RunPaths(tmp_path / "run"), Store((tmp_path / "ring").as_uri())
    paths.metrics.parent.mkdir(parents=True)
    line = b"x" * 1023 + b"\n"
    paths.metrics.write_bytes(line * (2 * PIECE // len(line) + 1))
    index = first_index("a-run-id", "w")
    index = next_index(index, "w", (), (), upload(store, paths, index))
    os.truncate(paths.metrics, 2 * PIECE - 50 * len(line))
    with paths.metrics.open("ab") as metrics:
        metrics.write((b"y" * 700 + b"\n") * 200)
    (kept,) = upload(store, paths, index)
    assert read_record_file(store, kept, 4 * PIECE) == paths.metrics.read_bytes()


def test_a_file_of_several_pieces_that_was_fetched_is_there_by_its_name_after_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, new = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "new")
    paths.metrics.parent.mkdir(parents=True)
    paths.metrics.write_bytes((b"x" * 1023 + b"\n") * (PIECE // 1024 + 1))
    store = Store((tmp_path / "ring").as_uri())
    (kept,) = upload(store, paths, first_index("a-run-id", "w"))
    synced: list[tuple[str, bool]] = []
    really = os.fsync

    def sync(fd: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), new.metrics.exists()))
        really(fd)

    monkeypatch.setattr(os, "fsync", sync)
    download(store, kept, new.root)
    assert synced[-1] == (str(new.metrics.parent), True)
