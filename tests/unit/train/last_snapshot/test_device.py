"""What a last snapshot adds for a GPU, with the CPU in its place."""

import struct
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from late_gpu import LateGpu, use_late_gpu
from test_survivor import BEFORE, END, TOY, kept
from torch import Tensor

import rollback
from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import FOREVER, EndMark, Hold, StepEnd
from rollback.train.last_snapshot import device as of_device
from rollback.train.last_snapshot.device import Device, NoAnswer
from rollback.train.last_snapshot.early import TRIED, EarlyMarks
from rollback.train.last_snapshot.small_state import LocalState

CPU = torch.device("cpu")


def test_a_half_is_whole_once_the_gpu_has_come_to_its_step_s_end(marks: end_marks.EndMarkPaths) -> None:
    mark, gpu = EndMark(marks, 0), Device(CPU, marks, 0)
    late = [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3.5], dtype=torch.float64)]
    for end in (BEFORE, END):
        half = mark.write(end, b"host" + bytes(10), b"stays", added=10)
        assert end not in end_marks.read_ends(marks, 0)
        gpu.add(half, end, late)
        assert end_marks.read_ends(marks, 0)[end] == b"host\1\2" + struct.pack("<d", 3.5) + b"stays"
    assert set(end_marks.read_ends(marks, 0)) == {BEFORE, END}
    mark.write(later := END._replace(step=9), b"host" + bytes(10), b"stays", added=10)
    assert set(end_marks.read_ends(marks, 0)) == {END}, "the stamp of another step is none of this one"
    gpu.close()
    assert later not in end_marks.read_ends(marks, 0)


def test_a_gpu_that_has_nothing_to_add_says_that_it_has_come_there(marks: end_marks.EndMarkPaths) -> None:
    mark, gpu = EndMark(marks, 0), Device(CPU, marks, 0)
    half = mark.write(END, b"host", added=0)
    assert not end_marks.read_ends(marks, 0)
    gpu.add(half, END, [])
    assert end_marks.read_ends(marks, 0) == {END: b"host"}
    marks.added(0).unlink()
    assert not end_marks.read_ends(marks, 0), "a copy of the mark without what is added is not believed"


