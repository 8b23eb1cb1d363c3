"""The audit says what happened, its sums are right, and what a journal quotes cannot steer a terminal."""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from facts import facts
from recorded_run import RecordedRun, eventful_run, hold, incident, rollback_plan, stopped_by_themselves
from rollback.cli import app
from rollback.errors import JournalDamaged, RollbackError, RunDirectoryError, RunDoesNotFit, UsageError
from rollback.facts.history import fold
from rollback.facts.probes import NotProbed, Probed
from rollback.facts.training import (
    Advice,
    Answered,
    AttemptEnded,
    AttemptStarted,
    CheckpointLost,
    Committed,
    Concluded,
    Dropped,
    Evicted,
    Fact,
    FinalStateLost,
    Finished,
    Hung,
    JournalEntry,
    LastSnapshotMade,
    PassedOver,
    Planned,
    Quarantined,
    Requested,
    Restored,
    RunEnded,
    SampleQuarantine,
    ScalerSkipped,
    Signalled,
    SkipAdded,
    SpareNodes,
    Stopped,
    Trouble,
    Window,
)
from rollback.inspect.audit.compile import compile_audit
from rollback.inspect.audit.contents import RunContents, read_run_contents
from rollback.inspect.audit.quarantine import read_sample_report
from rollback.inspect.audit.report import AuditReport, Run
from rollback.inspect.audit.samples import read_samples
from rollback.inspect.audit.text import indices_in_words, print_audit
from rollback.inspect.audit.verify import check_integrity
from rollback.inspect.record.cost import Charged
from rollback.inspect.record.ending import NO_END
from rollback.inspect.ring.checkpoints import read_listing
from rollback.rundir import requests
from rollback.rundir.requests import Request
from rollback.terminal.escape import console_for, printable, quoted

C0, C1, C2 = "c000000-s00000000", "c000001-s00000020", "c000002-s00000040"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """A run that has attached and taken checkpoints at steps 0 and 20, one step a second."""
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    run.commit(0, C0, 0)
    run.commit(20, C1, 20)
    return run


def audit_of(run: RecordedRun) -> AuditReport:
    return compile_audit(read_run_contents(run.paths.root))


def text_of(audit: AuditReport, *, everything: bool = False, width: int = 100) -> str:
    stream = io.StringIO()
    print_audit(Console(file=stream, width=width, highlight=False, markup=False), audit, everything=everything)
    return stream.getvalue()


