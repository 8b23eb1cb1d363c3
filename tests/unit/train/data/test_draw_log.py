"""The draw log: a batch that is drawn again must be the one that it was."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollback.errors import RunDoesNotFit
from rollback.train.data import draw_log
from rollback.train.data.cursor.digest import Digest
from rollback.train.data.draw_log import ENTRIES, DrawLog

NOTHING, ONE = 0, 1
"""Hashes of what was skipped before."""


def log(folder: Path, *, afresh: bool = False) -> DrawLog:
    return DrawLog(folder / "draws" / "rank-00000.bin", afresh=afresh)


def written(folder: Path, count: int = 4) -> None:
    first = log(folder)
    for batch in range(count):
        first.check(batch, batch + 100, torch.tensor([batch]), NOTHING)
    # A process that is killed closes nothing.


def test_the_same_batches_may_come_again(tmp_path: Path) -> None:
    written(tmp_path)
    again = log(tmp_path)
    for batch in range(4):
        again.check(batch, batch + 100, torch.tensor([batch]), NOTHING)


def test_other_indices_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(RunDoesNotFit, match=r"batch 2 .*other indices.*the model.* give the loader one of its own"):
        log(tmp_path).check(2, 7, torch.tensor([2]), NOTHING)


def test_other_data_under_the_same_indices_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(RunDoesNotFit, match=r"batch 2 .*other data \(the sampler gives the same indices\)"):
        log(tmp_path).check(2, 102, torch.tensor([9]), NOTHING)


def test_what_was_drawn_before_is_compared_in_the_same_process_too(tmp_path: Path) -> None:
    present = log(tmp_path)
    present.check(5, None, torch.tensor([1.0]), NOTHING)
    with pytest.raises(RunDoesNotFit, match="other data"):
        present.check(5, None, torch.tensor([2.0]), NOTHING)


def test_an_epoch_that_was_opened_under_other_random_states_is_another_one(tmp_path: Path) -> None:
    present = log(tmp_path)
    present.check(2, 102, torch.tensor([2]), NOTHING, 1)
    present.check(2, 7, torch.tensor([9]), NOTHING, 2)
    with pytest.raises(RunDoesNotFit, match="other indices"):
        present.check(2, 102, torch.tensor([2]), NOTHING, 2)


def test_an_epoch_does_not_end_before_a_batch_that_it_had(tmp_path: Path) -> None:
    present = log(tmp_path)
    present.check(4, None, torch.tensor([1.0]), NOTHING, opening=3)
    present.check_end(5, opening=3)
    present.check_end(4, opening=7)
    with pytest.raises(RunDoesNotFit, match=r"batch 4 .*its epoch ends before it"):
        present.check_end(4, opening=3)


def test_where_other_batches_were_skipped_before_it_only_indices_are_compared(tmp_path: Path) -> None:
    written(tmp_path)
    again = log(tmp_path)
    again.check(2, 102, torch.tensor([9]), ONE)
    with pytest.raises(RunDoesNotFit, match="other indices"):
        again.check(3, 7, torch.tensor([3]), ONE)


def test_where_other_data_are_accepted_their_order_alone_is_compared(tmp_path: Path) -> None:
    """Of what an attempt before wrote, and of what this one did, which may go back."""
    written(tmp_path)
    accepted = DrawLog(tmp_path / "draws" / "rank-00000.bin", afresh=False, contents=False)
    accepted.check(2, 102, torch.tensor([9]), NOTHING)
    accepted.check(2, 102, torch.tensor([8]), NOTHING)
    accepted.compare(2, torch.tensor([7]), NOTHING)
    assert not accepted.knows(2, NOTHING)
    with pytest.raises(RunDoesNotFit, match="other indices"):
        accepted.check(3, 7, torch.tensor([3]), NOTHING)


def test_nothing_is_compared_where_the_data_were_changed_on_purpose(tmp_path: Path) -> None:
    written(tmp_path)
    log(tmp_path, afresh=True).check(2, 7, torch.tensor([9]), NOTHING)


def test_the_last_batches_of_a_long_run_are_remembered(tmp_path: Path) -> None:
    first = log(tmp_path)
    for batch in range(ENTRIES + 3):
        first.check(batch, batch + 100, None, NOTHING)
    again = log(tmp_path)
    again.check(2, 7, None, NOTHING)  # long gone: batch 4098 is in its place
    with pytest.raises(RunDoesNotFit):
        again.check(ENTRIES, 7, None, NOTHING)
    assert (tmp_path / "draws" / "rank-00000.bin").stat().st_size == ENTRIES * 48


@pytest.mark.parametrize("damage", ["torn", "flipped", "longer", "zeros"])
def test_a_damaged_log_forgets_and_harms_nobody(tmp_path: Path, damage: str) -> None:
    written(tmp_path)
    path = tmp_path / "draws" / "rank-00000.bin"
    body = bytearray(path.read_bytes())
    match damage:
        case "torn":
            body = body[:90]
        case "flipped":
            body[2 * 48 + 9] ^= 1
        case "longer":
            body += b"x" * (ENTRIES * 50)
        case "zeros":
            body = bytearray(len(body))
    path.write_bytes(body)
    again = log(tmp_path)
    if damage == "longer":
        with pytest.raises(RunDoesNotFit):
            again.check(2, 7, torch.tensor([2]), NOTHING)
    else:
        again.check(2, 7, torch.tensor([2]), NOTHING)


def test_a_log_that_cannot_be_written_is_said_once_and_keeps_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "draws").write_text("a file where the folder should be")
    present = log(tmp_path)
    for batch in range(3):
        present.check(batch, batch, None, NOTHING)
    assert capsys.readouterr().err.count("draw log") == 1
    with pytest.raises(RunDoesNotFit):
        present.check(1, 9, None, NOTHING)


def test_a_device_is_waited_for_one_batch_later_and_at_once_where_there_is_something_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnDevice(Digest):
        """As of a batch on a device, which copies it to the host beside the training."""

        def __init__(self, batch: Any) -> None:
            super().__init__(None)
            self.coming.append((batch, self))
            self.batch = int(batch)

        def synchronize(self) -> None:
            waited_for.append(self.batch)

    monkeypatch.setattr(draw_log, "Digest", OnDevice)
    waited_for: list[int] = []
    first = log(tmp_path)
    for batch in range(3):
        first.check(batch, None, torch.tensor([batch]), NOTHING)
        assert waited_for == [*range(batch)]
    first.close()
    assert waited_for == [0, 1, 2]
    again = log(tmp_path)
    again.check(1, None, torch.tensor([1]), NOTHING)
    with pytest.raises(RunDoesNotFit, match="other data"):
        again.check(2, None, torch.tensor([9]), NOTHING)
    assert waited_for == [0, 1, 2, 1, 9]


def test_a_batch_read_only_to_be_dropped_is_compared_and_leaves_no_trace(tmp_path: Path) -> None:
    written(tmp_path)
    again = log(tmp_path)
    assert again.knows(3, NOTHING)
    assert not again.knows(4, NOTHING)
    assert not again.knows(3, ONE)
    again.compare(3, torch.tensor([3]), NOTHING)
    again.compare(9, torch.tensor([3]), NOTHING)
    assert not again.knows(9, NOTHING)
    with pytest.raises(RunDoesNotFit):
        again.compare(3, torch.tensor([4]), NOTHING)
