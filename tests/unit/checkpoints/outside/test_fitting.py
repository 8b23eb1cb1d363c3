"""Checkpoints of others: what is found in them, and what of it is a job's."""

import dataclasses
import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rollback.checkpoints.outside import huggingface
from rollback.checkpoints.outside.fitting import Fitting, JobTensors, OutsideCheckpoint, fit, open_outside
from rollback.errors import CheckpointDamaged, UsageError

TENSORS = {
    "w": torch.arange(12, dtype=torch.float32).reshape(3, 4), "b": torch.arange(3).bfloat16(), "n": torch.tensor(7),
    "turned": torch.arange(6.0).reshape(2, 3).t(), "narrow": torch.arange(4.0).to(torch.float8_e4m3fn),
    "odd": torch.arange(4).to(torch.uint16), "none": torch.empty(0, 3),
}  # fmt: skip

NO_PARTS = TensorStorageMetadata(TensorProperties(), torch.Size([1]), [])
IN_A_FILE = {"relative_path": "__0_0.distcp", "offset": 0, "length": 0}


def content(found: OutsideCheckpoint, name: str) -> bytes:
    ((_, stored),) = found.tensors[name]
    return b"".join(map(bytes, stored.blocks()))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"model": TENSORS, "optim": {"state": {"w": {"step": torch.tensor(2.0)}}, "lr": 0.1}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_dcp_checkpoint_is_read_bit_for_bit_without_torch(saved: Path) -> None:
    found = open_outside(saved)
    assert found.layout == "dcp"
    assert {*found.tensors} == {*(f"model.{name}" for name in TENSORS), "optim.state.w.step"}
    for name, tensor in TENSORS.items():
        assert content(found, f"model.{name}") == bytes_of(tensor), name
    assert [*found.sizes] == ["__0_0.distcp"]


def test_rows_of_a_stored_part_are_read_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, stored),) = open_outside(saved).tensors["model.w"]
    read: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        read.append(got := preadv(fd, buffers, offset))
        return got

    room = bytearray(16)
    stored.shard.read_into(stored.name, memoryview(bytearray(4)), 0)  # finds where the tensor lies
    monkeypatch.setattr(os, "preadv", counting)
    stored.shard.read_into(stored.name, memoryview(room), 16)
    assert bytes(room) == bytes_of(TENSORS["w"][1])
    assert read == [16]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda _: b"\x80\x04N.", "not that of a DCP checkpoint"),
        (lambda _: b"nonsense", "cannot be read"),
        (lambda table: table[:-40], "cannot be read"),
        (lambda table: table.replace(b"__0_0.distcp", b"../../passwd"), "not below it"),
        (lambda _: pickle.dumps(Metadata({"w": NO_PARTS}, storage_data={})), "not what it should be"),
        (lambda _: pickle.dumps(Metadata({}, storage_data={"w": IN_A_FILE})), "not what it should be"),
    ],
    ids=["another pickle", "no pickle", "cut off", "a path that leads out", "no parts", "no place"],
)
def test_a_bad_table_of_contents_is_refused(saved: Path, harm: Any, message: str) -> None:
    table = saved / ".metadata"
    table.write_bytes(harm(table.read_bytes()))
    with pytest.raises(UsageError, match=message):
        open_outside(saved)


def test_data_that_are_not_what_the_table_says_are_damage(saved: Path) -> None:
    data = saved / "__0_0.distcp"
    data.write_bytes(data.read_bytes().replace(b"FloatStorage", b"NightStorage"))
    found = open_outside(saved)
    with pytest.raises(CheckpointDamaged, match=r"model\.w"):
        content(found, "model.w")
    data.write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=r"model\.b"):
        content(found, "model.b")
    chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([1]))
    part = TensorStorageMetadata(TensorProperties(), torch.Size([1]), [chunk])
    far = {MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", 1 << 70, 4)}
    (saved / ".metadata").write_bytes(pickle.dumps(Metadata({"w": part}, storage_data=far)))
    with pytest.raises(CheckpointDamaged, match="tensor 'w'"):
        content(open_outside(saved), "w")


@pytest.mark.parametrize("member", ["data.pkl", "byteorder"])
@pytest.mark.parametrize("how", ["compressed", "encrypted"])
def test_a_stored_part_that_is_compressed_or_encrypted_is_damage(saved: Path, member: str, how: str) -> None:
    """And is not unpacked: who wrote it decides how large that would be."""
    ((_, stored),) = open_outside(saved).tensors["model.w"]
    data, place = saved / "__0_0.distcp", stored.shard._place  # type: ignore[attr-defined]
    whole, made = data.read_bytes()[place.offset :][: place.length], io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive, zipfile.ZipFile(made, "w") as harmed:
        (name,) = (name for name in archive.namelist() if name.endswith(member))
        for each in archive.namelist():
            deflated = how == "compressed" and each == name
            harmed.writestr(each, archive.read(each), zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED)
    text = made.getvalue()
    if how == "encrypted":  # a bit in the archive's list of its members
        flags = text.index(name.encode(), text.index(b"PK\x01\x02")) - 38
        text = text[:flags] + b"\1" + text[flags + 1 :]
    data.write_bytes(text)
    stored.shard._place = dataclasses.replace(place, offset=0, length=len(text))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointDamaged, match=r"model\.w"):
        b"".join(map(bytes, stored.blocks()))


def a_folder(folder: Path, index: dict[str, str] | None = None) -> Path:
    """`w` in one file and `b` in another, as the index says unless another is given."""
    files = {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, folder / file)
    body = {"metadata": {}, "weight_map": files if index is None else index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))
    return folder