def cli(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# --- an eventful run --------------------------------------------------------------------------------------------------


@pytest.fixture
def eventful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    return eventful_run(tmp_path / "run", monkeypatch)


def test_an_incident_is_told_with_its_evidence_and_answer(eventful: RecordedRun) -> None:
    first = audit_of(eventful).incidents[0]
    assert (first.onset.step, first.onset.batch, first.detection.step, first.detection.batch) == (45, 90, 49, 99)
    assert (first.cause, first.rule, first.value, first.threshold) == ("loss", "loss-level", 6.5, 3.25)
    assert (first.recent, first.ranks) == ([2.5, 2.25], [1])
    assert first.restored
    assert (first.restored.checkpoint, first.restored.step, first.restored.batch) == (C2, 40, 80)
    assert first.skip
    assert (first.skip.first, first.skip.last, first.skip.batches, first.skip.passed_over) == (80, 101, 22, 22)


def test_a_repeat_is_one_story_with_the_incident_that_it_repeats(eventful: RecordedRun) -> None:
    audit = audit_of(eventful)
    assert [[entry.incident for entry in story] for story in audit.stories()] == [[1, 2]]
    first, second = audit.incidents
    assert (first.outcome, first.repeated_by, first.repeats) == ("repeated", 2, None)
    assert (second.outcome, second.outcome_step, second.repeats, second.escalation) == ("recovered", 80, 1, 1)


def test_every_skipped_batch_is_listed_once_with_the_indices_of_every_rank_and_its_incidents(
    eventful: RecordedRun,
) -> None:
    audit = audit_of(eventful)
    assert [entry.batch for entry in audit.skipped] == list(range(40, 104))
    batch_90 = audit.skipped[50]
    assert batch_90.indices == {0: [9000, 9001, 9002, 9003], 1: [9010, 9011, 9012, 9013]}
    assert batch_90.incidents == [1, 2]
    assert [entry.batch for entry in audit.skipped_by(1)] == list(range(80, 102))
    assert (audit.totals.skipped_batches, audit.totals.skipped_samples) == (64, 64 * 2 * 4)


def test_steps_and_seconds_lost_are_charged_once(eventful: RecordedRun) -> None:
    audit = audit_of(eventful)
    first, second = audit.incidents
    # The checkpoint of step 40 was taken at 42 s, that of step 20 at 22 s; the restores were done at 53 s and 64 s.
    assert (first.steps_lost, first.seconds_lost) == (10, pytest.approx(53 - 42))
    assert (second.steps_lost, second.seconds_lost) == (30, pytest.approx((42 - 22) + (64 - 53)))
    # It died at 114 s with 70 steps done and went on at 124 s from step 60, which it had reached at 104 s.
    died = audit.attempts[0]
    assert (died.steps_lost, died.seconds_lost) == (10, pytest.approx(114 - 104))
    totals = audit.totals
    assert (totals.steps, totals.steps_lost, totals.goodput) == (100, 50, pytest.approx(103 / 165, abs=1e-6))
    assert totals.seconds == pytest.approx(165)
    assert totals.seconds_lost == pytest.approx(11 + 31 + 10)
    assert totals.seconds_down == pytest.approx(124 - 114)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_seconds_are_those_of_one_clock_where_the_clocks_of_hosts_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    alike, totals = (
        audit_of(eventful_run(tmp_path / f"{seconds}", monkeypatch, ahead=seconds)).totals for seconds in (0.0, ahead)
    )
    (notice,) = audit_of(eventful_run(tmp_path / "run", monkeypatch, ahead=ahead)).notices
    assert re.match("the clocks of rank 0's host and the leading supervisor's differ by (59|60) min", notice)
    assert totals.seconds == pytest.approx(alike.seconds, abs=2)
    assert totals.seconds_lost == pytest.approx(alike.seconds_lost, abs=2)
    assert totals.seconds_down == pytest.approx(alike.seconds_down, abs=2)
    assert totals.goodput == pytest.approx(alike.goodput, abs=0.02)


def test_how_long_a_run_took_is_not_told_where_its_clock_was_set_back(run: RecordedRun) -> None:
    run.commit(3640, C2, 40)
    run.commit(50, "c000003-s00000050", 50)
    run.tell(100, Finished(step=100, batch=200))
    run.tell(101, AttemptEnded(status=0, cause="finished", step=100, seconds=101.0))
    audit = audit_of(run)
    assert (audit.totals.seconds, audit.totals.goodput) == (None, None)
    assert "a clock was set back by 59 min on the way" in audit.notices[0]
    assert "an unknown time on record" in text_of(audit)


def test_attempts_tell_how_they_ended_and_what_came_next(eventful: RecordedRun) -> None:
    first, second = audit_of(eventful).attempts
    assert (first.ended, first.cause, first.reached) == ("died", "rank 1 was killed by signal 9", 70)
    assert (first.restart_delay, first.restart_budget_left, first.restart_reason) == (1.0, 2, "a rank died")
    assert (second.checkpoint, second.ended, second.reached) == ("c000003-s00000060", "finished", 100)
    assert second.begins
    assert second.begins.step == 60


def test_what_was_left_alone_and_the_end_are_told(eventful: RecordedRun) -> None:
    audit = audit_of(eventful)
    assert [(entry.first_step, entry.fate) for entry in audit.noticed] == [(65, "back after 2 steps")]
    assert audit.ending
    assert (audit.ending.how, audit.ending.step, audit.ending.exit_code) == ("finished", 100, 0)
    assert audit.notices == []


def test_what_the_model_was_asked_is_told_and_where_it_could_not_be(run: RecordedRun) -> None:
    run.attach(2, 1, None, 0)
    asked = Probed(
        step=60, onset_step=30, level=2.0, now=2.4, kept_step=20, loss_then=1.7, loss_now=1.7, finding="data",
        explanation="the probe batch of step 20 had loss 1.7, has 1.7 now",
    )  # fmt: skip
    run.tell(30, asked)
    run.tell(40, NotProbed(step=260, onset_step=230, reason="the model is sharded"))
    first, second = audit_of(run).probes
    assert (first.step, first.onset_step, first.finding) == (60, 30, "data")
    assert (second.step, second.finding) == (260, None)
    text = text_of(audit_of(run))
    assert "step 60: the probe batch of step 20 had loss 1.7, has 1.7 now" in text
    assert "step 260: the model could not be asked: the model is sharded" in text


def test_the_command_prints_the_audit_as_json_with_its_schema(eventful: RecordedRun) -> None:
    result = cli("audit", eventful.paths.root, "--json")
    assert result.exit_code == 0
    body = json.loads(result.stdout)
    assert body["schema"] == 1
    assert AuditReport.model_validate(body) == audit_of(eventful)
    assert result.stderr == ""


def test_the_command_prints_the_whole_story_as_text(eventful: RecordedRun) -> None:
    result = cli("audit", eventful.paths.root)
    assert result.exit_code == 0
    for words in [
        "2, answered by 2 restores", "64 batches (512 samples)", "100 count, at least 50 were undone",
        "goodput at most 62.4%",
        "incident 1: loss spiked", "└ incident 2, the same trouble again", "came back as incident 2",
        "recovered (step 80)",
        "4000..4003", "and 52 more (to 103)", "back after 2 steps", "rank 1 was killed by signal 9",
    ]:  # fmt: skip
        assert words in " ".join(result.stdout.split()), words
    assert "\x1b" not in result.stdout, "not a terminal: no escape sequences"


@pytest.mark.parametrize(
    ("indices", "shown"),
    [
        (None, "-"), ([], ""), ([7], "7"), ([7, 9], "7 9"), ([4, 5, 6], "4..6"), ([8, 10, 12, 14], "8..14 by 2"),
        ([9, 8, 7], "9..7 by -1"), ([3, 3, 3], "3..3 by 0"), ([5, 1, 4], "5 1 4"),
        ([9, 1, 8, 2, 7, 3, 6, 4], "9 1 8 2 7 3 +2"),
    ],
)  # fmt: skip
def test_indices_are_shown_as_a_range_where_they_are_one(indices: list[int] | None, shown: str) -> None:
    assert indices_in_words(indices, everything=False) == shown


def test_a_checkpoint_that_somebody_removed_is_in_the_text(run: RecordedRun) -> None:
    run.tell(30, CheckpointLost(checkpoint=C1, tier="durable"))
    assert f"{C1} lost: somebody else has removed it, or part of it" in " ".join(text_of(audit_of(run)).split())


def test_what_each_of_many_ranks_would_have_read_is_legible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch, world_size=64)
    run.pass_over(50, 100, 100, ranks=64)
    audit = audit_of(run)
    rows = [line.split() for line in text_of(audit, width=80).splitlines()]
    assert ["3", "10030..10033"] in rows
    assert ["and", "60", "more", "ranks"] in rows
    assert ["63", "10630", "10631", "10632", "10633"] in [
        line.split() for line in text_of(audit, width=80, everything=True).splitlines()
    ]


