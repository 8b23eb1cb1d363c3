"""The operator's commands on run directories as a run would leave them: refusals, hand-ins, answers, exit codes."""

import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from checkpoints import write_checkpoint
from recorded_run import RecordedRun, attached
from rollback.cli import app
from rollback.control import asking
from rollback.errors import JournalDamaged, RunDirectoryError, UsageError, reporting
from rollback.facts.training import Answered, Drained, Finished, Window
from rollback.inspect.status.status import read_status
from rollback.rundir import requests
from rollback.rundir.heartbeats import Heartbeat, write_heartbeat
from rollback.rundir.paths import FORMAT, RunPaths
from rollback.rundir.requests import Inbox, Request, names, read_request
from rollback.system.processes import start_of


def live(run: RecordedRun) -> None:
    """Heartbeat of this very process: the run seems to be running, at step 36."""
    run.paths.ranks.mkdir(exist_ok=True)
    beat = Heartbeat(
        pid=os.getpid(), host=socket.gethostname(), attempt=1, step=36, batch=72, doing="training",
        monotonic=time.monotonic(), start=start_of(os.getpid()) or "",
    )  # fmt: skip
    write_heartbeat(run.paths.heartbeat(0), beat)


C20, C30 = "c000001-s00000020", "c000002-s00000030"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """A live run at step 36 with two batches a step; checkpoints of step 20, which is good, and of step 30."""
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    for seq, step in ((1, 20), (2, 30)):
        write_checkpoint(run.paths, seq, step)
        run.commit(step, f"c{seq:06d}-s{step:08d}", step, good=step == 20)
    live(run)
    return run


def dead(run: RecordedRun) -> None:
    run.paths.heartbeat(0).unlink()


def ask(run: RecordedRun, *arguments: str) -> Result:
    return CliRunner().invoke(app, [arguments[0], str(run.paths.root), *arguments[1:]], catch_exceptions=True)


def refusal(result: Result) -> str:
    assert result.exception is not None
    return f"{result.exception}"


def answering(run: RecordedRun, carried_out: bool) -> threading.Thread:
    """The ranks: they answer the first request that they see."""

    def answer() -> None:
        deadline = time.monotonic() + 30
        while not names(run.paths) and time.monotonic() < deadline:
            time.sleep(0.01)
        (name,) = names(run.paths)
        run.tell(40, Answered(request=name, carried_out=carried_out, text="that is done" if carried_out else "no"))

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize(("carried_out", "code"), [(True, 0), (False, 1)])
def test_the_command_waits_for_the_answer_and_says_it(run: RecordedRun, carried_out: bool, code: int) -> None:
    thread = answering(run, carried_out)
    result = ask(run, "rewind", "--to", "33", "--skip", "60:65", "--why", "a hunch", "--json")
    thread.join()
    assert result.exit_code == code
    reply = json.loads(result.stdout)
    assert (reply["schema"], reply["state"]) == (1, "carried_out" if carried_out else "refused")
    assert f"{C30}, of step 30; it is only a candidate" in result.stderr
    (name,) = names(run.paths)
    request = read_request(run.paths, name)
    assert (request.to, request.skip, request.why) == (33, Window(first=60, last=65), "a hunch")
    assert request.who.endswith(f"@{socket.gethostname()}")


