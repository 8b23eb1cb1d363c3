"""The recorder of rank 0: what it adds to the metrics of an earlier attempt."""

import errno
import os
from pathlib import Path

import pytest

from rollback.facts.training import Advice
from rollback.rundir.journal import journal
from rollback.rundir.metrics.metric_lines import metric_line
from rollback.rundir.paths import RunPaths
from rollback.train.comm.recorder import Recorder


def line(step: int) -> str:
    return metric_line(step=step, batch=step, loss=2.0, grad_norm=None, verdict="healthy", attempt=1, timeline=0)


@pytest.mark.parametrize(
    ("last", "added"),
    [(line(1), 2), ("", 3), ("\0\0\0", 0), ("[1]", 0), ('{"step": 1}', 0), ('{"step": "1", "attempt": 1}', 0)],
)
def test_steps_that_an_attempt_could_not_write_are_added_if_it_is_known_which(
    tmp_path: Path, last: str, added: int
) -> None:
    paths = RunPaths(tmp_path)
    paths.metrics.parent.mkdir()
    before = f"{last}\n" if last else ""
    paths.metrics.write_text(before)
    record = Recorder(paths, 2, is_rank_0=True)
    record.complete_metrics([line(1), line(2), line(3)])
    record.close()
    written = paths.metrics.read_text().removeprefix(before)
    assert written == "".join(f"{line(step)}\n" for step in (1, 2, 3)[3 - added :])


def test_what_the_journal_could_not_take_is_known_with_the_reason_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    record = Recorder(RunPaths(tmp_path), 1, is_rank_0=True)
    assert record.unwritten == ""
    with monkeypatch.context() as disk:
        disk.setattr(journal, "append_lines", full)
        record.note(Advice(code="a", text="a"))
        record.note(Advice(code="b", text="b"))
        assert record.unwritten == "No space left on device"
        journalling = f"writing the journal {RunPaths(tmp_path).train_journal}"
        assert capsys.readouterr().err.count(f"{journalling} fails (No space left on device)") == 1
    record.note(Advice(code="c", text="c"))
    assert record.unwritten == ""