def test_of_very_many_the_last_are_printed_unless_all_are_asked_for(eventful: RecordedRun) -> None:
    audit = audit_of(eventful)
    first, attempt = audit.incidents[0], audit.attempts[0]
    many = audit.model_copy(
        update={
            "incidents": [first.model_copy(update={"incident": n, "repeats": None}) for n in range(450)],
            "attempts": [attempt.model_copy(update={"attempt": n}) for n in range(1, 204)],
        }
    )
    text, whole = text_of(many), text_of(many, everything=True)
    assert re.findall(r"^incident (\d+):", text, re.MULTILINE) == [str(n) for n in range(250, 450)]
    assert "250 earlier incidents: --all or --json shows them" in text
    assert "3 earlier ones: --all or --json shows them" in text
    assert re.findall(r"^incident (\d+):", whole, re.MULTILINE) == [str(n) for n in range(450)]
    assert "earlier" not in whole


@pytest.mark.parametrize("no_color", [True, False])
def test_a_terminal_gets_styles_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    console_for(stream).print(quoted("structural", style="red"))
    assert ("\x1b" in stream.getvalue()) != no_color


def test_all_shows_every_batch(eventful: RecordedRun) -> None:
    text = cli("audit", eventful.paths.root, "--all").stdout
    assert "10310 10311" in text
    assert "more (to" not in text