def test_where_a_rewind_lands_is_said_before_it_is_handed_in(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(paths: RunPaths, request: Request) -> str:
        raise RunDirectoryError("there is no room")

    monkeypatch.setattr(requests, "submit", refuse)
    result = ask(run, "rewind", "--to", "33")
    assert refusal(result) == "there is no room"
    assert f"the newest checkpoint at or before step 33 is {C30}, of step 30" in result.stderr


def test_a_request_that_nobody_answers_in_time_stays(run: RecordedRun) -> None:
    result = ask(run, "skip", "80:90", "--timeout", "0.2", "--who", "bob")
    assert result.exit_code == 1
    assert "not carried out within 0.2 s" in result.stderr
    assert "skip batches 80:90 (bob)" in read_status(run.paths.root).requests


def test_without_waiting(run: RecordedRun) -> None:
    assert ask(run, "stop", "--no-wait").exit_code == 0
    assert ask(run, "rewind", "--to", "20", "--no-wait").exit_code == 0
    assert [read_request(run.paths, name).order for name in names(run.paths)] == ["stop", "rewind"]


def test_what_the_memory_of_another_host_may_hold_is_not_refused_from_here(run: RecordedRun) -> None:
    run.paths.fast_pointer.write_text(json.dumps({"format": FORMAT, "directory": "/elsewhere"}))
    result = ask(run, "rewind", "--to", "19", "--no-wait")
    assert result.exit_code == 0
    assert "no checkpoint at or before step 19 can be seen from this host" in result.stderr
    assert "may have a newer one in memory" in ask(run, "rewind", "--to", "25", "--no-wait").stderr
    dead(run)
    assert "the oldest one is of step 20" in refusal(ask(run, "rewind", "--to", "19"))


def test_what_is_only_at_the_url_may_be_gone_back_to(run: RecordedRun) -> None:
    ten, place = "c000000-s00000010", "s3://bucket/run"
    run.tell(0.0, attached(None, 0).model_copy(update={"settings": {"ring": place}}))
    run.commit(0.0, ten, 10)
    assert "the oldest one is of step 20" in refusal(ask(run, "rewind", "--to", "15"))
    run.tell(0.0, Drained(checkpoint=ten, step=10, place=place, bytes=1, seconds=0.0))
    result = ask(run, "rewind", "--to", "15", "--no-wait")
    assert result.exit_code == 0
    assert f"{ten}, of step 10" in result.stderr
    assert "begins with batch 20" in refusal(ask(run, "rewind", "--to", "15", "--skip", "3:8"))


def test_a_run_that_is_not_running_is_told_at_its_next_start(run: RecordedRun) -> None:
    dead(run)
    result = ask(run, "rewind", "--to", "25")
    assert result.exit_code == 0
    assert "when the run is started again" in result.stderr
    assert C20 in result.stderr
    assert "candidate" not in result.stderr


def test_a_stop_that_is_not_waited_for_any_longer_is_promised_to_nobody(run: RecordedRun) -> None:
    """Of a copied directory no rank may ever look. Any other order is carried out by the next start."""
    result = ask(run, "stop", "--timeout", "0")
    assert result.exit_code == 1
    assert "stop if they see it yet; a later start is not stopped by it" in result.stderr.replace("\n", " ")
    assert "it stays on record until it is" in ask(run, "skip", "80:90", "--timeout", "0").stderr.replace("\n", " ")


def test_a_job_that_dies_before_it_answers(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_LOOK_FOR_LIFE", 0.05)
    asked = asking.skip_request(run.paths.root, Window(first=80, last=90), "bob", "").hand_in()
    dead(run)
    reply = asking.wait_for_answer(asked, 30)
    assert (reply.state, reply.exit_code) == ("open", 1)
    assert "the job is gone; it will be carried out when the run is started again" in reply.text


@pytest.mark.parametrize("what", ["journal", "status"])
def test_a_disk_that_refuses_for_a_moment_does_not_end_the_waiting(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(asking, "_LOOK_FOR_LIFE", 0.05)
    reader, refusals = {"journal": "_answer", "status": "read_status"}[what], [5, 5]
    sound = getattr(asking, reader)

    def read(asked: object) -> object:
        if refusals:
            with reporting(RunDirectoryError, "reading the record"):
                raise OSError(refusals.pop(), "I/O error")
        run.tell(40, Answered(request=name, carried_out=True, text="that is done"))
        return sound(asked)

    asked = asking.skip_request(run.paths.root, Window(first=80, last=90), "bob", "").hand_in()
    name = asked.name
    monkeypatch.setattr(asking, reader, read)
    if what == "journal":
        given_up = asking.wait_for_answer(asked, 0)
        assert (given_up.state, given_up.exit_code) == ("open", 1)
        assert given_up.text.startswith(
            "whether it was carried out within 0 s cannot be seen: reading the record: I/O error; "
        )
    reply = asking.wait_for_answer(asked, 30)
    assert (reply.state, reply.text, refusals) == ("carried_out", "that is done", [])


def test_what_is_damaged_ends_the_waiting(run: RecordedRun) -> None:
    asked = asking.skip_request(run.paths.root, Window(first=80, last=90), "bob", "").hand_in()
    run.paths.train_journal.write_bytes(b"not\na journal\n")
    with pytest.raises(JournalDamaged):
        asking.wait_for_answer(asked, 30)


def test_a_stop_of_a_job_that_has_no_ranks_left_is_carried_out_when_it_ends(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a lost host: its supervisor ends with that, and nobody writes an answer."""
    monkeypatch.setattr(asking, "_LOOK_FOR_LIFE", 0.05)
    asked = asking.stop_request(run.paths.root, "bob", "").hand_in()
    dead(run)
    reply = asking.wait_for_answer(asked, 30)
    assert (reply.state, reply.exit_code) == ("carried_out", 0)
    assert "the job has ended" in reply.text


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["rewind", "--to", "37"], 2, "it is at step 36"),
        (["rewind", "--to", "19"], 65, "the oldest one is of step 20"),
        (["rewind", "--to", "33", "--skip", "10:59"], 2, "begins with batch 60"),
        (["rewind", "--to", "33", "--skip", "9"], 2, "is not a range of batches"),
        (["skip", "10:71"], 2, "the run is at batch 72"),
        (["skip", "9:5"], 2, "is not a range of batches"),
        (["skip"], 2, "name either batches or samples"),
        (["skip", "80:90", "--sample", "3"], 2, "name either batches or samples"),
        (["skip", "80:90", "--release"], 2, "--release takes samples in again"),
        (["skip", "80:90", "--why", "\x1b[2J"], 2, "who or why has characters that cannot be printed"),
        (["skip", "80:90", "--who", "x" * 201], 2, "--who: String should have at most 200 characters"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_what_makes_no_sense_now_is_refused_before_it_is_handed_in(
    run: RecordedRun, arguments: list[str], code: int, text: str
) -> None:
    result = ask(run, *arguments)
    assert text in refusal(result)
    assert getattr(result.exception, "exit_code", None) == code
    assert not run.paths.requests.exists() or not names(run.paths)


def test_a_stop_of_what_does_not_run_and_anything_of_what_has_ended_is_refused(run: RecordedRun) -> None:
    dead(run)
    assert "nothing to stop" in refusal(ask(run, "stop"))
    run.tell(50, Finished(step=40, batch=80))
    for order in (["rewind", "--to", "25"], ["skip", "90:91"], ["stop"]):
        assert "has ended: training is finished at step 40" in refusal(ask(run, *order))


def test_a_job_that_goes_on_from_its_newest_checkpoint_may_skip_what_it_would_do_again(run: RecordedRun) -> None:
    dead(run)
    assert "the run is at batch 60" in refusal(ask(run, "skip", "10:59"))
    assert ask(run, "skip", "62:65").exit_code == 0


# --- the directory ----------------------------------------------------------------------------------------------------


def request(**fields: Any) -> Request:
    return Request.model_validate({"order": "rewind", "to": 3, "who": "x", "at": "now", **fields})


def test_requests_of_many_at_once_overwrite_none(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    threads = [threading.Thread(target=requests.submit, args=(paths, request(to=n))) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_request(paths, name).to or 0 for name in names(paths)) == list(range(16))
    assert {path.suffix for path in paths.requests.iterdir()} == {".json"}


def test_requests_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    handed_in = [requests.submit(paths, request(to=n)) for n in range(12)]
    assert names(paths) == handed_in


def test_a_request_that_nobody_would_see_among_very_many_files_is_refused(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_FILES", 3)
    live(run)
    for batch in (90, 92, 94):
        assert CliRunner().invoke(app, ["skip", str(run.paths.root), f"{batch}:{batch}", "--no-wait"]).exit_code == 0
    refused = CliRunner().invoke(app, ["stop", str(run.paths.root), "--no-wait"])
    assert "has 3 files or more, and no further one would be seen by the ranks" in str(refused.exception)
    assert len(names(run.paths)) == len(list(run.paths.requests.iterdir())) == 3


def test_an_inbox_sees_what_comes_within_one_tick_of_the_directory_s_clock(tmp_path: Path) -> None:
    paths, now = RunPaths(tmp_path), 0.0
    inbox = Inbox(paths, (), clock=lambda: now)
    assert inbox.open() == []
    first = requests.submit(paths, request())
    assert inbox.open() == [], "it looks again before its time"
    now = 1.0
    assert inbox.open() == [first]
    stamp = os.stat(paths.requests).st_mtime_ns
    second = requests.submit(paths, request())
    os.utime(paths.requests, ns=(stamp, stamp))
    now = 1.5
    assert inbox.open() == [first, second]
    inbox.note_answer(first)
    now = 60.0
    assert inbox.open() == [second]


@given(st.binary(max_size=300) | st.text().map(str.encode))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        paths.requests.mkdir()
        paths.request("000000-00000000").write_bytes(data)
        with contextlib.suppress(ValueError):
            read_request(paths, "000000-00000000")


def test_a_run_that_died_before_it_began_is_told_to_be_started_and_not_waited_for(run: RecordedRun) -> None:
    run.paths.identity.unlink()
    assert "has not begun yet" in refusal(ask(run, "skip", "80:90"))
    dead(run)
    assert "has a record of a run but no run.json" in refusal(ask(run, "skip", "80:90")), "it was removed"
    run.paths.train_journal.rename(run.paths.supervisor_journal)
    run.paths.supervisor_journal.write_bytes(b"")
    shutil.rmtree(run.paths.ring, ignore_errors=True)
    result = ask(run, "skip", "80:90")
    assert "has never begun" in refusal(result)
    assert isinstance(result.exception, UsageError)
    assert "start it" in (result.exception.hint or "")
    assert names(run.paths) == []
