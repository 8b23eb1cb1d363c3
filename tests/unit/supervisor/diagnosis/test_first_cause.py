"""From evidence to class and first cause: every row of the table of rollback.supervisor.diagnosis.first_cause."""

import signal
from dataclasses import replace
from typing import get_args

import pytest

from rollback.errors import RunDoesNotFit
from rollback.facts.ending import SCRIPT_LEFT
from rollback.facts.supervisor import Why
from rollback.facts.training import Finished, Hung, Stopped, Window
from rollback.rundir.failures import FailureRecord, merely_noticed
from rollback.rundir.heartbeats import Heartbeat
from rollback.supervisor.diagnosis.first_cause import RankEnd, cause, first_cause, why_of
from rollback.supervisor.diagnosis.outcome import AttemptEvidence, Failures, HostOutcome, RankFailure, Refusal

PREEMPTED = Stopped(reason="preempted", step=3, batch=3, checkpoint=None, account="saved")


def evidence(
    status: int = 1, *, told: bool = False, hung: Hung | None = None, error: str | None = None
) -> AttemptEvidence:
    failures = Failures(error=error, failures=()) if error else None
    return AttemptEvidence(
        left=HostOutcome(status=status, failures=failures),
        told_to_stop=told,
        attached=True,
        stopped=None,
        step=None,
        hung=hung,
    )


def failure(rank: int, exitcode: int, message: str | None = None, *, ended: bool = False, at: int = 5) -> RankFailure:
    return RankFailure(rank=rank, pid=10 + rank, exitcode=exitcode, message=message, ended=ended, at=at)


def record(rank: int, error: str, message: str, *, at: float = 5.0) -> FailureRecord:
    return FailureRecord(
        rank=rank, pid=10 + rank, host="h", attempt=1, at="", seconds=at, step=7, batch=9,
        whole_step=Window(first=9, last=9), doing="training", error=error, message=message, traceback="", frames=[],
        fingerprint=f"{error} {message}",
    )  # fmt: skip


def raised(rank: int, error: str, message: str, *, at: float = 5.0, oom: bool = False) -> RankEnd:
    return RankEnd(rank, failure(rank, 1), record(rank, error, message, at=at), oom_hosts=["h"] if oom else ())


def died(rank: int, exitcode: int, *, ended: bool = False, oom: bool = False, at: int = 5) -> RankEnd:
    return RankEnd(rank, failure(rank, exitcode, ended=ended, at=at), oom_hosts=["h"] if oom else ())


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:41352"
GLOO_TIMEOUT = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"
NCCL = "NCCL communicator was aborted on rank 0."
NCCL_INTERNAL = "NCCL AllReduce failed: internal error - please report this issue to the NCCL developers"
NCCL_SYSTEM = "NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error, NCCL version 2.21.5"
CUDA_OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB"
CPU_OOM = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
WORKER = "DataLoader worker (pid 4711) is killed by signal: Killed. "
WORKERS = "DataLoader worker (pid(s) 4711, 4712) exited unexpectedly"
SAFETENSORS_FULL = "Error while serializing: I/O error: No space left on device (os error 28)"
ASSERT = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (RankEnd(0, stopped=True), "stopped"),
        (RankEnd(0, failure(0, -9, ended=True), stopped=True), "stopped"),
        (raised(0, "RuntimeError", "CUDA error: uncorrectable ECC error encountered"), "hardware"),
        (raised(0, "torch.distributed.DistBackendError", NCCL_SYSTEM), "hardware"),
        (died(0, -9, oom=True), "oom_kill"),
        (died(0, -9), "signal"),
        (died(0, -11, oom=True), "signal"),
        (died(0, -signal.SIGABRT), "aborted"),
        (died(0, -9, ended=True), None),
        (died(0, -15), None),
        (died(0, 0), None),
        (raised(0, "RuntimeError", WORKER, oom=True), "oom_kill"),
        (raised(0, "RuntimeError", WORKERS, oom=True), "oom_kill"),
        (raised(0, "RuntimeError", WORKER), "signal"),
        (raised(0, "RuntimeError", WORKER.replace("Killed", "Segmentation fault"), oom=True), "signal"),
        (raised(0, "torch.OutOfMemoryError", CUDA_OOM), "out_of_memory"),
        (raised(0, "RuntimeError", CPU_OOM), "out_of_memory"),
        (raised(0, "MemoryError", ""), "out_of_memory"),
        (raised(0, "safetensors._safetensors_rust.SafetensorError", SAFETENSORS_FULL), "disk"),
        (raised(0, "OSError", "[Errno 30] Read-only file system: 'out/checkpoint-20'"), "disk"),
        (raised(0, "ValueError", "no such sample"), "exception"),
        (raised(0, "RuntimeError", ASSERT), "exception"),
        (raised(0, "ConnectionResetError", "[Errno 104] Connection reset by peer"), "exception"),
        (raised(0, "TimeoutError", "reading sample 7 timed out"), "exception"),
        (died(0, 3), "exit"),
        (RankEnd(0, failure(0, 1, "ValueError: no such sample")), "exception"),
        (RankEnd(0, failure(0, 1, "AssertionError:")), "exception"),
        (RankEnd(0, failure(0, 1, "RuntimeError: " + GLOO)), "lost_peer"),
        (RankEnd(0, failure(0, -15, "ValueError: no such sample")), "exception"),
        (RankEnd(0, failure(0, -9, "RuntimeError: " + GLOO, ended=True)), "lost_peer"),
        (raised(0, "RuntimeError", GLOO_TIMEOUT), "timeout"),
        (raised(0, "RuntimeError", GLOO), "lost_peer"),
        (raised(0, "torch.distributed.DistBackendError", NCCL), "lost_peer"),
        (raised(0, "RuntimeError", NCCL_INTERNAL), "lost_peer"),
        (raised(0, "RuntimeError", "NCCL operation timed out"), "timeout"),
    ],
)  # fmt: skip
def test_every_row_of_the_table(end: RankEnd, expected: str | None) -> None:
    assert why_of(end) == expected