def test_a_half_that_is_begun_anew_while_it_is_read_is_not_believed(
    marks: end_marks.EndMarkPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, gpu = EndMark(marks, 0), Device(CPU, marks, 0)
    half = mark.write(END, b"host" + bytes(8), added=8)
    gpu.add(half, END, [torch.zeros(1, dtype=torch.float64)])
    read = vars(end_marks)["_read"]

    def and_meanwhile(path: Path, start: int, length: int) -> Any:
        if path == marks.added(0) and length == 8 and start % 4096:  # what is added, behind its stamp
            mark.write(BEFORE, b"x", added=0)
            mark.write(END._replace(step=10), b"host" + bytes(8), added=8)
        return read(path, start, length)

    monkeypatch.setattr(end_marks, "_read", and_meanwhile)
    assert END not in end_marks.read_ends(marks, 0)


def test_an_early_mark_is_whole_once_the_gpu_has_come_to_that_backward(marks: end_marks.EndMarkPaths) -> None:
    mark, gpu = EndMark(marks, 0), Device(CPU, marks, 0)
    first, second = Hold(1, 5, 2, 6), Hold(3, 5, 4, 6)
    for number, hold in enumerate((first, second)):  # of a step with two backwards
        part = mark.write_early(END, b"host" + bytes(2), hold, b"stays", added=2)
        assert not end_marks.read_early(marks, 0), "what was added for the first backward is not the second one's"
        assert gpu.added(part, END, 2, hold.at) is None
        gpu.add(part, END, [torch.tensor([number, 7], dtype=torch.uint8)], hold.at)
        expected = bytes((number, 7))
        assert gpu.added(part, END, 2, hold.at) == expected
        assert end_marks.read_early(marks, 0)[END] == (END, b"host" + expected + b"stays", hold)
    forever = second._replace(patience=FOREVER)
    mark.write_early(END, b"host" + bytes(2), forever, b"stays", added=2)
    assert end_marks.read_early(marks, 0)[END].hold == forever, "the same moment, and nothing has changed since"
    mark.withdraw()
    assert not end_marks.read_early(marks, 0)
    gpu.close()


class Reader:
    """One buffer on the GPU."""

    def __init__(self) -> None:
        self.on_gpu = [torch.zeros(2)]

    def local(self) -> LocalState:
        return LocalState("[]", bytes(8))

    coming = local

    def values(self) -> dict[str, Any]:
        return {}


def in_place(reader: Reader) -> None:
    reader.on_gpu[0].add_(1)


def another(reader: Reader) -> None:
    reader.on_gpu = [reader.on_gpu[0] + 1]


def unseen(reader: Reader) -> None:
    reader.on_gpu[0].data.add_(1)


LATE_STEPS = range(TRIED + 3, 100)


@pytest.mark.parametrize(
    ("change", "at", "left"),
    [
        (in_place, LATE_STEPS, 3),
        (another, LATE_STEPS, 3),
        (unseen, LATE_STEPS, 4),
        (in_place, range(100), 0),
        (unseen, range(100), 0),
    ],
)
def test_buffers_that_change_behind_a_backward_end_early_marks(
    marks: end_marks.EndMarkPaths, change: Any, at: range, left: int
) -> None:
    """What torch does not count shows a step later, in what the GPU has added. at: the steps in which they change.
    left: how many steps have early marks."""
    mark, gpu, reader, telltale = EndMark(marks, 0), Device(CPU, marks, 0), Reader(), torch.nn.Parameter(torch.ones(1))
    end = END
    early = EarlyMarks(mark, gpu, lambda: telltale, cast(Any, reader), lambda: end)
    found = []
    for step in range(TRIED + 6):
        end = END._replace(step=step)
        another(reader)  # in a forward
        telltale.sum().backward()
        if end in end_marks.read_early(marks, 0):
            found.append(step)
        if step in at:
            change(reader)
        body = reader.local().body({})
        part = mark.write(end, body, added=8)
        gpu.add(part, end, reader.on_gpu)
        early.at_end(end, reader.local(), part)
    assert found == [*range(TRIED + 1, TRIED + 1 + left)]
    assert not end_marks.read_early(marks, 0).get(end)
    gpu.close()


ITEMS = {
    "contiguous": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "with gaps": torch.arange(24, dtype=torch.int16)[3::2],
    "expanded": torch.arange(5.0).expand(2, 5),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": torch.arange(7).bfloat16(),
    "bool": torch.tensor([True, False]),
    "complex": torch.complex(torch.arange(3.0), torch.ones(3)),
}


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_what_is_read_is_a_copy_with_the_same_values(
    marks: end_marks.EndMarkPaths, monkeypatch: pytest.MonkeyPatch, item: Tensor
) -> None:
    monkeypatch.setattr(of_device, "_BUFFER_BYTES", 7)  # bytes: in many parts
    copied = Device(CPU, marks, 0).read(item)
    assert copied.dtype == item.dtype
    assert torch.equal(copied, item)
    assert copied.data_ptr() != item.data_ptr() or not item.numel()


def test_a_gpu_that_does_not_answer_is_given_up(marks: end_marks.EndMarkPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, copied = Device(CPU, marks, 0), threading.Event()

    class Never:
        def __getitem__(self, _: Any) -> "Never":
            return self

        def copy_(self, *_: Any, **__: Any) -> None:
            copied.wait()

    monkeypatch.setattr(of_device, "_ANSWER", 0.05)
    gpu._buffer = Never()
    with pytest.raises(NoAnswer, match=r"cpu has not copied 0\.0 MB within 0\.05 s"):
        gpu.read(torch.ones(2))
    monkeypatch.setattr(of_device, "_ANSWER", 1e9)
    with pytest.raises(NoAnswer):
        gpu.read(torch.ones(2))
    copied.set()


def test_what_a_driver_says_is_told_by_who_asked(marks: end_marks.EndMarkPaths) -> None:
    class Broken:
        def __getitem__(self, _: Any) -> "Broken":
            return self

        def copy_(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    gpu = Device(CPU, marks, 0)
    gpu._buffer = Broken()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu.read(torch.ones(2))


def test_stamps_differ_with_each_number_of_a_step_s_end() -> None:
    ends = [END._replace(**{name: value + 1}) for name, value in END._asdict().items()]
    stamps = {end_marks.stamp_of(end) for end in (END, *ends)}
    assert len(stamps) == 1 + len(StepEnd._fields)
    assert all(0 < stamp < 1 << 63 for stamp in stamps)


def test_an_update_waits_for_its_gradients_before_it_counts_as_a_change(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a host whose GPU waits for ever for a sum would have asked for the update behind it."""
    use_late_gpu(monkeypatch.setattr)
    waited: list[tuple[int, int]] = []
    seen: list[rollback.Guard] = []
    really = LateGpu.await_gradients

    def await_gradients(gpu: LateGpu) -> None:
        if seen:
            waited.append((seen[0].step, seen[0]._loop.last_snapshot._standing.changes))
        really(gpu)

    monkeypatch.setattr(LateGpu, "await_gradients", await_gradients)
    changes: list[tuple[int, int]] = []

    def at_each(guard: rollback.Guard | None, position: int) -> None:
        assert guard is not None
        seen[:] = [guard]
        changes.append((guard.step, guard._loop.last_snapshot._standing.changes))

    toy = TOY.but(samples=40, settings={"last_snapshot": "on"})
    kept(tmp_path / "run", memory, lambda guard: None, toy, at_each)
    assert len(changes) == 10
    assert waited[: len(changes)] == changes, "once in each step, and nothing has begun to change"