@pytest.mark.parametrize("width", [20, 40, 79, 200])
def test_text_fits_the_width_and_loses_nothing(eventful: RecordedRun, width: int) -> None:
    text = text_of(audit_of(eventful), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 40:
        assert "4010" in text
        assert "c000002-s00000040" in text.replace("\n", "").replace(" ", "")


def test_reading_leaves_no_trace(eventful: RecordedRun) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        files = (path for path in eventful.paths.root.rglob("*"))
        return {str(p): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in files}

    before = state()
    cli("audit", eventful.paths.root)
    cli("status", eventful.paths.root, "--json")
    assert state() == before


# --- stories that end otherwise ---------------------------------------------------------------------------------------


def test_a_plan_that_a_crash_interrupted_is_open_and_only_planned(run: RecordedRun) -> None:
    run.judge(0, 34)
    run.tell(35, incident(1, 30, 34))
    run.tell(35, rollback_plan(1, C1, 20, (40, 89)))
    audit = audit_of(run)
    entry = audit.incidents[0]
    assert (entry.outcome, entry.restored, entry.planned_checkpoint, entry.steps_lost) == ("open", None, C1, None)
    assert entry.skip
    assert (entry.skip.batches, entry.skip.passed_over) == (50, 0)
    assert "planned, not carried out yet" in text_of(audit)


def test_a_rollback_that_is_carried_out_by_relaunch_pays_for_the_steps_and_the_death_pays_nothing(
    run: RecordedRun,
) -> None:
    run.judge(0, 34)
    run.tell(35, incident(1, 30, 34))
    run.tell(35, rollback_plan(1, C1, 20, (40, 89)))
    run.attach(50, 2, C1, 20)
    done = Restored(incident=1, checkpoint=C1, step=20, batch=40, steps_lost=15, seconds=0.0, route="relaunch")
    run.tell(51, done, 2)
    audit = audit_of(run)
    # From the checkpoint (20 s) to the last fact of attempt 1 (35 s), and from attaching (50 s) to the restore (51 s).
    assert (audit.incidents[0].steps_lost, audit.incidents[0].seconds_lost) == (15, pytest.approx(15 + 1))
    assert (audit.attempts[0].steps_lost, audit.attempts[0].seconds_lost) == (0, 0.0)
    assert audit.totals.seconds_down == pytest.approx(15)
    assert audit.totals.steps_lost == 15


def test_a_death_after_a_rollback_counts_steps_from_where_the_rollback_left_it(run: RecordedRun) -> None:
    run.judge(0, 34)
    run.tell(35, incident(1, 30, 34))
    run.tell(35, rollback_plan(1, C1, 20, (40, 89)))
    run.tell(36, Restored(incident=1, checkpoint=C1, step=20, batch=40, steps_lost=15, seconds=1, route="in_process"))
    run.judge(20, 24, timeline=1)
    run.tell(38, AttemptEnded(status=1, cause="rank 0 was killed", step=27, seconds=38.0, why="signal", rank=0))
    run.attach(60, 2, C1, 20)
    audit = audit_of(run)
    assert audit.attempts[0].steps_lost == 7
    assert audit.totals.steps_lost == 22


def test_without_metrics_the_journal_alone_tells_what_it_can(run: RecordedRun) -> None:
    run.tell(35, AttemptEnded(status=1, cause="a rank died", step=33, seconds=35.0))
    run.attach(60, 2, C1, 20)
    assert audit_of(run).attempts[0].steps_lost == 13


def test_what_was_kept_and_lost_with_its_host_was_undone(run: RecordedRun) -> None:
    """The leader's host was lost behind it, and with it the record of these steps: the bucket has the one up to 35."""
    run.judge(0, 34)
    run.tell(60, LastSnapshotMade(reason="rank 1 is gone", checkpoint="c000009-s00000060", step=60, steps_lost=40))
    run.attach(61, 2, C1, 20)
    audit = audit_of(run)
    assert (audit.attempts[0].reached, audit.attempts[0].steps_lost, audit.totals.steps_lost) == (60, 40, 40)


def test_the_night_until_a_killed_launch_is_started_again_is_down_and_not_undone(run: RecordedRun) -> None:
    run.judge(0, 29)
    run.tell(30, Advice(code="any", text="the last line before the supervisor was killed"))
    run.tell(36000, LastSnapshotMade(reason="the supervisor is gone", checkpoint=None, step=None, steps_lost=10))
    run.tell(36001, SpareNodes(nodes=("node-2",)))
    run.attach(36010, 2, C1, 20)
    totals = audit_of(run).totals
    assert totals.seconds_lost == pytest.approx(30 - 20)
    assert totals.seconds_down == pytest.approx(36010 - 30)


def test_what_was_trained_after_the_last_line_of_a_run_that_was_killed_is_not_claimed_to_be_known(
    run: RecordedRun,
) -> None:
    run.judge(0, 34)  # and then the supervisor, or rank 0 of a job without one, is killed
    audit = audit_of(run)
    assert (audit.attempts[0].reached, audit.attempts[0].at_least) == (35, True)
    assert (audit.totals.steps, audit.totals.steps_at_least) == (35, True)
    text = text_of(audit, width=200)
    assert "at least 35 count" in text
    assert "step 0 to at least 35" in text
    assert "2.5 at step 34, the last on record" in text
    run.attach(60, 2, C1, 20)
    run.judge(20, 39, attempt=2)
    run.tell(80, Finished(step=40, batch=80), 2)
    audit = audit_of(run)
    assert (audit.totals.steps, audit.totals.steps_at_least) == (40, False)
    assert (audit.totals.steps_lost, audit.totals.steps_lost_at_least) == (15, True)
    text = text_of(audit, width=200)
    assert "40 count, at least 15 were undone" in text
    assert "lost at least 15 steps" in text


def test_an_epoch_s_end_is_not_the_end_of_an_attempt_that_was_killed_later(run: RecordedRun) -> None:
    run.tell(0, AttemptStarted(command=("torchrun",), host="node1", pid=1))
    run.judge(0, 34)
    run.tell(24, Finished(step=24, batch=48))  # of the first pass over the data
    audit = audit_of(run)
    assert audit.ending is None, "the supervisor was killed, and the run is said to have finished"
    assert (audit.attempts[0].ended, audit.attempts[0].at_least) == ("running_or_unknown", True)
    run.tell(40, AttemptEnded(status=1, cause="rank 1 was killed", step=36, seconds=40.0, why="signal", rank=1))
    audit = audit_of(run)
    assert audit.ending is None
    assert (audit.attempts[0].ended, audit.attempts[0].reached, audit.attempts[0].at_least) == ("died", 36, True)


def test_a_final_state_that_is_lost_behind_an_earlier_pass_is_how_the_attempt_ended(run: RecordedRun) -> None:
    run.judge(0, 34)
    run.tell(24, Finished(step=24, batch=48))  # of the first pass over the data
    run.tell(36, FinalStateLost(step=36, batch=72, checkpoint=None, steps=36, reason="the disk is full"))
    (entry,) = audit_of(run).attempts
    words = "the training loop ended, but its last 36 updates are in no checkpoint"
    assert (entry.ended, entry.cause) == ("finished", words)


def test_an_epoch_s_end_is_not_the_end_of_a_run_without_a_supervisor_either(run: RecordedRun) -> None:
    run.tell(24, Finished(step=24, batch=48))
    run.judge(0, 34)
    audit = audit_of(run)
    assert audit.ending is None
    assert (audit.attempts[0].ended, audit.attempts[0].reached) == ("running_or_unknown", 35)


def test_a_loss_of_a_step_that_was_undone_is_said_to_be(run: RecordedRun) -> None:
    run.judge(0, 34)
    run.attach(60, 2, C1, 20)
    assert "2.5 at step 34, undone since" in text_of(audit_of(run), width=200)
    run.judge(20, 21, attempt=2)
    assert "2.5 at step 21, the last on record" in text_of(audit_of(run), width=200)


def test_what_a_rank_of_a_killed_attempt_was_last_seen_at_counts_beyond_the_last_line(run: RecordedRun) -> None:
    run.judge(0, 34)
    killed = AttemptEnded(status=1, cause="rank 0 was killed by signal 9", step=37, seconds=38.0, why="signal", rank=0)
    run.tell(38, killed)
    run.attach(60, 2, C1, 20)
    died = audit_of(run).attempts[0]
    assert (died.reached, died.steps_lost, died.at_least) == (37, 17, True)


def test_a_rank_that_raised_has_left_word_of_its_very_step(run: RecordedRun) -> None:
    run.judge(0, 34)
    raised = AttemptEnded(status=1, cause="rank 1", step=36, seconds=38.0, why="exception", rank=1, fingerprint="ab")
    run.tell(38, raised)
    run.attach(60, 2, C1, 20)
    audit = audit_of(run)
    assert (audit.attempts[0].reached, audit.attempts[0].at_least) == (36, False)
    assert "16 were undone" in text_of(audit)


def test_a_skip_that_the_supervisor_decided_is_said_to_be_the_supervisor_s(run: RecordedRun) -> None:
    by_supervisor = SkipAdded(window=Window(first=50, last=51), who="the supervisor", why="the same exception twice")
    run.tell(21, by_supervisor)
    run.tell(21, SkipAdded(window=Window(first=60, last=60), who="settings", why="given at the start of an attempt"))
    run.pass_over(22, 50, 51, timeline=0)
    run.pass_over(23, 60, 60, timeline=0)
    audit = audit_of(run)
    assert [(entry.by_user, entry.by_supervisor) for entry in audit.skipped] == [(False, True)] * 2 + [(True, False)]
    text = text_of(audit, width=200)
    assert "the user gave" not in text
    assert "batches 50:51 (2 batches, all passed over) by the supervisor: the same exception twice" in text
    assert "batch 60 (passed over) by settings" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[3] for row in rows if row[:1] in (["50"], ["51"], ["60"]) and len(row) > 4][:3] == [
        "supervisor", "supervisor", "user",
    ]  # fmt: skip