def test_the_rows_are_in_the_order_of_precedence() -> None:
    from rollback.supervisor.diagnosis import first_cause as module

    assert module.__doc__ is not None
    rows = [line.split("|")[1].strip() for line in module.__doc__.splitlines() if line.startswith("| ")][1:]
    assert rows == list(get_args(Why))[: len(rows)]


HANG = Hung(suspect=1, reason="rank 1 stands still", silent=9.0, limit=8.0, stacks=(0, 1))


@pytest.mark.parametrize(
    ("ends", "why", "rank", "followed"),
    [
        pytest.param([raised(0, "RuntimeError", GLOO, at=4), died(1, -9)], "signal", 1, (0,), id="killed"),
        pytest.param([raised(0, "RuntimeError", GLOO), died(1, -9, oom=True)], "oom_kill", 1, (0,), id="oom"),
        pytest.param(
            [raised(0, "RuntimeError", GLOO_TIMEOUT, at=4), RankEnd(1, failure(1, -9, ended=True), stopped=True)],
            "stopped", 1, (0,), id="the healthy one raises first",
        ),
        pytest.param(
            [raised(0, "RuntimeError", GLOO, at=4), raised(1, "ValueError", "bad", at=6)], "exception", 1, (0,),
            id="a peer's error is written down first",
        ),
        pytest.param(
            [raised(0, "ValueError", "bad", at=6), raised(1, "KeyError", "other", at=5)], "exception", 1, (0,),
            id="the earlier of two",
        ),
        pytest.param([raised(0, "ValueError", "bad"), died(1, -9, ended=True)], "exception", 0, (), id="torchrun"),
        pytest.param([raised(0, "ValueError", "bad", at=6), died(1, -6)], "exception", 0, (1,), id="a watchdog aborts"),
        pytest.param(
            [raised(0, "RuntimeError", GLOO), raised(1, "RuntimeError", GLOO)], "lost_peer", None, (0, 1), id="network"
        ),
        pytest.param(
            [died(0, -9, ended=True), raised(1, "RuntimeError", GLOO)], "lost_peer", None, (1,),
            id="a host is ended before its torchrun has seen that its rank was killed",
        ),
        pytest.param(
            [raised(0, "ValueError", "bad"), raised(1, "ValueError", "bad"), raised(2, "RuntimeError", GLOO)],
            "exception", 0, (2,), id="several raise the same",
        ),
    ],
)  # fmt: skip
def test_the_first_cause_and_what_followed(
    ends: list[RankEnd], why: str, rank: int | None, followed: tuple[int, ...]
) -> None:
    found = first_cause(evidence(), ends)
    assert found is not None
    assert (found.why, found.rank, found.followed) == (why, rank, followed)
    assert first_cause(evidence(), ends[::-1]) == found


