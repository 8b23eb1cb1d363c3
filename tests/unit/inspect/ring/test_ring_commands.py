"""`rollback ring`: what is listed, what is proved, what is taken out. Two ranks, made by the real writers."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner, Result
from unreadable import forbidden

from checkpoints import damage, manifest_of
from recorded_run import attached, hold, incident, rollback_plan
from rollback.checkpoints import pins, ring, tiers
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format import layout
from rollback.checkpoints.format.manifest import ShardRecord, read_manifest
from rollback.checkpoints.format.shard import ShardPiece, write_shard
from rollback.checkpoints.resume import beyond_the_record
from rollback.cli import app
from rollback.errors import ExitCode, NoUsableCheckpoint, OutputNotWritten, RollbackError, RunDirectoryError, UsageError
from rollback.facts.training import BecameGood, Committed, Evicted, Quarantined
from rollback.inspect.audit.contents import read_run_contents
from rollback.inspect.audit.verify import check_integrity
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.checkpoints import read_listing
from rollback.inspect.ring.verify import verify
from rollback.inspect.status.status import StatusReader, read_status
from rollback.rundir.identity import JobIdentity, new_identity, read_identity, write_identity
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths, shard_name
from rollback.rundir.seal import ENV_SEAL

OLD, MIDDLE, NEW = "c000000-s00000010", "c000001-s00000020", "c000002-s00000030"
JOB = JobIdentity(
    world_size=2,
    model=[("w", "float32", [2, 3]), ("b", "bfloat16", [3]), ("mean", "float64", [])],
    optimizer={"class": "AdamW", "groups": [2]},
    objects=["scheduler"],
    data={},
)
SHARED: dict[str, Any] = {
    "model": {"w": {"$tensor": "shared/model/w"}, "b": {"$tensor": "shared/model/b"}, "version": 3},
    "optimizer": {
        "state": {"$map": [[0, {"step": {"$tensor": "shared/optimizer/0"}}]]},
        "param_groups": [{"params": [0, 1], "betas": {"$tuple": [0.9, 0.95]}}],
    },
    "objects": {"scheduler": {"seen": {"$counter": [["a", 1]]}}},
    "sentinel": {"level": {"$float": "NaN"}},
    "counters": {"step": 1},
}
LOCAL: dict[str, Any] = {
    "buffers": {"mean": {"$tensor": "local/mean"}},
    "random": {"numpy": {"$array": "local/random"}, "token": {"$bytes": "AAE="}},
    "cursor": {},
}


def weights(step: int) -> np.ndarray[Any, Any]:
    return np.arange(6, dtype=np.float32).reshape(2, 3) + step


def pieces(rank: int, step: int) -> list[ShardPiece]:
    def piece(name: str, dtype: str, array: np.ndarray[Any, Any]) -> ShardPiece:
        return ShardPiece(name, dtype, array.shape, memoryview(array.tobytes()))

    own = [
        piece("local/mean", "F64", np.array(rank + 0.5)),
        piece("local/random", "U32", np.arange(5, dtype=np.uint32)),
    ]
    if rank == 0:
        return [*own, piece("shared/model/w", "F32", weights(step))]
    halves = np.arange(3, dtype=np.uint16)
    return [*own, piece("shared/model/b", "BF16", halves), piece("shared/optimizer/0", "F32", np.array(1.0, "f4"))]


def write(paths: RunPaths, seq: int, step: int, shared: dict[str, Any] = SHARED, local: dict[str, Any] = LOCAL) -> str:
    manifest, shards = manifest_of(seq, step), []
    for rank in range(2):
        directory = ring.begin_writing(paths, manifest.name, manifest.attempt)
        metadata = {"local": json.dumps(local)} | ({"shared": json.dumps(shared)} if rank == 0 else {})
        shards.append(ShardRecord.of(rank, write_shard(directory / shard_name(rank), pieces(rank, step), metadata)))
    ring.commit(paths, manifest.model_copy(update={"shards": tuple(shards)}))
    tell(paths, Committed(checkpoint=manifest.name, step=step, batch=2 * step, timeline=0, bytes=1, seconds=0.1))
    return manifest.name


def tell(paths: RunPaths, *facts: Any) -> None:
    journal = Journal(paths.train_journal, 1)
    for fact in facts:
        journal.append(fact)
    journal.close()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Three checkpoints, of which the older two are good."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    write_identity(paths, new_identity(JOB))
    for seq in range(3):
        write(paths, seq, 10 + 10 * seq)
    tell(paths, BecameGood(checkpoint=OLD, step=10), BecameGood(checkpoint=MIDDLE, step=20))
    return paths


def command(*words: object) -> Result:
    return CliRunner().invoke(app, ["ring", *map(str, words)])


def read_only(paths: RunPaths) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in paths.root.rglob("*")}


# --- list -------------------------------------------------------------------------------------------------------------


def statuses(paths: RunPaths) -> dict[str, str]:
    return {entry.checkpoint: entry.status for entry in read_listing(paths.root).checkpoints}


def test_the_list_says_what_each_checkpoint_is(paths: RunPaths) -> None:
    assert statuses(paths) == {OLD: "good", MIDDLE: "good", NEW: "candidate"}
    tell(paths, incident(1, 15, 25), rollback_plan(1, OLD, 10, (20, 60), discards=(MIDDLE,)))
    assert statuses(paths) == {OLD: "good", MIDDLE: "discarded", NEW: "discarded"}, "committed in the old timeline"
    ring.quarantine(paths, OLD)
    tell(paths, Quarantined(checkpoint=OLD, reason="a flipped bit"))
    (paths.checkpoint(NEW) / "manifest.json").write_text("{")
    assert statuses(paths) == {OLD: "quarantined", MIDDLE: "discarded", NEW: "damaged"}


def test_the_list_says_where_the_ring_is_so_that_it_is_found_from_anywhere(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(paths.root.parent)
    shown = command("list", paths.root.name)
    assert f"the ring is at {paths.ring}" in "".join(shown.stdout.splitlines()).replace("  ", "")
    assert json.loads(command("list", paths.root.name, "--json").stdout)["ring"] == str(paths.ring)


def test_the_list_says_how_to_see_what_the_run_keeps_at_its_url(paths: RunPaths) -> None:
    """It may be all that a run has left, and is not in the list of a run directory."""
    assert "at its URL" not in command("list", paths.root).stdout
    settings = {"policy": "balanced", "ring": "s3://bucket/run"}
    tell(paths, attached(OLD, 10).model_copy(update={"settings": settings}))
    assert "is not listed here: rollback ring list s3://bucket/run\n" in command("list", paths.root).stdout
    assert json.loads(command("list", paths.root, "--json").stdout)["url"] == "s3://bucket/run"


def test_the_list_as_text_and_as_json(paths: RunPaths) -> None:
    pins.pin(paths, OLD)
    ring.begin_writing(paths, "c000003-s00000040", 1)
    before = read_only(paths)
    text = command("list", paths.root)
    assert text.exit_code == 0
    rows = [line.split() for line in text.stdout.splitlines()]
    assert rows[0] == ["checkpoint", "step", "batch", "age", "size", "ranks", "where", "status"]
    assert rows[1][:3] == [OLD, "10", "20"]
    assert rows[1][-3:] == ["ring", "good,", "pinned"]
    assert ".writing-c000003-s00000040-0001" in text.stdout
    narrow = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["ring", "list", str(paths.root)])
    assert [line.split() for line in narrow.stdout.splitlines()][:4] == rows[:4], "nothing of a number is cut off"
    body = json.loads(command("list", paths.root, "--json").stdout)
    assert body["schema"] == 1
    assert [(entry["step"], entry["batch"], entry["pinned"]) for entry in body["checkpoints"]] == [
        (10, 20, True), (20, 40, False), (30, 60, False),
    ]  # fmt: skip
    assert {tuple(entry["tiers"]) for entry in body["checkpoints"]} == {("durable",)}
    assert {entry["age"] for entry in body["checkpoints"]} == {None}, "they were taken in 2030: another host's clock"
    assert body["checkpoints"][0]["bytes"] == sum(p.stat().st_size for p in paths.checkpoint(OLD).glob("*.safetensors"))
    assert body["leftovers"] == [".writing-c000003-s00000040-0001"]
    assert read_only(paths) == before


def test_a_damaged_journal_costs_the_status_and_not_the_list(paths: RunPaths) -> None:
    lines = paths.train_journal.read_text().splitlines(keepends=True)
    paths.train_journal.write_text("".join(["{}\n", *lines[1:]]))
    assert set(statuses(paths).values()) == {"unknown"}
    (notice,) = read_listing(paths.root).notices
    assert "which checkpoints are good cannot be told" in notice
    assert verify(ReadableRun.at(paths.root)).exit_code == ExitCode.DONE


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    for words in (["list"], ["verify"], ["export"], ["pin"]):
        name = ["newest"] if words == ["pin"] else []
        assert isinstance(command(*words, tmp_path / "nowhere", *name).exception, UsageError)


def test_the_directory_of_a_ring_at_a_url_is_named_by_its_url(tmp_path: Path) -> None:
    (tmp_path / "index-1.json").write_text("{}")
    error = command("verify", tmp_path).exception
    assert isinstance(error, RunDirectoryError)
    assert f"rollback ring list file://{tmp_path}" in str(error.hint)


def test_a_pin_of_what_is_gone_is_told(paths: RunPaths) -> None:
    pins.pin(paths, MIDDLE)
    ring.quarantine(paths, MIDDLE)
    assert statuses(paths)[MIDDLE] == "quarantined"
    pins.pin(paths, OLD)
    paths.checkpoint(OLD).rename(paths.root / "elsewhere")
    assert read_listing(paths.root).notices == [f"{OLD} is pinned, but it is not in the ring any more"]


# --- verify -----------------------------------------------------------------------------------------------------------


def test_intact_checkpoints_are_proved_and_nothing_is_written(paths: RunPaths) -> None:
    before = read_only(paths)
    said = command("verify", paths.root)
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines()[-1] == "3 of 3 intact"
    assert read_only(paths) == before


def test_a_flipped_bit_a_missing_shard_and_a_truncated_manifest_are_named(paths: RunPaths) -> None:
    damage(paths.checkpoint(OLD) / shard_name(1))
    (paths.checkpoint(MIDDLE) / shard_name(0)).unlink()
    manifest = paths.checkpoint(NEW) / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-40])
    body = json.loads((said := command("verify", paths.root, "--json")).stdout)
    assert said.exit_code == ExitCode.NO_CHECKPOINT
    assert body["schema"] == 1
    faults = {entry["checkpoint"]: entry["faults"] for entry in body["checkpoints"]}
    assert [[fault["file"] for fault in faults[name]] for name in (OLD, MIDDLE, NEW)] == [
        [shard_name(1)], [shard_name(0)], ["manifest.json"],
    ]  # fmt: skip
    for name, words in ((OLD, "has hash"), (MIDDLE, "No such file"), (NEW, "damaged")):
        assert words in faults[name][0]["fault"]
        assert name in faults[name][0]["fault"]
        assert not faults[name][0]["unreadable"]
    manifest.write_bytes(whole)
    said = command("verify", paths.root)
    assert said.exit_code == ExitCode.FAILED
    assert said.stdout.splitlines()[-1] == "1 of 3 intact"
    assert command("verify", paths.root, NEW, "newest").exit_code == ExitCode.DONE
    assert command("verify", paths.root, "newest-good").exit_code == ExitCode.NO_CHECKPOINT


def test_a_checkpoint_that_this_user_may_not_read_is_not_called_damaged(paths: RunPaths) -> None:
    with forbidden(paths.checkpoint(OLD) / shard_name(1)):
        said, body = command("verify", paths.root), json.loads(command("verify", paths.root, "--json").stdout)
    assert said.exit_code == ExitCode.FAILED, "it is not proved to be intact"
    assert "damaged" not in said.stdout
    assert re.search(rf"{OLD}.* not readable", said.stdout)
    assert "Permission denied" in said.stdout
    assert [fault["unreadable"] for entry in body["checkpoints"] for fault in entry["faults"]] == [True]


def test_every_fault_of_a_checkpoint_is_named(paths: RunPaths) -> None:
    for rank in range(2):
        damage(paths.checkpoint(OLD) / shard_name(rank))
    assert [fault.file for fault in verify(ReadableRun.at(paths.root), [OLD]).checkpoints[0].faults] == [
        shard_name(0),
        shard_name(1),
    ]


def changed(tree: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {**tree, **parts}


MODEL = SHARED["model"]
MISFITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (changed(SHARED, model={"w": MODEL["w"]}), LOCAL, "tensor 'b' is missing"),
    (changed(SHARED, model={**MODEL, "b": MODEL["w"]}), LOCAL, r"'b' is float32\[2, 3\]; in the run it is bfloat16"),
    (changed(SHARED, model={**MODEL, "c": MODEL["w"]}), LOCAL, "model has no tensor 'c'"),
    (changed(SHARED, model={**MODEL, "b": {"$tensor": "shared/x"}}), LOCAL, "refers to 'shared/x', which no shard"),
    (changed(SHARED, model={**MODEL, "b": {"$tensor": ["x"]}}), LOCAL, "cannot be read"),
    (changed(SHARED, sentinel={"$set": []}), LOCAL, "unknown tag '\\$set'"),
    (changed(SHARED, sentinel={"a": {"$map": [1]}}), LOCAL, "cannot be read"),
    (changed(SHARED, optimizer={}), LOCAL, "no parameter groups"),
    (changed(SHARED, optimizer={"param_groups": [{"params": [0]}]}), LOCAL, r"groups have \[1\] parameters"),
    (changed(SHARED, objects={}), LOCAL, "keeps the objects"),
    ({"model": {}}, LOCAL, "tree 'shared' has no 'optimizer'"),
    (SHARED, {"buffers": {}, "random": {}, "cursor": {}}, "tensor 'mean' is missing"),
    (SHARED, changed(LOCAL, buffers={"mean": {"$tensor": "shared/model/w"}}), "which no shard holds"),
    (SHARED, changed(LOCAL, buffers=[]), "tree 'local' has no 'buffers'"),
    (SHARED, changed(LOCAL, kept=[]), "tree 'local' has no 'kept'"),
]


@pytest.mark.parametrize(("shared", "local", "words"), MISFITS)
def test_sound_files_with_the_wrong_content_are_found(
    paths: RunPaths, shared: dict[str, Any], local: dict[str, Any], words: str
) -> None:
    name = write(paths, 3, 40, shared, local)
    (found,) = verify(ReadableRun.at(paths.root), [name]).checkpoints
    assert not found.intact
    assert re.search(words, found.faults[0].fault), found.faults
    outcome = command("export", paths.root, name, "-o", paths.root.parent / "x")
    assert isinstance(outcome.exception, RollbackError)
    assert not (paths.root.parent / "x").exists()


def test_a_tree_that_is_nested_without_end_is_a_fault_and_no_crash(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "require_shallow", lambda text: None)  # another writer may not have asked
    manifest, shards = manifest_of(3, 40), []
    for rank in range(2):
        directory = ring.begin_writing(paths, manifest.name, manifest.attempt)
        metadata = {"local": "[" * 100_000, "shared": json.dumps(SHARED)}
        shards.append(ShardRecord.of(rank, write_shard(directory / shard_name(rank), pieces(rank, 40), metadata)))
    ring.commit(paths, manifest.model_copy(update={"shards": tuple(shards)}))
    assert "cannot be read" in verify(ReadableRun.at(paths.root), ["newest"]).checkpoints[0].faults[0].fault


def test_discarded_checkpoints_are_intact_but_not_usable(paths: RunPaths) -> None:
    tell(paths, incident(1, 5, 25), rollback_plan(1, OLD, 10, (20, 60), discards=(OLD, MIDDLE, NEW)))
    found = verify(ReadableRun.at(paths.root))
    assert (found.intact, found.usable, found.exit_code) == (3, 0, ExitCode.NO_CHECKPOINT)


def test_an_empty_ring_has_no_usable_checkpoint(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_identity(paths, new_identity(JOB))
    assert command("verify", tmp_path).exit_code == ExitCode.NO_CHECKPOINT
    assert isinstance(command("export", tmp_path).exception, NoUsableCheckpoint)


def test_what_is_evicted_while_it_is_looked_at_is_no_damage(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    evicting = iter([True])

    def evict_first(*arguments: Any) -> Any:
        if next(evicting, False):
            ring.evict(paths, OLD)
        return find(*arguments)

    from rollback.inspect.ring import verify as room

    find = room.find_faults
    monkeypatch.setattr(room, "find_faults", evict_first)
    found = verify(ReadableRun.at(paths.root))
    assert [entry.checkpoint for entry in found.checkpoints] == [MIDDLE, NEW]
    assert found.notices == [f"{OLD} left the ring while it was looked at"]
    assert found.exit_code == ExitCode.DONE


# --- the fast tier ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tier(paths: RunPaths) -> SlotPaths:
    """The middle one is in a slot too, the newest in a slot only."""
    identity = read_identity(paths)
    assert identity is not None
    tier = slots.tier_of(paths.root.parent, identity.run_id)
    slots.claim(tier, paths.root)
    tiers.point_to_fast_tier(paths, tier)
    for number, name in ((0, MIDDLE), (1, NEW)):
        tier.slot(number).mkdir(0o700)
        for file in paths.checkpoint(name).glob("rank-*"):
            shutil.copy(file, tier.slot(number))
        slots.commit(tier, number, read_manifest(paths.checkpoint(name)))
    ring.evict(paths, NEW)
    return tier


def places(entries: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {entry["checkpoint"]: entry["tiers"] for entry in entries}


def test_what_is_in_memory_is_listed_proved_and_taken_out(paths: RunPaths, tier: SlotPaths, tmp_path: Path) -> None:
    before = read_only(paths)
    body = json.loads(command("list", paths.root, "--json").stdout)
    assert places(body["checkpoints"]) == {OLD: ["durable"], MIDDLE: ["fast", "durable"], NEW: ["fast"]}
    assert statuses(paths) == {OLD: "good", MIDDLE: "good", NEW: "candidate"}
    rows = [line.split() for line in command("list", paths.root).stdout.splitlines()]
    assert [row[row.index("KiB") + 2 :] for row in rows[2:4]] == [["memory,", "ring", "good"], ["memory", "candidate"]]
    said = command("verify", paths.root)
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines()[-1] == "3 of 3 intact"
    assert command("export", paths.root, "newest", "-o", tmp_path / "out").exit_code == 0
    assert (load_file_without_bfloat16(tmp_path / "out")["w"] == weights(30)).all()
    assert read_only(paths) == before


def test_a_run_that_has_checkpoints_in_memory_only_has_usable_ones(paths: RunPaths, tier: SlotPaths) -> None:
    shutil.rmtree(paths.ring)
    body = json.loads((said := command("verify", paths.root, "--json")).stdout)
    assert said.exit_code == ExitCode.DONE
    assert (places(body["checkpoints"]), body["usable"]) == ({MIDDLE: ["fast"], NEW: ["fast"]}, 2)


def test_damage_in_memory_is_named_with_its_tier(paths: RunPaths, tier: SlotPaths, tmp_path: Path) -> None:
    damage(tier.slot(0) / shard_name(1))
    (tier.slot(1) / shard_name(0)).unlink()
    body = json.loads((said := command("verify", paths.root, "--json")).stdout)
    assert said.exit_code == ExitCode.FAILED
    found = {entry["checkpoint"]: entry for entry in body["checkpoints"]}
    assert [(fault["tier"], fault["file"]) for fault in found[MIDDLE]["faults"]] == [("fast", shard_name(1))]
    assert (found[MIDDLE]["sound"], found[NEW]["sound"]) == (["durable"], [])
    assert (body["intact"], body["usable"]) == (1, 2), "one copy is enough to go on from"
    assert "damaged in memory" in command("verify", paths.root).stdout
    assert command("export", paths.root, "newest-good", "-o", tmp_path / "out").exit_code == 0, "from the ring"
    shutil.rmtree(paths.ring)
    assert command("verify", paths.root).exit_code == ExitCode.NO_CHECKPOINT


def test_a_checkpoint_that_is_damaged_in_the_ring_and_sound_in_memory(paths: RunPaths, tier: SlotPaths) -> None:
    (paths.checkpoint(MIDDLE) / "manifest.json").write_text("{")
    (entry,) = [entry for entry in read_listing(paths.root).checkpoints if entry.checkpoint == MIDDLE]
    assert (entry.status, entry.batch, entry.tiers) == ("good", 40, ["fast", "durable"])
    assert str(paths.ring) in (entry.fault or "")
    (found,) = verify(ReadableRun.at(paths.root), [MIDDLE]).checkpoints
    assert (found.sound, [(fault.tier, fault.file) for fault in found.faults]) == (
        ["fast"],
        [("durable", "manifest.json")],
    )


def test_a_slot_whose_manifest_is_truncated_is_named(paths: RunPaths, tier: SlotPaths) -> None:
    manifest = tier.slot(1) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    body = json.loads((said := command("verify", paths.root, "--json")).stdout)
    assert said.exit_code == ExitCode.FAILED
    assert [slot["slot"] for slot in body["damaged_slots"]] == ["slot-01"]
    for words in ("list", "verify"):
        assert f"slot-01: the manifest {manifest} is damaged" in command(words, paths.root).stdout
    manifest.unlink()
    assert verify(ReadableRun.at(paths.root)).damaged_slots == [], "a slot without one holds nothing"


def test_a_job_gets_the_slots_that_are_looked_at(
    paths: RunPaths, tier: SlotPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is overwritten by one that is whole, the other by one in the making, both while they are read."""
    shutil.rmtree(paths.ring)
    later = manifest_of(3, 40).model_copy(update={"shards": read_manifest(tier.slot(1), in_slot=True).shards})

    def use_the_slot(directory: Path, *rest: Any, **more: Any) -> Any:
        number = int(directory.name[-2:])
        assert slots.uncommit(tier, number), "held up by a reader"
        if number == 1:
            slots.commit(tier, number, later)
        return find(directory, *rest, **more)

    from rollback.inspect.ring import verify as room

    find = room.find_faults
    monkeypatch.setattr(room, "find_faults", use_the_slot)
    found = verify(ReadableRun.at(paths.root))
    assert found.checkpoints == []
    assert found.notices == [f"{name} left memory while it was looked at" for name in (MIDDLE, NEW)]


