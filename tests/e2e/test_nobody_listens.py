"""A rank that cannot say anything: its stderr is full, or closed."""

import os
import sys
from pathlib import Path
from typing import TextIO

import pytest
from toy import Toy, facts, require_same, train

from rollback.facts.training import Restored, Trouble


def full() -> TextIO:
    return open("/dev/full", "w", buffering=1)


def closed() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w", buffering=1)


@pytest.mark.parametrize("stream", [full, closed])
def test_a_rank_whose_stderr_is_full_or_closed_trains_on_and_counts_what_it_could_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    toy = Toy(nan=(57,))
    heard = train(toy, tmp_path / "heard")
    monkeypatch.setattr(sys, "stderr", stream())  # type: ignore[operator]
    unheard = train(toy, tmp_path / "unheard")
    monkeypatch.undo()
    require_same(unheard, heard, "unheard")
    assert len(facts(tmp_path / "unheard", Restored)) == 1
    (trouble,) = facts(tmp_path / "unheard", Trouble)
    assert trouble.doing == "telling people on stderr"
    assert int(trouble.error.split()[0]) >= 3
    assert not facts(tmp_path / "heard", Trouble)
