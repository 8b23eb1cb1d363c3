"""Manifests: believed only if whole, of this format, and of the directory they lie in."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoints import RANKS, write_checkpoint
from rollback.checkpoints.format import manifest as manifest_module
from rollback.checkpoints.format.manifest import read_manifest
from rollback.errors import CheckpointDamaged, CheckpointUnusable
from rollback.rundir.paths import FORMATS, RunPaths


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    paths = RunPaths(tmp_path)
    return paths.checkpoint(write_checkpoint(paths, 3, 40))


def test_what_was_written_is_read(directory: Path) -> None:
    manifest = read_manifest(directory)
    assert (manifest.name, manifest.seq, manifest.step, manifest.batch) == (directory.name, 3, 40, 80)
    assert [shard.file for shard in manifest.shards] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert manifest.bytes == sum((directory / shard.file).stat().st_size for shard in manifest.shards)


def test_a_manifest_cut_anywhere_is_refused(directory: Path) -> None:
    path = directory / "manifest.json"
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
            read_manifest(directory)


def test_every_flipped_bit_is_found_or_changes_nothing(directory: Path) -> None:
    path = directory / "manifest.json"
    data = path.read_bytes()
    sound = read_manifest(directory)
    with open(path, "r+b", buffering=0) as file:
        for position in range(len(data)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[position] ^ 1 << bit]), position)
                try:
                    assert read_manifest(directory) == sound  # white space for white space
                except CheckpointDamaged:
                    continue
            os.pwrite(file.fileno(), data[position : position + 1], position)


def with_check(body: dict[str, Any]) -> str:
    """A manifest that an adversary has signed: `check` fits, the content is theirs."""
    return json.dumps({**body, "check": manifest_module.check_of(body)})


def test_a_manifest_with_other_content_and_a_check_that_fits_is_refused(directory: Path) -> None:
    path = directory / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["check"]
    shard = body["shards"][0]
    for change in [
        {"name": "c000009-s00000040"},
        {"seq": 4},
        {"step": 41},
        {"step": -1},
        {"batch": "many"},
        {"world_size": RANKS + 1},
        {"world_size": 0},
        {"format": FORMATS[-1] + 1},
        {"shards": []},
        {"shards": body["shards"][::-1]},
        {"shards": [shard, {**shard, "file": "../../../etc/passwd"}]},
        {"shards": [shard, {**shard, "file": "/etc/passwd"}]},
        {"shards": [shard, {**shard, "file": "rank-00001.safetensors", "size": -1}]},
        {"shards": [shard, {**shard, "file": "rank-00001.safetensors", "hash": "z" * 32}]},
        {"more": 1},
    ]:
        path.write_text(with_check({**body, **change}))
        with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
            read_manifest(directory)
    path.write_text(with_check(body))
    read_manifest(directory)


@pytest.mark.parametrize("text", ["", "[]", "7", "null", '"text"', "{}", "[" * 100_000, "\x80"])
def test_json_of_another_kind_is_refused(directory: Path, text: str) -> None:
    (directory / "manifest.json").write_text(text)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        read_manifest(directory)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: None])
def test_what_is_not_a_regular_file_is_refused_at_once(directory: Path, make: Any) -> None:
    (directory / "manifest.json").unlink()
    make(directory / "manifest.json")
    with pytest.raises(CheckpointUnusable, match=r"manifest\.json"):
        read_manifest(directory)


def test_a_huge_manifest_is_refused_unread(directory: Path) -> None:
    os.truncate(directory / "manifest.json", 1 << 40)
    with pytest.raises(CheckpointDamaged, match="believed"):
        read_manifest(directory)


def test_a_checkpoint_under_another_name_is_refused(directory: Path) -> None:
    other = directory.with_name("c000004-s00000040")
    shutil.copytree(directory, other)
    with pytest.raises(CheckpointDamaged, match="another checkpoint"):
        read_manifest(other)