def unrecorded(rank: int, error: str, *, at: int) -> RankEnd:
    """It raised before rollback could keep a record of it: torchrun has the message, and a time in whole seconds."""
    return RankEnd(rank, failure(rank, 1, f"{error}: bad", at=at))


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ([raised(0, "ValueError", "bad", at=5.5), unrecorded(1, "KeyError", at=5)], 0),
        ([raised(0, "ValueError", "bad", at=6.5), unrecorded(1, "KeyError", at=5)], 1),
        ([unrecorded(0, "ValueError", at=0), unrecorded(1, "KeyError", at=9)], 1),
    ],
    ids=["in the same second", "in a later second", "without a time"],
)
def test_the_earlier_of_two_is_known_also_where_torchrun_alone_saw_one(ends: list[RankEnd], rank: int) -> None:
    found = first_cause(evidence(), ends)
    assert found is not None
    assert found.rank == rank
    assert found.mistake == ""
    assert not found.is_behind(BEHIND)


@pytest.mark.parametrize(
    ("nodes", "told"), [(("node 1",), "node 1 was lost"), (("node 1", "node 2"), "node 1, node 2 were lost")]
)
def test_a_node_that_was_lost_is_the_cause_whatever_its_peers_raised(nodes: tuple[str, ...], told: str) -> None:
    ends = [raised(1, "ValueError", "bad"), raised(0, "RuntimeError", GLOO), RankEnd(2)]
    found = first_cause(replace(evidence(), left=HostOutcome(status=1, lost_nodes=nodes)), ends)
    assert found is not None
    assert (found.why, found.rank, found.followed, found.host) == ("node_lost", None, (0, 1), None)
    assert found.text == told


def test_the_host_of_the_first_cause_is_told_by_its_record_or_its_last_heartbeat() -> None:
    beat = Heartbeat(pid=10, host="g", attempt=1, step=30, batch=31, doing="training", monotonic=1.0)
    for end, host in (
        (raised(0, "ValueError", "bad"), "h"),
        (replace(died(0, -9), beat=beat), "g"),
        (replace(raised(0, "ValueError", "bad"), beat=beat), "h"),
        (died(0, -9), None),
    ):
        found = first_cause(evidence(), [end])
        assert found is not None
        assert found.host == host


def test_the_class_of_a_failure_comes_before_the_clocks_of_the_hosts() -> None:
    """The host of rank 1 is 90 seconds ahead."""
    ends = [
        raised(0, "builtins.RuntimeError", "Connection closed by peer [10.0.0.2]:4711", at=7.0),
        raised(1, "builtins.ValueError", "a bad sample", at=95.0),
    ]
    found = first_cause(evidence(status=1), ends)
    assert found is not None
    assert (found.rank, found.why, found.followed) == (1, "exception", (0,))


def test_a_rank_that_left_before_its_peers_lost_it_is_named() -> None:
    def left(doing: str) -> RankEnd:
        return RankEnd(1, beat=Heartbeat(pid=11, host="h", attempt=1, step=30, batch=30, doing=doing, monotonic=1.0))

    found = first_cause(evidence(), [raised(0, "RuntimeError", GLOO), left("leaving")])
    assert found is not None
    assert (found.why, found.rank, found.followed) == ("lost_peer", None, (0,))
    assert found.text.endswith("; rank 1 had left the script at step 30, without an error")
    for other in (left("training"), left("ended"), replace(left("leaving"), failure=failure(1, -9, ended=True))):
        found = first_cause(evidence(), [raised(0, "RuntimeError", GLOO), other])
        assert found is not None
        assert "left the script" not in found.text


