"""What the ranks of a watched script see: compared, refused, or said."""

from typing import Any

import pytest

from rollback.errors import UsageError
from rollback.source.loop_counters import LoopCounter
from rollback.trainers.adopt.notices import ScriptNotices


def told_by(monkeypatch: pytest.MonkeyPatch, *others: Any) -> None:
    """As if there were further ranks, which say this."""
    monkeypatch.setattr("rollback.train.comm.ranks.Ranks.from_each", lambda ranks, value: [value, *others])


def test_ranks_that_see_the_same_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told_by(monkeypatch, {"the model": "Net"}, {"the model": "Net"})
    ScriptNotices(strict=True).agree({"the model": "Net"})


def test_the_first_rank_that_sees_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told_by(monkeypatch, {"the model": "Net"}, {"the model": "Other"})
    with pytest.raises(UsageError, match="the model is 'Net' on rank 0 and 'Other' on rank 2"):
        ScriptNotices(strict=False).agree({"the model": "Net"})


@pytest.mark.parametrize(("others", "where"), [([{"the model": "Net"}], " (rank 1)"), ([], "")])
def test_an_error_of_one_rank_is_that_of_all(monkeypatch: pytest.MonkeyPatch, others: list[Any], where: str) -> None:
    error = {"refused": {"message": "no", "hint": "do"}}
    told_by(monkeypatch, error)
    with pytest.raises(UsageError) as refused:
        ScriptNotices(strict=False).agree(others[0] if others else error)
    assert (refused.value.message, refused.value.hint) == (f"no{where}", "do")


@pytest.mark.parametrize(("strict", "step", "ends"), [(False, 99, True), (False, 100, False), (True, 100, True)])
def test_a_late_notice_is_only_said(capsys: pytest.CaptureFixture[str], strict: bool, step: int, ends: bool) -> None:
    notices = ScriptNotices(strict=strict)
    if ends:
        with pytest.raises(UsageError, match="the script does odd things"):
            notices.note_inexact("does odd things", step)
        return
    notices.note_inexact("does odd things", step)
    notices.note_inexact("does odd things", step)
    assert capsys.readouterr().err.count("does odd things") == 1


@pytest.mark.parametrize(("trains", "strict", "ends"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_count_that_is_trained_by_ends_a_strict_script_only(
    capsys: pytest.CaptureFixture[str], trains: bool, strict: bool, ends: bool
) -> None:
    counter = LoopCounter("epoch", 7, ends=False, trains=trains)
    told = "counts with `epoch` by itself (line 7)" + ", and trains by it" * trains
    if ends:
        with pytest.raises(UsageError) as refused:
            ScriptNotices(strict=strict).tell_counter("line 7", counter, here=True)
        assert told in refused.value.message
        return
    ScriptNotices(strict=strict).tell_counter("line 7", counter, here=True)
    assert f"{told}: a rollback" in capsys.readouterr().err


def test_what_rank_1_notices_rank_0_says_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("rollback.train.comm.ranks.Ranks.__init__", lambda ranks: None)
    told_by(monkeypatch, ["odd"], ["odd"])
    notices = ScriptNotices(strict=False)
    notices.share()
    assert "rank 1: odd" in capsys.readouterr().err


def test_what_another_rank_notices_at_each_step_it_tells_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("rollback.train.comm.ranks.Ranks.__init__", lambda ranks: None)
    shared: list[list[str]] = []
    monkeypatch.setattr("rollback.train.comm.ranks.Ranks.from_each", lambda ranks, told: shared.append([*told]) or [])
    notices = ScriptNotices(strict=False)
    for step in range(100, 105):
        notices.note_inexact("does odd things", step)
    notices.share()
    notices.note_inexact("does odd things", 105)
    notices.share()
    assert [*map(len, shared)] == [1, 0]


def test_another_training_ends_a_strict_script_only(capsys: pytest.CaptureFixture[str]) -> None:
    ScriptNotices(strict=False).end_of_guard("trains again")
    assert "not protected from here on: the script trains again" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the script trains again"):
        ScriptNotices(strict=True).end_of_guard("trains again")