def test_losses_that_are_means_over_accumulated_batches_are_said_to_be_as_observed(run: RecordedRun) -> None:
    run.judge(0, 34)
    run.tell(40, Finished(step=35, batch=70))
    audit = audit_of(run)
    assert audit.last_judged
    assert (audit.last_judged.step, audit.last_judged.loss, audit.last_judged.batches) == (34, 2.5, 2)
    text = " ".join(text_of(audit, width=200).split())
    assert "2.5 at step 34" in text
    assert "as observed in an update of 2 batches; where the script divides each by 2, it is 5 undivided" in text


def test_hung_minutes_are_lost_time(run: RecordedRun) -> None:
    run.judge(0, 34)
    run.commit(35, "c000002-s00000035", 35)
    hung = Hung(suspect=1, reason="rank 1 waits", silent=300.0, limit=300.0, stacks=())
    run.tell(336, hung)
    run.tell(340, AttemptEnded(status=1, cause="hang", step=35, seconds=340.0, why="hang", rank=1))
    run.attach(350, 2, "c000002-s00000035", 35)
    run.judge(35, 99, attempt=2)
    run.tell(400, Finished(step=100, batch=200), 2)
    audit = audit_of(run)
    # Nothing was undone: it went on from the very step. From 36 s to 340 s it hung, and to 350 s it was down.
    assert (audit.totals.steps_lost, audit.totals.seconds_lost) == (0, 0.0)
    assert audit.totals.seconds_hung == pytest.approx(304)
    assert audit.totals.goodput == pytest.approx((400 - 304 - 10) / 400)
    text = text_of(audit, width=200)
    assert "5 min hung" in text
    assert "goodput at most 21.5%" in text


def test_a_finished_run_whose_final_state_is_not_where_it_belongs_says_so(run: RecordedRun) -> None:
    run.tell(100, Finished(step=100, batch=200))
    run.tell(101, AttemptEnded(status=0, cause="all ranks ended", step=100, seconds=101.0))
    run.tell(101, RunEnded(exit_code=74, reason="its final state is not at s3://b/run: the token has expired"))
    ending = audit_of(run).ending
    assert ending
    assert ending.in_words() == (
        "finished at step 100: the training loop ended; exit code 74: "
        "its final state is not at s3://b/run: the token has expired"
    )


def test_a_structural_stop_is_told_with_its_account(run: RecordedRun) -> None:
    run.tell(35, incident(1, 30, 34, verdict="nonfinite", value=float("nan"), threshold=None))
    stop = {"action": "stop", "checkpoint": None, "step": None, "batch": None, "timeline": 0, "reason": "3 rollbacks"}
    run.tell(35, rollback_plan(1, C1, 20, None).model_copy(update=stop))
    run.tell(35, Concluded(incident=1, outcome="structural", step=34))
    run.tell(35, Stopped(reason="structural", step=34, batch=70, checkpoint=None, account="look at the code"))
    run.tell(36, RunEnded(exit_code=76, reason="structural"))
    audit = audit_of(run)
    assert audit.incidents[0].outcome == "structural"
    assert audit.ending
    assert (audit.ending.how, audit.ending.exit_code) == ("structural", 76)
    text = text_of(audit)
    assert "not finite" in text
    assert "structural: the run was stopped" in text
    assert "look at the code" in text
    assert json.loads(audit.to_json())["incidents"][0]["value"] == "NaN"


def test_what_was_only_observed_is_told_as_such(run: RecordedRun) -> None:
    run.tell(35, incident(1, 30, 34))
    run.tell(35, rollback_plan(1, C1, 20, (40, 89)).model_copy(update={"action": "observe", "timeline": 0}))
    run.tell(35, Concluded(incident=1, outcome="observed", step=34))
    audit = audit_of(run)
    assert audit.incidents[0].outcome == "observed"
    assert audit.totals.rollbacks == 0
    assert f"it would have been: restore {C1}, skip batches 40:89" in text_of(audit, width=200)


def test_a_replay_that_does_not_reproduce_suggests_and_does_not_claim(run: RecordedRun) -> None:
    run.tell(35, incident(1, 30, 34))
    run.tell(35, rollback_plan(1, C1, 20, None).model_copy(update={"action": "retry"}))
    run.tell(36, Restored(incident=1, checkpoint=C1, step=20, batch=40, steps_lost=15, seconds=1, route="in_process"))
    run.tell(90, Concluded(incident=1, outcome="not_reproduced", step=80))
    text = text_of(audit_of(run), width=200)
    assert "replay to" in text
    assert "likely, but not proven" in text