def test_a_hang_that_was_called_is_the_cause_and_what_the_kill_left_is_not() -> None:
    found = first_cause(evidence(-9, hung=HANG), [raised(0, "RuntimeError", GLOO)])
    assert found is not None
    assert (found.why, found.rank, found.followed) == ("hang", 1, (0,))
    assert found.text == "hang: rank 1 stands still"
    stopped = first_cause(evidence(-9, hung=HANG), [RankEnd(1, stopped=True)])
    assert stopped is not None
    assert (stopped.why, stopped.rank) == ("stopped", 1)


def test_a_rank_that_raised_and_did_not_end_hangs_because_of_what_it_raised() -> None:
    after_the_kill = first_cause(evidence(-9, hung=HANG), [raised(1, "ValueError", "bad sample")])
    assert after_the_kill is not None
    assert after_the_kill.why == "hang"
    before = HANG.model_copy(update={"raised": (1,)})
    found = first_cause(evidence(-9, hung=before), [raised(1, "ValueError", "bad sample")])
    assert found is not None
    assert (found.why, found.rank) == ("exception", 1)
    assert found.text.endswith("and did not end")
    ended = HANG.model_copy(update={"raised": (1,), "died": (1,)})
    found = first_cause(evidence(-9, hung=ended), [raised(0, "RuntimeError", GLOO), raised(1, "ValueError", "bad")])
    assert found is not None
    assert (found.why, found.rank, found.followed) == ("exception", 1, (0,))
    assert found.text.endswith("and its peers did not end")


def test_a_rank_that_is_stopped_is_the_cause_also_where_its_peer_gave_up_and_did_not_end() -> None:
    hung = HANG.model_copy(update={"reason": "rank 1 is stopped (SIGSTOP)"})
    ends = [raised(0, "RuntimeError", GLOO_TIMEOUT, at=4), RankEnd(1, stopped=True)]
    found = first_cause(evidence(-9, hung=hung), ends)
    assert found is not None
    assert (found.why, found.rank, found.followed) == ("stopped", 1, (0,))
    assert merely_noticed(record(0, "RuntimeError", GLOO_TIMEOUT))
    assert not merely_noticed(record(0, "RuntimeError", "bad"))


OF_ANOTHER_JOB = f"{RunDoesNotFit.__module__}.{RunDoesNotFit.__qualname__}"


@pytest.mark.parametrize("why", ["MemoryError", "torch.OutOfMemoryError", "rollback.errors.UsageError"])
def test_memory_and_our_own_errors_blame_no_batch(why: str) -> None:
    found = first_cause(evidence(), [raised(0, why, "")])
    assert found is not None
    assert not found.may_blame_the_batch


@pytest.mark.parametrize(
    ("error", "mistake"),
    [
        ("rollback.errors.UsageError", "at a wrong call of rollback"),
        ("NameError", "with NameError"),
        ("ValueError", ""),
    ],
)
def test_what_no_restart_mends_is_told_from_what_data_may_have_done(error: str, mistake: str) -> None:
    found = first_cause(evidence(), [raised(0, error, "x")])
    assert found is not None
    assert found.mistake == mistake


def test_what_did_not_fit_a_process_that_had_gone_back_is_for_the_next_start_to_decide() -> None:
    """Where no restart is allowed, nothing has to be mended before it, and whether the job fits is not known yet."""
    there, other = (first_cause(evidence(), [raised(0, error, "x")]) for error in (OF_ANOTHER_JOB, "ValueError"))
    assert there is not None
    assert other is not None
    assert "the same command starts the script anew" in (there.next_start or "")
    assert "exit code 78" in (there.next_start or "")
    assert other.next_start is None


def test_what_an_epoch_without_a_batch_brings_about_comes_again() -> None:
    end = raised(0, "KeyError", "'loss'")
    assert end.record is not None
    found = first_cause(evidence(), [replace(end, record=end.record.model_copy(update={"empty_epoch": 3}))])
    assert found is not None
    assert found.mistake == "behind epoch 3, which had no batch"


@pytest.mark.parametrize("in_hand", [True, False])
def test_an_iterator_that_is_at_its_end_is_the_script_s_own_where_no_batch_is_in_hand(in_hand: bool) -> None:
    end = raised(0, "StopIteration", "")
    assert end.record is not None
    found = first_cause(evidence(), [replace(end, record=end.record.model_copy(update={"in_hand": in_hand}))])
    assert found is not None
    assert bool(found.mistake) is not in_hand