def test_the_slot_that_is_exported_stays_until_it_is_written(
    paths: RunPaths, tier: SlotPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollback.inspect.ring import export as room

    write_out, freed = room.write_shard, []

    def written(*arguments: Any) -> Any:
        freed.append(slots.uncommit(tier, 1))
        return write_out(*arguments)

    monkeypatch.setattr(room, "write_shard", written)
    assert command("export", paths.root, NEW, "-o", tmp_path / "out").exit_code == 0
    assert freed == [False]
    assert slots.uncommit(tier, 1)


def test_only_what_is_in_the_ring_can_be_pinned(paths: RunPaths, tier: SlotPaths) -> None:
    assert command("pin", paths.root, "newest").exit_code == 0
    assert pins.pinned(paths) == [MIDDLE], "the newest in the ring"
    outcome = command("pin", paths.root, NEW)
    assert isinstance(outcome.exception, UsageError)
    assert "in memory only" in (outcome.exception.hint or "")


def test_the_status_has_the_checkpoints_that_there_are(paths: RunPaths, tier: SlotPaths) -> None:
    tell(paths, Evicted(checkpoint=NEW, reason="its slot was needed", tier="fast"))
    slots.uncommit(tier, 1)
    listed = json.loads(command("list", paths.root, "--json").stdout)["checkpoints"]
    status = json.loads(CliRunner().invoke(app, ["status", str(paths.root), "--json"]).stdout)
    assert places(status["ring"]) == places(listed) == {OLD: ["durable"], MIDDLE: ["fast", "durable"]}
    assert [(entry["step"], entry["good"]) for entry in status["ring"]] == [(10, True), (20, True)]
    assert status["candidates"] == []


def test_the_shards_that_other_hosts_have_in_memory_are_not_missing(paths: RunPaths, tier: SlotPaths) -> None:
    tiers.point_to_fast_tier(paths, tier, hosts=2)
    for number in (0, 1):
        (tier.slot(number) / shard_name(1)).unlink()
    found = verify(ReadableRun.at(paths.root))
    assert found.exit_code == ExitCode.DONE
    assert "only the shards of this one were looked at" in found.notices[-1]
    damage(tier.slot(1) / shard_name(0))
    assert [fault.file for fault in verify(ReadableRun.at(paths.root)).checkpoints[-1].faults] == [shard_name(0)]


def test_what_is_in_memory_of_another_host_is_told(paths: RunPaths, tier: SlotPaths) -> None:
    tier.root.rename(paths.root.parent / "elsewhere")
    listing = read_listing(paths.root)
    assert [entry.checkpoint for entry in listing.checkpoints] == [OLD, MIDDLE]
    (notice,) = listing.notices
    assert notice.startswith(f"{NEW}, the newest, cannot be seen from here")


# --- export -----------------------------------------------------------------------------------------------------------


def test_weights_that_are_taken_out_of_a_sealed_run_are_told_to_be_verified_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, paths = tmp_path / "key", RunPaths(tmp_path / "run")
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    paths.root.mkdir()
    monkeypatch.setenv(ENV_SEAL, str(key))
    write_identity(paths, new_identity(JOB))
    write(paths, 0, 10)
    assert "its seal is verified" in command("export", paths.root, "newest", "-o", tmp_path / "with").stderr
    monkeypatch.delenv(ENV_SEAL)
    assert "it is not verified" in command("export", paths.root, "newest", "-o", tmp_path / "without").stderr


def test_the_exported_model_is_read_by_the_library(paths: RunPaths, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    said = command("export", paths.root, "-o", output)
    assert said.exit_code == 0, said.output
    assert "left out, since they are not tensors: version" in said.stderr
    with safe_open(output, "numpy") as file:
        assert sorted(file.keys()) == ["b", "mean", "w"]
        metadata = file.metadata()
        assert (file.get_tensor("w") == weights(20)).all()
        assert file.get_tensor("mean") == 0.5, "the buffers of rank 0"
    run_id = json.loads(paths.identity.read_text())["run_id"]
    assert metadata == {"format": "pt", "checkpoint": MIDDLE, "step": "20", "batch": "40", "run_id": run_id}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_existing_file_is_replaced_with_force_only(paths: RunPaths, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    output.write_text("mine")
    assert isinstance(command("export", paths.root, "newest", "-o", output).exception, UsageError)
    assert output.read_text() == "mine"
    assert command("export", paths.root, "newest", "-o", output, "--force").exit_code == 0
    assert (load_file_without_bfloat16(output)["w"] == weights(30)).all()


def load_file_without_bfloat16(path: Path) -> dict[str, Any]:
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in ("w", "mean")}


@pytest.mark.parametrize(
    "place",
    [
        lambda paths: paths.checkpoint(OLD) / shard_name(0),
        lambda paths: paths.root / "model.safetensors",
        lambda paths: paths.root.parent / "nowhere" / "model.safetensors",
        lambda paths: paths.root.parent,
    ],
)
def test_a_place_that_cannot_be_is_refused_even_with_force(paths: RunPaths, place: Callable[[RunPaths], Path]) -> None:
    before = read_only(paths)
    assert isinstance(command("export", paths.root, "-o", place(paths), "--force").exception, UsageError)
    assert read_only(paths) == before


def test_a_full_disk_leaves_nothing_behind(paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OutputNotWritten, match="No space left"):
        command_raising("export", paths.root, "-o", tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def command_raising(*words: object) -> None:
    CliRunner().invoke(app, ["ring", *map(str, words)], catch_exceptions=False)


def test_damage_is_found_before_anything_is_written(paths: RunPaths, tmp_path: Path) -> None:
    damage(paths.checkpoint(MIDDLE) / shard_name(1))
    outcome = command("export", paths.root, "-o", tmp_path / "model.safetensors")
    assert isinstance(outcome.exception, RollbackError)
    assert outcome.exception.exit_code == ExitCode.NO_CHECKPOINT
    assert "nothing was written" in outcome.exception.message
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# --- pin --------------------------------------------------------------------------------------------------------------


def test_pin_and_unpin(paths: RunPaths) -> None:
    assert f"unpin {paths.root} {MIDDLE}" in command("pin", paths.root, "newest-good").stderr
    assert pins.pinned(paths) == [MIDDLE]
    assert command("unpin", paths.root, MIDDLE).exit_code == 0
    assert pins.pinned(paths) == []
    assert isinstance(command("unpin", paths.root, MIDDLE).exception, UsageError)
    outcome = command("pin", paths.root, "c000009-s00000009")
    assert isinstance(outcome.exception, UsageError)
    assert outcome.exception.hint == f"it has {OLD} {MIDDLE} {NEW}"


@pytest.mark.parametrize("size", ["0", "0GB", "0.4"])
def test_files_of_no_bytes_are_refused(tmp_path: Path, size: str) -> None:
    words = ["ring", "export", str(tmp_path), "-o", str(tmp_path / "x"), "--max-shard-size", size]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UsageError)
    assert result.exception.message == f"--max-shard-size: no tensor fits into {size}"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (None, "is missing, and there is "),
        ([], "is empty, and there is "),
        ([attached(None, 0)], "lacks lines: it ends in front of "),
    ],
)
def test_lines_that_the_ranks_journal_has_lost_are_told_by_all_who_read_it(
    paths: RunPaths, left: list[Any] | None, said: str
) -> None:
    paths.train_journal.unlink()
    if left is not None:
        paths.train_journal.touch()
        tell(paths, *left)
    for told in (read_listing(paths.root), read_status(paths.root), read_run_contents(paths.root)):
        assert [f"{paths.train_journal} {said}{OLD}, {MIDDLE}, {NEW}. " in notice for notice in told.notices] == [True]
    assert check_integrity(paths.root).disagreements == told.notices  # a chain does not show that its end is missing
    hold(paths, alive=True)  # it may have the lines in its memory, for a disk that takes none
    reader = StatusReader(paths.root)
    assert read_listing(paths.root).notices == reader.read().notices == check_integrity(paths.root).disagreements == []
    hold(paths, alive=False)  # they are lost with it, and nothing says so
    assert [NEW in notice for notice in reader.read().notices] == [True]


def test_what_a_crash_leaves_without_its_line_is_no_lost_line(paths: RunPaths) -> None:
    """The checkpoint that was just made, and behind it the last snapshot of the ranks that were left."""
    paths.train_journal.unlink()
    tell(paths, attached(None, 0), Committed(checkpoint=OLD, step=10, batch=20, timeline=0, bytes=1, seconds=0.1))
    for told in (read_listing(paths.root), read_status(paths.root), read_run_contents(paths.root)):
        assert told.notices == []
    history = fold_journal(paths.train_journal).history
    assert beyond_the_record(history, [manifest_of(1, 20).model_copy(update={"attempt": 2})]) == [MIDDLE]