def test_a_folder_a_file_an_index_and_links_are_read(tmp_path: Path) -> None:
    a_folder(tmp_path)
    single = tmp_path / "single"
    single.mkdir()
    (single / "model.safetensors").symlink_to(tmp_path / "model-00001-of-00002.safetensors")
    for place, names in (
        (tmp_path, ["b", "w"]),
        (tmp_path / "model.safetensors.index.json", ["b", "w"]),
        (single, ["w"]),
        (tmp_path / "model-00002-of-00002.safetensors", ["b"]),
    ):
        found = open_outside(place)
        assert sorted(found.tensors) == names
        assert all(content(found, name) == bytes_of(TENSORS[name]) for name in names)
        found.close()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"w": "model-00002-of-00002.safetensors"}, "'b', which is in another file"),
        ({"w": "/etc/passwd"}, "not beside it"),
        ({"w": "../x"}, "not beside it"),
        ({"w": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}, "files have not: b"),
        ({}, "no weight_map"),
        ({"w": "model-00001-of-00002.safetensors", "b": "gone.safetensors"}, "No such file"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, index: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_outside(a_folder(tmp_path, index))


def test_a_place_with_nothing_is_refused_with_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    for place in (tmp_path / "loop.safetensors", tmp_path, tmp_path / "gone", tmp_path / "text.safetensors"):
        if place == tmp_path:
            (tmp_path / "loop.safetensors").unlink()
        (tmp_path / "text.safetensors").write_text("hello hello")
        if place == tmp_path:
            (tmp_path / "text.safetensors").unlink()
        with pytest.raises(UsageError) as refused:
            open_outside(place)
        assert str(place) in refused.value.message
        assert "safetensors file" in str(refused.value.hint)


# --- what of it is a job's --------------------------------------------------------------------------------------------

F32 = "F32"
JOB = JobTensors({"w": (F32, (3, 4)), "b": ("BF16", (3,))}, {"w": "w", "b": "b"}, ["w"])


def found_in(tmp_path: Path, state: dict[str, Any]) -> OutsideCheckpoint:
    dcp.save(state, checkpoint_id=tmp_path / "fit", no_dist=True)
    return open_outside(tmp_path / "fit")


MODEL = {"w": TENSORS["w"], "b": TENSORS["b"]}
MOMENTS = {"w": {"exp_avg": torch.zeros(3, 4), "step": torch.tensor(1.0)}}


@pytest.mark.parametrize(
    ("state", "prefix", "optimizer"),
    [
        ({"model": MODEL}, "model.", {}),
        ({**MODEL}, "", {}),
        ({"app": {"model": MODEL, "optim": {"state": MOMENTS}}}, "app.model.", "app.optim.state.w."),
        ({**MODEL, "optimizer": {"state": MOMENTS}}, "", "optimizer.state.w."),
        ({"model": MODEL, "ema": MODEL}, "model.", {}),
    ],
    ids=["as torch's examples", "bare", "in an application's state", "as torchtitan", "with an average of the weights"],
)
def test_model_and_optimizer_are_found_by_their_names(
    tmp_path: Path, state: dict[str, Any], prefix: str, optimizer: Any
) -> None:
    fitting = fit(found_in(tmp_path, state), JOB)
    assert fitting.model == {"w": f"{prefix}w", "b": f"{prefix}b"}
    wanted = {"w": {key: f"{optimizer}{key}" for key in ("exp_avg", "step")}} if optimizer else {}
    assert fitting.optimizer == wanted
    assert fitting.left_aside == (2 if "ema" in state else 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"w": TENSORS["w"]}, "1 missing: b"),
        ({**MODEL, "more": torch.zeros(1)}, "1 not the model's: more"),
        ({**MODEL, "w": torch.zeros(4, 3)}, r"w is float32\[4, 3\], and the model's is float32\[3, 4\]"),
        ({**MODEL, "b": torch.zeros(3)}, r"b is float32\[3\], and the model's is bfloat16\[3\]"),
    ],
)
@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
def test_what_does_not_fit_is_listed(tmp_path: Path, model: dict[str, Any], message: str, layout: str) -> None:
    if layout == "dcp":
        found = found_in(tmp_path, {"model": model})
    else:
        save_file(model, tmp_path / "model.safetensors")
        found = open_outside(tmp_path)
    with pytest.raises(UsageError, match=message):
        fit(found, JOB)


def test_one_of_several_names_of_a_tensor_is_enough(tmp_path: Path) -> None:
    save_file({"b": TENSORS["b"]}, tmp_path / "model.safetensors")
    tied = JobTensors({"a": ("BF16", (3,)), "b": ("BF16", (3,))}, {"a": "a", "b": "a"}, [])
    assert fit(open_outside(tmp_path), tied) == Fitting({"b": "b"}, {}, 0)


def test_two_models_are_not_chosen_between(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"more than once, under one\., two\."):
        fit(found_in(tmp_path, {"one": MODEL, "two": MODEL}), JOB)


def test_an_optimizer_s_state_that_lacks_a_parameter_is_refused(tmp_path: Path) -> None:
    job = JobTensors(JOB.model, JOB.same, ["w", "b"])
    with pytest.raises(UsageError, match="missing of the optimizer's state: b"):
        fit(found_in(tmp_path, {"model": MODEL, "optim": {"state": MOMENTS}}), job)


# --- Hugging Face's layout --------------------------------------------------------------------------------------------


def test_files_hold_what_fits_and_a_large_tensor_has_one_of_its_own() -> None:
    kinds = {name: (F32, (size,)) for name, size in {"a": 1, "b": 2, "large": 100, "c": 1, "d": 1}.items()}
    assert huggingface.split(kinds, 12) == [["a", "b"], ["large"], ["c", "d"]]
    assert huggingface.split(kinds, 10**9) == [list(kinds)]
    assert huggingface.split({}, 10) == [[]]