@pytest.mark.parametrize(
    ("step", "doing", "in_hand", "ours", "mistake"),
    [
        (0, "attached", False, False, "before the first update of the run"),
        (0, "attached", False, True, ""),
        (0, "training", True, False, "in the first update of the run"),
        (0, "training", False, False, ""),
        (3, "attached", False, False, ""),
    ],
)
def test_what_has_never_worked_in_a_run_is_the_script_s_own(
    step: int, doing: str, in_hand: bool, ours: bool, mistake: str
) -> None:
    """As an evaluation in front of the training, or what divides by the number of batches where there was none; not one
    behind the first update."""
    end = raised(0, "ZeroDivisionError", "x")
    assert end.record is not None
    update = {"step": step, "in_hand": in_hand, "ours": ours, "doing": doing}
    found = first_cause(evidence(), [replace(end, record=end.record.model_copy(update=update))])
    assert found is not None
    assert found.mistake == mistake


def test_what_a_rank_raises_by_itself_is_shown_as_the_account_and_what_it_raises_for_another_one_is_not() -> None:
    """As where all ranks fail in the first update, and another one than rank 0, whose output is shown, was first."""
    alike = [raised(0, "ValueError", "bad"), raised(1, "ValueError", "bad", at=4.0)]
    found = first_cause(evidence(), [*alike, raised(2, "RuntimeError", GLOO)])
    assert found is not None
    assert (found.rank, found.followed) == (1, (2,))
    assert [found.is_account_of(rank) for rank in (0, 1, 2)] == [True, True, False]


def test_only_an_exception_with_a_record_may_blame_its_batch() -> None:
    for end in (died(0, -9), died(0, 3), raised(0, "RuntimeError", GLOO), RankEnd(0, stopped=True)):
        found = first_cause(evidence(), [end])
        assert found is not None
        assert not found.may_blame_the_batch
    found = first_cause(evidence(), [raised(0, "ValueError", "bad sample")])
    assert found is not None
    assert found.may_blame_the_batch