def test_a_checkpoint_that_leaves_the_fast_tier_only_is_not_gone(run: RecordedRun) -> None:
    name, step = "c000009-s00000090", 90
    for tier in ("fast", "durable"):
        fields = {"checkpoint": name, "step": step, "batch": 180, "timeline": 0, "bytes": 1, "seconds": 0.1}
        run.tell(90, Committed(**fields, tier=tier))
    run.tell(91, Evicted(checkpoint=name, reason="superseded", tier="fast"))
    assert [entry.status for entry in audit_of(run).checkpoints if entry.checkpoint == name] == ["candidate"]
    run.tell(92, Evicted(checkpoint=name, reason="superseded"))
    assert [entry.status for entry in audit_of(run).checkpoints if entry.checkpoint == name] == ["evicted"]


def test_user_windows_advice_troubles_and_odd_checkpoints_are_told(run: RecordedRun) -> None:
    run.tell(21, SkipAdded(window=Window(first=50, last=59), who="user", why="duplicates"))
    run.pass_over(22, 50, 54, timeline=0)
    run.tell(23, ScalerSkipped(step=23, batch=47))
    run.tell(24, Advice(code="clip-after-step", text="gradients are clipped after the step"))
    run.tell(25, Trouble(doing="writing the metrics", error="No space left on device"))
    run.tell(26, Dropped(checkpoint="c000007-s00000026", step=26, reason="a rank could not write"))
    run.tell(27, Quarantined(checkpoint=C1, reason="a flipped bit"))
    run.tell(28, Signalled(signal="SIGTERM"))
    audit = audit_of(run)
    assert (audit.user_windows[0].span.batches, audit.user_windows[0].span.passed_over) == (10, 5)
    assert [entry.by_user for entry in audit.skipped] == [True] * 5
    assert {entry.checkpoint: entry.status for entry in audit.checkpoints} == {
        C0: "good", C1: "quarantined", "c000007-s00000026": "dropped"
    }  # fmt: skip
    text = text_of(audit, width=200)
    for words in ["duplicates", "clip-after-step", "No space left", "a flipped bit", "could not write", "SIGTERM"]:
        assert words in text, words


def test_checkpoints_that_a_full_disk_refused_in_a_row_are_one_line(run: RecordedRun) -> None:
    names = [f"c{seq:06d}-s{step:08d}" for seq, step in enumerate(range(26, 34), 7)]
    for name, step in zip(names, range(26, 34), strict=True):
        reason = f"rank 0: No space left on device: /run/ring/.{name}" if step != 30 else "a rank could not write"
        run.tell(step, Dropped(checkpoint=name, step=step, reason=reason))
    shown = [line.split() for line in text_of(audit_of(run), width=200).splitlines() if "dropped" in line]
    assert [" ".join(row) for row in shown] == [
        f"{names[0]} to {names[3]}: 4 dropped, the last one: rank 0: No space left on device: /run/ring/.{names[3]}",
        f"{names[4]} dropped: a rank could not write",
        f"{names[5]} to {names[7]}: 3 dropped, the last one: rank 0: No space left on device: /run/ring/.{names[7]}",
    ]
    assert text_of(audit_of(run), width=200, everything=True).count("dropped: ") == len(names)


def test_batches_without_a_record_make_the_number_of_samples_unknown_and_give_a_notice(run: RecordedRun) -> None:
    run.pass_over(30, 60, 61)
    run.tell(31, PassedOver(first=62, last=64, step=31, timeline=1))
    audit = audit_of(run)
    assert (audit.totals.skipped_batches, audit.totals.skipped_samples) == (5, None)
    assert audit.notices == ["3 of 5 batches passed over left no record of what they held"]


def test_batches_that_a_rank_recorded_before_a_crash_took_the_journal_line_were_passed_over(run: RecordedRun) -> None:
    run.pass_over(30, 60, 61)
    lines = run.paths.train_journal.read_bytes().splitlines(keepends=True)
    run.paths.train_journal.write_bytes(b"".join(lines[:-1]))
    assert audit_of(run).totals.skipped_batches == 2


def test_a_run_whose_ranks_never_came_up_has_an_audit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.paths.identity.unlink()
    run.tell(0, AttemptStarted(command=("torchrun", "missing.py"), host="h", pid=1))
    run.tell(1, AttemptEnded(status=2, cause="missing.py does not exist", step=None, seconds=1.0))
    run.tell(1, RunEnded(exit_code=1, reason="no progress"))
    audit = audit_of(run)
    assert audit.run.run_id is None
    assert (audit.totals.steps, audit.totals.goodput) == (0, None)
    assert audit.ending
    assert audit.ending.how == "gave_up"
    assert "the ranks never agreed where to begin; died: missing.py does not exist" in text_of(audit, width=200)


def test_ranks_that_stopped_since_their_supervisor_was_killed_are_told_of_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped_by_themselves(tmp_path / "run", monkeypatch)
    hold(run.paths, alive=True)
    audit = audit_of(run)
    assert audit.ending is not None
    assert (audit.ending.orphaned, audit.ending.account) == (False, "told to stop")
    assert audit.attempts[0].cause is None
    hold(run.paths, alive=False)
    audit = audit_of(run)
    assert audit.ending is not None
    assert (audit.ending.how, audit.ending.orphaned) == ("preempted", True)
    assert audit.ending.account == f"told to stop; {NO_END}"
    assert f"; stopped: {NO_END}" in text_of(audit, width=200)
    run.tell(60, AttemptStarted(command=("torchrun",), host="node1", pid=2), 2)
    run.attach(61, 2, C1, 20)
    hold(run.paths, alive=True)
    audit = audit_of(run)
    assert (audit.ending, [entry.cause for entry in audit.attempts]) == (None, [NO_END, None])


