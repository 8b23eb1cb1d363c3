"""Exports of sharded checkpoints: one file or many, in little memory, whole or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from checkpoints import manifest_of
from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import ShardRecord
from rollback.checkpoints.format.parts import METADATA, Box, Part, write_parts
from rollback.checkpoints.format.shard import ShardPiece, write_shard
from rollback.checkpoints.outside.fitting import open_outside
from rollback.errors import OutputNotWritten, UsageError
from rollback.inspect.ring import export as room
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.export import export
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.paths import RunPaths, shard_name

NAMES = ["layers.0", "layers.1", "layers.2", "layers.3", "tied", "level"]


def sharded_run(root: Path, rows: int, columns: int, layers: int = 4) -> dict[str, np.ndarray[Any, Any]]:
    """A run of two ranks with `layers` tensors of which each rank has some rows, one that rank 0 has, and a buffer."""
    random = np.random.default_rng(0)
    tensors = {f"layers.{n}": random.random((rows, columns), np.float32) for n in range(layers)}
    cut = rows // 2 + 1
    model = {name: {"$sharded": f"shared/model/{name}"} for name in tensors}
    shared = {
        "model": {**model, "tied": {"$tensor": "shared/model/tied"}},
        "optimizer": {"state": {}, "param_groups": []}, "objects": {}, "sentinel": {}, "counters": {},
    }  # fmt: skip
    local = {"buffers": {"level": {"$tensor": "local/level"}}, "random": {}, "cursor": {}}
    paths, manifest, shards = RunPaths(root), manifest_of(0, 10), []
    paths.root.mkdir()
    for rank, (first, last) in enumerate(((0, cut), (cut, rows))):
        own = {f"shared/model/{name}": array[first:last] for name, array in tensors.items()}
        parts = {name: Part((rows, columns), Box((first, 0), array.shape)) for name, array in own.items()}
        own["local/level"] = np.float32([rank])
        own |= {"shared/model/tied": np.float32([1, 2, 3])} if rank == 0 else {}
        metadata = {"local": json.dumps(local), METADATA: write_parts(parts)}
        metadata |= {"shared": json.dumps(shared)} if rank == 0 else {}
        pieces = [ShardPiece(n, "F32", a.shape, memoryview(np.ascontiguousarray(a)).cast("B")) for n, a in own.items()]
        directory = ring.begin_writing(paths, manifest.name, manifest.attempt)
        shards.append(ShardRecord.of(rank, write_shard(directory / shard_name(rank), pieces, metadata)))
    ring.commit(paths, manifest.model_copy(update={"shards": tuple(shards)}))
    named = {**tensors, "tied": np.float32([1, 2, 3]), "level": np.float32([0])}
    kinds = [(name, "float32", list(array.shape)) for name, array in named.items()]
    job = JobIdentity(world_size=2, model=kinds, optimizer={"class": "SGD", "groups": []}, objects=[], data={})
    write_identity(paths, new_identity(job))
    return named


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    return tmp_path / "run", sharded_run(tmp_path / "run", 9, 5)


def loaded(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """As a user of the index, or of the one file, gets it."""
    index = folder / "model.safetensors.index.json"
    files = {*json.loads(index.read_text())["weight_map"].values()} if index.exists() else {"model.safetensors"}
    found = {}
    for file in files:
        with safe_open(folder / file, "numpy") as opened:
            assert opened.metadata()["format"] == "pt"
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def require_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


@pytest.mark.parametrize(("largest", "files"), [(10**9, 1), (400, 2), (200, 4)])
def test_a_sharded_model_is_put_together_into_as_many_files_as_it_takes(
    run: tuple[Path, Any], tmp_path: Path, largest: int, files: int
) -> None:
    (tmp_path / "out").mkdir()
    done = export(ReadableRun.at(run[0]), "newest", tmp_path / "out" / "model.safetensors", max_shard_size=largest)
    assert (done.files, done.tensors) == (files, 6)
    names = [f"model-{n:05d}-of-{files:05d}.safetensors" for n in range(1, files + 1)]
    wanted = ["model.safetensors"] if files == 1 else [*names, "model.safetensors.index.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == wanted
    require_equal(loaded(tmp_path / "out"), run[1])
    found = open_outside(tmp_path / "out")
    assert {*found.tensors} == {*NAMES}
    found.close()
    if files > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in run[1].values())


def test_an_earlier_export_is_replaced_with_force_only_and_leaves_none_of_its_files(
    run: tuple[Path, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors.bak").write_text("mine")
    for largest, count in ((200, 5), (10**9, 1), (400, 3), (200, 5)):
        if len(list(out.iterdir())) > 1:
            with pytest.raises(UsageError, match="exists already"):
                export(ReadableRun.at(run[0]), "newest", out / "model.safetensors", max_shard_size=largest)
        export(ReadableRun.at(run[0]), "newest", out / "model.safetensors", max_shard_size=largest, force=True)
        assert len([path for path in out.iterdir() if not path.name.endswith(".bak")]) == count
        require_equal(loaded(out), run[1])
    assert (out / "model.safetensors.bak").read_text() == "mine"


@pytest.mark.parametrize(("largest", "files"), [(10**9, 1), (400, 3)])
def test_files_are_written_below_a_link_to_a_directory(
    run: tuple[Path, Any], tmp_path: Path, largest: int, files: int
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    for force in (False, True):
        place = tmp_path / "scratch" / "model.safetensors"
        export(ReadableRun.at(run[0]), "newest", place, max_shard_size=largest, force=force)
        require_equal(loaded(tmp_path / "disk"), run[1])
        assert len([*(tmp_path / "disk").iterdir()]) == files


def test_a_place_that_may_not_be_looked_into_is_said_in_words(
    run: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(OutputNotWritten, match="Permission denied"):
        export(ReadableRun.at(run[0]), "newest", tmp_path / "model.safetensors")


@pytest.mark.parametrize("force", [False, True])
def test_a_device_is_refused_as_what_it_is(run: tuple[Path, Any], force: bool) -> None:
    with pytest.raises(UsageError, match="/dev/null is no regular file of its own"):
        export(ReadableRun.at(run[0]), "newest", Path("/dev/null"), force=force)


def export_and_die(run: Path, out: Path, place: int) -> int:
    """Export in a process that is gone before its file operation of that number. Its exit code; 0: it had fewer."""
    if (child := os.fork()) == 0:
        left = place

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in ("os.rename", "os.remove", "open") and str(out) in str(arguments[0]):
                left -= 1
                if not left:
                    os._exit(9)

        sys.addaudithook(watch)
        try:
            export(ReadableRun.at(run), "newest", out / "model.safetensors", force=True, max_shard_size=200)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("before", [None, 10**9, 200], ids=["nothing", "one file", "files and an index"])
def test_an_export_that_is_killed_leaves_what_was_there_the_new_one_or_nothing(tmp_path: Path, before: Any) -> None:
    """At every file operation."""
    old = sharded_run(tmp_path / "old", 9, 5)
    new = sharded_run(tmp_path / "new", 9, 4)
    for place in range(1, 40):
        out = tmp_path / f"out-{place}"
        out.mkdir()
        if before:
            export(ReadableRun.at(tmp_path / "old"), "newest", out / "model.safetensors", max_shard_size=before)
        code = export_and_die(tmp_path / "new", out, place)
        entries = [path for path in out.iterdir() if path.name in ("model.safetensors", "model.safetensors.index.json")]
        if entries:
            found = loaded(out)
            require_equal(found, old if found["layers.0"].shape == (9, 5) else new)
        if code == 0:
            require_equal(loaded(out), new)
            assert len(list(out.iterdir())) == 5
            break
        assert code == 9
    assert 8 < place < 39


@pytest.mark.parametrize("file", [1, 3, 4])
def test_a_disk_that_fails_leaves_what_was_there(
    run: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: int
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    old = sharded_run(tmp_path / "old", 9, 5)
    export(ReadableRun.at(tmp_path / "old"), "newest", out / "model.safetensors", max_shard_size=200)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    calls = iter(range(1, 100))
    write = room.write_shard

    def failing(*arguments: Any) -> Any:
        if next(calls) == file:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(room, "write_shard", failing)
    with pytest.raises(OutputNotWritten, match="No space left on device"):
        export(ReadableRun.at(run[0]), "newest", out / "model.safetensors", max_shard_size=200, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    require_equal(loaded(out), old)


def test_memory_does_not_grow_with_the_model_nor_with_its_largest_tensor(tmp_path: Path) -> None:
    """A model of 192 MiB in 6 tensors of 32 MiB, of which each of two ranks has a part: the process takes less than
    two tensors more than for a model of a few bytes."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom rollback.inspect.ring.at_url import ReadableRun\n"
        "from rollback.inspect.ring.export import export\n"
        "export(ReadableRun.at(Path(sys.argv[1])), 'newest', Path(sys.argv[2]))\nassert 'torch' not in sys.modules\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    peaks = {}
    for name, rows, layers in (("small", 9, 4), ("large", 8192, 6)):
        sharded_run(tmp_path / name, rows, 1024, layers)
        command = [sys.executable, "-c", code, str(tmp_path / name), str(tmp_path / f"{name}.safetensors")]
        peaks[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 10
    assert (tmp_path / "large.safetensors").stat().st_size > 6 * (32 << 20)
    assert peaks["large"] - peaks["small"] < 64 << 20, {name: peak >> 20 for name, peak in peaks.items()}


@pytest.mark.soak
def test_transformers_loads_it(tmp_path: Path) -> None:
    """Imports transformers in a process of its own."""
    code = """
import sys, torch, rollback
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = [torch.randint(64, (2, 8)) for _ in range(6)]
guard = rollback.Guard(model=model, optimizer=optimizer, loader=data, run=sys.argv[1])
for batch in guard:
    loss = model(batch, labels=batch).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad(); guard.observe(loss)
guard.close()
from rollback.cli import app
for size in ("5GB", "20KB"):
    folder = sys.argv[2] + size
    config.save_pretrained(folder)
    app(["ring", "export", sys.argv[1], "-o", folder + "/model.safetensors", "--max-shard-size", size],
        standalone_mode=False)
    loaded, said = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not said["missing_keys"] and not said["mismatched_keys"], said
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "hf-")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "hf-20KB" / "model.safetensors.index.json").exists()
    assert (tmp_path / "hf-5GB" / "model.safetensors").exists()