class TestInWords:
    def told(self, *ends: RankEnd, **known: object) -> str:
        seen = evidence(**known)  # type: ignore[arg-type]
        return cause(seen, first_cause(seen, ends))

    def test_a_killed_rank_is_named_with_its_signal_and_those_that_torchrun_ended_are_not_blamed(self) -> None:
        found = self.told(died(2, -9), died(0, 1), died(1, -15))
        assert found == "rank 2 (pid 12) was killed by signal 9 (SIGKILL); then rank 0 failed too"

    @pytest.mark.parametrize(
        ("exitcode", "oom", "how"),
        [
            (-9, False, "was killed by signal 9 (SIGKILL)"),
            (-9, True, "was killed by signal 9 (SIGKILL): the kernel was out of memory"),
            (3, False, "exited with status 3"),
        ],
    )
    def test_ranks_that_ended_in_the_same_way_by_themselves_are_no_consequence_of_one_another(
        self, exitcode: int, oom: bool, how: str
    ) -> None:
        ends = [raised(0, "RuntimeError", GLOO), died(1, exitcode, oom=oom), died(2, exitcode, oom=oom)]
        found = first_cause(evidence(), ends)
        assert found is not None
        assert (found.rank, found.alike, found.followed) == (1, (2,), (0,))
        assert found.text == f"rank 1 (pid 11) {how}; rank 2 in the same way; then rank 0 failed too"

    def test_a_rank_that_another_signal_ended_may_have_died_of_the_first(self) -> None:
        found = self.told(died(0, -9), died(1, -11))
        assert found == "rank 0 (pid 10) was killed by signal 9 (SIGKILL); then rank 1 failed too"

    def test_a_rank_without_a_record_is_told_with_its_last_heartbeat(self) -> None:
        beat = Heartbeat(pid=10, host="h", attempt=1, step=30, batch=31, doing="reading", monotonic=1.0)
        told = "rank 0 (pid 10) was killed by signal 9 (SIGKILL), last seen reading at step 30, batch 31"
        assert self.told(replace(died(0, -9), beat=beat)) == told
        assert self.told(replace(died(0, -9), beat=beat, last_snapshot_step=30)) == told
        stale = self.told(replace(died(0, -9), beat=beat, last_snapshot_step=42))
        assert stale == "rank 0 (pid 10) was killed by signal 9 (SIGKILL)", "it was at step 42 when it died"

    def test_a_signal_without_a_name_is_told_by_its_number(self) -> None:
        assert self.told(died(0, -40)) == "rank 0 (pid 10) was killed by signal 40"

    def test_an_exception_without_a_message_is_told_by_its_name(self) -> None:
        assert (
            self.told(raised(0, "AssertionError", " \n")) == "rank 0 (pid 10) raised AssertionError at step 7, batch 9"
        )

    @pytest.mark.parametrize(
        ("others", "named"),
        [
            (1, "rank 1"),
            (2, "ranks 1, 2"),
            (4, "ranks 1, 2, 3, 4"),
            (5, "ranks 1, 2, 3, 4 and 1 more"),
            (40, "ranks 1, 2, 3, 4 and 36 more"),
        ],
    )
    def test_a_few_other_ranks_are_named_and_many_are_counted(self, others: int, named: str) -> None:
        first = "rank 0 (pid 10) raised ValueError: bad at step 7, batch 9"
        alike = [raised(rank, "ValueError", "bad") for rank in range(others + 1)]
        assert self.told(*alike) == f"{first}; {named} raised the same"
        followed = [raised(rank, "RuntimeError", GLOO) for rank in range(1, others + 1)]
        assert self.told(alike[0], *followed) == f"{first}; then {named} failed too"

    def test_an_exception_is_quoted_with_its_place(self) -> None:
        found = self.told(raised(0, "ValueError", "no such sample\nmore"))
        assert found == "rank 0 (pid 10) raised ValueError: no such sample at step 7, batch 9"

    def test_what_a_loader_worker_raised_is_found_in_the_text_that_torch_makes_of_it(self) -> None:
        text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        text += "  File x\nValueError: bad\n"
        assert self.told(raised(0, "ValueError", text)).startswith("rank 0 (pid 10) raised ValueError: bad at step 7")

    def test_the_exception_of_a_rank_is_quoted_where_only_torchrun_has_it(self) -> None:
        found = self.told(RankEnd(0, failure(0, 1, "ValueError: no such sample")))
        assert found == "rank 0 (pid 10) exited with status 1: ValueError: no such sample"

    def test_what_a_rank_raised_that_could_not_record_it_is_told_also_where_torchrun_ended_it(self) -> None:
        ends = [
            RankEnd(0, failure(0, -15, "ValueError: no such sample")),
            RankEnd(1, failure(1, 1, "RuntimeError: " + GLOO)),
        ]
        found = self.told(*ends)
        assert found == "rank 0 (pid 10) raised ValueError: no such sample; then rank 1 failed too"

    def test_what_torchrun_itself_raised_is_told(self) -> None:
        assert self.told(error="RendezvousConnectionError: no answer") == (
            "torchrun failed with RendezvousConnectionError: no answer"
        )

    def test_what_we_ended_ourselves_is_not_called_a_failure(self) -> None:
        assert self.told(status=-9, told=True) == "ended on request, before the ranks had stopped together"
        assert self.told(status=0) == self.told(status=0, told=True) == SCRIPT_LEFT
        left = first_cause(evidence(status=0), [])
        assert left is not None
        assert left.why == "left"
        done = replace(evidence(status=0), finished=Finished(step=39, batch=39))
        assert cause(done, first_cause(done, [])) == "all ranks ended"
        behind = replace(evidence(-9, told=True), finished=Finished(step=39, batch=39))
        assert cause(behind, first_cause(behind, [])) == ("ended on request, behind the training, which is complete")
        exiting = replace(evidence(1, told=True), stopped=PREEMPTED)
        late = RankEnd(0, failure(0, -15))
        assert cause(exiting, first_cause(exiting, [late])) == "ended on request, after the ranks had stopped together"

    def test_what_the_ranks_refused_is_told_and_not_that_they_ended(self) -> None:
        refused = replace(
            evidence(),
            left=HostOutcome(status=0, refusal=Refusal(exit_code=74, message="the journal cannot be opened")),
        )
        assert cause(refused, first_cause(refused, [])) == "the ranks refused to go on: the journal cannot be opened"

    def test_without_an_account_no_more_is_claimed_than_the_status_shows(self) -> None:
        assert self.told(status=-9) == "torchrun was killed by signal 9 (SIGKILL)"
        elsewhere = replace(evidence(), left=HostOutcome(status=-9, oom_hosts=("node",)))
        assert cause(elsewhere, first_cause(elsewhere, [])) == "torchrun was killed by signal 9 (SIGKILL)"
        left = HostOutcome(status=-9, oom_hosts=("node",), torchrun_oom_killed=True)
        for_memory = replace(evidence(), left=left)
        told = "torchrun was killed by signal 9 (SIGKILL) (the kernel was out of memory)"
        assert cause(for_memory, first_cause(for_memory, [])) == told
        assert self.told(status=3) == "torchrun exited with status 3 and left no account"