def test_an_order_that_no_rank_has_seen_is_told_with_those_that_were_carried_out(run: RecordedRun) -> None:
    asked = {"who": "ann@site", "why": "", "at": "2026-01-01T00:00:00+00:00"}
    done, refused, waits = (
        requests.submit(run.paths, Request.model_validate({**asked, **order}))
        for order in (
            {"order": "rewind", "to": 4},
            {"order": "stop"},
            {"order": "skip", "skip": {"first": 5, "last": 5}, "why": "torn"},
        )
    )
    run.tell(21, Requested(request=done, order="rewind", to=4, skip=None, who="ann@site", why="", step=9, batch=18))
    run.tell(22, Answered(request=refused, carried_out=False, text="it is for another launch"))
    audit = audit_of(run)
    assert [(entry.request, entry.state) for entry in audit.requests] == [
        (done, "open"), (refused, "refused"), (waits, "open"),
    ]  # fmt: skip
    assert audit.requests[2].taken_up is None
    assert "skip batch 5, by ann@site: torn; open; no rank has seen it yet" in text_of(audit, width=200)


def test_an_order_without_a_reason_leaves_no_room_for_one(run: RecordedRun) -> None:
    run.tell(21, SkipAdded(window=Window(first=50, last=59), who="ann@site", why=""))
    left_out = {"batch": 60, "samples": (7,), "added": (7,), "released": (), "who": "ann@site", "why": ""}
    order = SampleQuarantine(**left_out)
    run.tell(22, order)
    text = text_of(audit_of(run), width=200)
    assert re.search(r"by ann@site *$", text, re.MULTILINE)
    assert "left out from batch 60 on (ann@site)" in text
    assert order.in_words() == "from batch 60 on left out: 7 (ann@site)"
    assert order.model_copy(update={"why": "torn"}).in_words().endswith("(ann@site: torn)")


def test_a_run_that_is_told_to_stop_before_its_ranks_are_up_has_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.tell(0, AttemptStarted(command=("torchrun", "train.py"), host="h", pid=1))
    run.tell(1, Signalled(signal="SIGTERM"))
    cause = "ended on request, before the ranks had stopped together"
    run.tell(2, AttemptEnded(status=1, why="told_to_stop", cause=cause, step=None, seconds=2.0))
    run.tell(2, RunEnded(exit_code=75, reason=cause))
    audit = audit_of(run)
    assert audit.ending is not None
    assert (audit.ending.how, audit.ending.exit_code, audit.ending.account) == ("preempted", 75, cause)
    assert (audit.attempts[0].ended, audit.attempts[0].at_least) == ("stopped", True)
    assert f"the ranks never agreed where to begin; stopped: {cause}" in text_of(audit, width=200)


def test_a_clock_that_jumps_back_a_year_costs_nothing_and_breaks_nothing(run: RecordedRun) -> None:
    run.tell(35, incident(1, 30, 34))
    run.tell(35, rollback_plan(1, C1, 20, (40, 89)))
    back = Restored(incident=1, checkpoint=C1, step=20, batch=40, steps_lost=15, seconds=1, route="in_process")
    run.tell(35 - 365 * 86400, back)
    run.tell(40, Finished(step=60, batch=120))
    audit = audit_of(run)
    assert (audit.incidents[0].steps_lost, audit.incidents[0].seconds_lost) == (15, 0.0)
    assert [entry.incident for entry in audit.incidents] == [1]


moments = st.integers(0, 40)


@given(st.lists(st.tuples(moments, moments), max_size=6))
def test_no_second_is_charged_twice_and_none_is_forgotten(intervals: list[tuple[int, int]]) -> None:
    charged = Charged()
    seconds: set[int] = set()
    for start, end in intervals:
        new = set(range(start, end)) - seconds
        assert charged.charge(float(start), float(end)) == len(new)
        seconds |= new


times = st.text(max_size=8) | st.sampled_from(
    ["2030-01-01T00:00:00+00:00", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2030-01-01", "-1"]
)


@given(st.lists(st.tuples(facts(), times, st.integers(-5, 5)), max_size=12))
def test_whatever_a_journal_holds_there_is_an_audit_and_a_text_or_it_is_called_damaged(
    lines: list[tuple[Fact, str, int]],
) -> None:
    records = [
        JournalEntry(seq=seq, at=at, attempt=attempt, fact=fact) for seq, (fact, at, attempt) in enumerate(lines)
    ]
    try:
        audit = compile_audit(RunContents("run", None, records, fold(records)))
    except JournalDamaged:
        return
    assert json.loads(audit.to_json())["schema"] == 1
    assert "run" in text_of(audit, everything=True)


# --- what cannot be read ----------------------------------------------------------------------------------------------


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30))
def test_a_document_is_in_ascii_and_says_what_it_was_made_of(value: Any) -> None:
    text = Run(directory="run", run_id=None, created=None, world_size=None, data={"it": value}).to_json()
    assert not set(text) - {"\n", *map(chr, range(32, 127))}
    assert json.loads(text)["data"] == {"it": value}


def test_a_torn_tail_is_dropped_with_a_notice_on_stderr(eventful: RecordedRun) -> None:
    path = eventful.paths.train_journal
    path.write_bytes(path.read_bytes()[:-7])
    result = cli("audit", eventful.paths.root, "--json")
    assert result.exit_code == 0
    assert "the last line is incomplete" in result.stderr
    assert json.loads(result.stdout)["ending"]["how"] == "finished"


def test_a_torn_middle_fails_loudly(eventful: RecordedRun) -> None:
    lines = eventful.paths.train_journal.read_bytes().splitlines(keepends=True)
    eventful.paths.train_journal.write_bytes(b"".join([*lines[:3], lines[3][:-20], *lines[4:]]))
    with pytest.raises(JournalDamaged, match=r"train\.jsonl: line 4") as caught:
        read_run_contents(eventful.paths.root)
    assert caught.value.exit_code == 74


def test_what_is_missing_or_no_run_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, kind, code in [
        ("missing", UsageError, 2), ("file", RunDirectoryError, 74), ("empty", RunDirectoryError, 74)
    ]:  # fmt: skip
        with pytest.raises(kind, match=name) as caught:
            read_run_contents(tmp_path / name)
        assert caught.value.exit_code == code
        assert caught.value.hint


@pytest.mark.parametrize("read", [read_run_contents, read_sample_report, read_samples, read_listing, check_integrity])
def test_a_run_of_another_format_is_refused(run: RecordedRun, read: Callable[[Path], object]) -> None:
    body = json.loads(run.paths.identity.read_text())
    run.paths.identity.write_text(json.dumps({**body, "format": 99}))
    with pytest.raises(RunDoesNotFit, match="format 99") as caught:
        read(run.paths.root)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("file", ["metrics/train.jsonl", "skips/rank-00001.jsonl"])
def test_damage_to_the_records_beside_the_journal_is_a_notice(eventful: RecordedRun, file: str) -> None:
    path = eventful.paths.root / file
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"\0\0\0\n", *lines[6:]]))
    audit = audit_of(eventful)
    assert any(f"{file}: line 6 is damaged" in notice for notice in audit.notices)
    assert len(audit.incidents) == 2
    path.unlink()
    os.mkfifo(path)
    assert any("not a regular file" in notice for notice in audit_of(eventful).notices)


# --- hostile text -----------------------------------------------------------------------------------------------------

HOSTILE = "[red]bold[/red] [link=http://x]\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b31m \u202egnp.exe \r\b\0 :smile:"


def hostile_run(run: RecordedRun) -> None:
    run.tell(31, Trouble(doing=HOSTILE, error=f"{HOSTILE}\n[bold]second line"))
    run.tell(32, Advice(code=HOSTILE, text=HOSTILE))
    run.tell(33, SkipAdded(window=Window(first=5, last=6), who=HOSTILE, why=HOSTILE))
    run.tell(34, Quarantined(checkpoint=HOSTILE, reason=HOSTILE))
    run.tell(35, incident(1, 30, 34, cause=HOSTILE, rule=HOSTILE, explanation=HOSTILE))
    plan = rollback_plan(1, C1, 20, (40, 89), reason=HOSTILE)
    run.tell(35, Planned(**{**plan.model_dump(), "checkpoint": HOSTILE}))
    run.tell(36, Stopped(reason="structural", step=34, batch=70, checkpoint=None, account=HOSTILE))
    run.tell(36, AttemptEnded(status=1, cause=HOSTILE, step=34, seconds=1.0))
    run.tell(36, RunEnded(exit_code=76, reason=HOSTILE))


def test_hostile_text_is_shown_and_not_obeyed(run: RecordedRun) -> None:
    hostile_run(run)
    for command in (["audit"], ["audit", "--json"], ["status"], ["status", "--json"]):
        result = cli(command[0], run.paths.root, *command[1:])
        assert result.exit_code == 0
        assert all(char.isprintable() or char == "\n" for char in result.stdout), command
    stream = io.StringIO()
    print_audit(Console(file=stream, width=500, force_terminal=True, markup=True, emoji=True), audit_of(run))
    shown = stream.getvalue()
    assert "[red]bold[/red] [link=http://x]\\x1b[31mred" in shown
    assert "\\u202egnp.exe" in shown
    assert ":smile:" in shown
    assert "\x1b[31mred" not in shown
    assert "\x1b]0;" not in shown


@given(st.text())
def test_printable_text_has_no_control_characters_and_keeps_what_can_be_seen(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert not text.isprintable() or shown == text


def test_windows_too_large_to_be_listed_are_counted_without_listing_them(run: RecordedRun) -> None:
    run.tell(30, SkipAdded(window=Window(first=0, last=2**52), who="user", why="everything"))
    run.tell(31, PassedOver(first=0, last=2**52, step=30, timeline=0))
    audit = audit_of(run)
    assert audit.totals.skipped_batches == 2**52 + 1
    assert "everything" in text_of(audit)


def test_errors_are_for_the_reader(tmp_path: Path) -> None:
    result = cli("audit", tmp_path / "missing")
    assert isinstance(result.exception, RollbackError)
    assert cli("audit").exit_code == 2


def test_an_attempt_that_the_ranks_refused_is_not_called_finished(run: RecordedRun) -> None:
    run.tell(60, AttemptStarted(command=("torchrun", "train.py"), host="h", pid=1), 2)
    cause = "the ranks refused to go on: the journal cannot be opened"
    run.tell(62, AttemptEnded(status=0, cause=cause, step=None, seconds=2.0), 2)
    run.tell(62, RunEnded(exit_code=74, reason="the journal cannot be opened"), 2)
    audit = audit_of(run)
    assert (audit.attempts[1].ended, audit.attempts[1].cause) == ("stopped", cause)
    assert f"the ranks never agreed where to begin; stopped: {cause}" in text_of(audit, width=200)