@pytest.mark.parametrize(("host", "why"), [("h", "oom_kill"), ("g", "signal"), (None, "oom_kill")])
def test_memory_that_another_host_lacked_killed_no_rank_here(host: str | None, why: str) -> None:
    """A rank that left no heartbeat may have been on any of them."""
    beat = Heartbeat(pid=10, host=host, attempt=1, step=3, batch=3, doing="training", monotonic=1.0) if host else None
    assert why_of(RankEnd(0, failure(0, -9), beat=beat, oom_hosts=["h"])) == why


BEHIND = Finished(step=7, batch=9, checkpoint="c000001-s00000007")


@pytest.mark.parametrize(
    ("finished", "in_hand", "error", "expected"),
    [
        (BEHIND, False, "FileNotFoundError", True),
        (BEHIND, True, "FileNotFoundError", False),  # it trains again
        (BEHIND, False, "MemoryError", False),
        (BEHIND.model_copy(update={"step": 4}), False, "FileNotFoundError", False),  # an earlier loop's end
        (BEHIND.model_copy(update={"checkpoint": None}), False, "FileNotFoundError", False),
        (None, False, "FileNotFoundError", False),
    ],
)
def test_what_a_script_raises_behind_its_training_it_would_raise_again(
    finished: Finished | None, in_hand: bool, error: str, expected: bool
) -> None:
    end = raised(0, error, "runs/plots")
    assert end.record is not None
    end = replace(end, record=end.record.model_copy(update={"in_hand": in_hand}))
    first = first_cause(evidence(), [end])
    assert first is not None
    assert first.is_behind(finished) is expected
    assert ("with no batch in hand" in first.text) is not in_hand


def test_ranks_whose_data_end_apart_are_told_so_and_that_no_restart_mends_it() -> None:
    """The shorter one sums the sizes of what it saves, the others their gradients: gloo aborts, or each waits."""
    doing = "saving at the end of the data"
    shorter = Heartbeat(pid=10, host="h", attempt=1, step=40, batch=39, doing=doing, monotonic=1.0)
    longer = raised(1, "RuntimeError", GLOO)
    assert longer.record is not None
    further = replace(longer, record=longer.record.model_copy(update={"batch": 40}))
    first = first_cause(evidence(), [replace(died(0, -signal.SIGABRT), beat=shorter), further])
    assert first is not None
    assert "the data of rank 0 had ended with batch 39, and rank 1 had more: give all ranks as many" in first.text
    assert first.mistake == "where one rank's data end and another's go on"
    noticed = first_cause(evidence(), [RankEnd(0, failure(0, -15), beat=shorter), further])
    assert noticed is not None
    assert noticed.mistake
    at_end_too = replace(longer, record=longer.record.model_copy(update={"batch": 39}))
    together = first_cause(evidence(), [replace(died(0, -signal.SIGABRT), beat=shorter), at_end_too])
    assert together is not None
    assert "had ended with batch" not in together.text
    assert not together.mistake
    for_more = Heartbeat(pid=11, host="h", attempt=1, step=40, batch=40, doing="reading", monotonic=1.0)
    waiting = first_cause(evidence(), [replace(longer, rank=0, beat=None, record=longer.record.model_copy(
        update={"rank": 0, "batch": 39, "doing": doing})), RankEnd(1, failure(1, -15), beat=for_more)])  # fmt: skip
    assert waiting is not None
    assert not waiting.mistake, "it asks whether there is more"
