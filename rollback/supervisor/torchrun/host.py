"""Attempts on this host. When an attempt ends, every process of it is gone before anything else happens."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rollback.checkpoints.fast_tier import end_marks
from rollback.config import settings_as_environment
from rollback.environment import (
    ENV_APART,
    ENV_ATTEMPT,
    ENV_HEARTBEATS,
    ENV_HOST,
    ENV_PRELOAD,
    ENV_REFUSAL,
    ENV_RUN,
    ENV_SUPERVISOR,
    ENV_TORCHRUN,
    guard_mark,
)
from rollback.instructions import Instructions
from rollback.rundir.heartbeat_board import HeartbeatBoard, board_if_possible
from rollback.rundir.heartbeats import Heartbeat, read_heartbeats
from rollback.rundir.paths import RunPaths
from rollback.supervisor.diagnosis.evidence import unrecorded_by
from rollback.supervisor.diagnosis.hang import GONE
from rollback.supervisor.diagnosis.memory import OomCounters
from rollback.supervisor.diagnosis.outcome import Failures, HostOutcome, Refusal
from rollback.supervisor.diagnosis.stacks import take_stacks
from rollback.supervisor.last_snapshot import ask_for_last_snapshot, forget_last_snapshot, last_snapshot_on_host
from rollback.supervisor.torchrun.command import (
    LARGE_COPIES,
    LaunchOptions,
    NodeGroup,
    threads_of_ranks,
    torchrun_command,
)
from rollback.supervisor.torchrun.output import Audience, Output
from rollback.supervisor.torchrun.processes import (
    THIS_HOST,
    become_subreaper,
    dead_ranks,
    descendants,
    end_all,
    leftovers,
    living_ranks,
    ranks_of,
    reap,
    send,
    start,
    until_ended,
)
from rollback.supervisor.torchrun.standby import Standby
from rollback.supervisor.torchrun.start_conditions import conditions_of
from rollback.system.processes import name_process, state_of, ticks_computed
from rollback.system.small_json import sound_model

# After an attempt: remaining ranks have lost their peers and have nothing to save.
_GONE, _SPEAKER = 1.0, 5.0  # seconds for ranks to be gone, and for torchrun to see it and have somebody speak for them
_PATIENCE = 2.0
# Ranks of a killed supervisor find out by themselves that it is gone, which takes them a few seconds.
_PATIENCE_WITH_LEFTOVERS = 5.0
_ACCOUNT = 1 << 20  # bytes of what rank 0 or torchrun's process tells of an end


class Running:
    """torchrun on this host, and the ranks that it started here."""

    def __init__(
        self,
        paths: RunPaths,
        attempt: int,
        command: tuple[str, ...],
        torchrun: subprocess.Popen[bytes],
        board: HeartbeatBoard | None,
        node: str | None,
    ):
        self._paths, self._node, self._board = paths, node, board
        self._torchrun = torchrun
        self._told: set[tuple[psutil.Process, signal.Signals]] = set()
        self._memory = OomCounters()
        self._memory.watch()
        self._states: dict[int, str] = {}
        """Of the ranks, as they were last looked at."""
        self._computed: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self.hopeless = False
        self.killed = False
        """Whether torchrun was ended here. The ranks were asked for a last snapshot before that, where they were to."""
        self.ended_ranks: Collection[int] = ()
        """Those that were ended so that somebody can speak for this host."""
        self.attempt = attempt
        self.command = command
        self.pid = torchrun.pid

    def poll(self) -> int | None:
        """torchrun's status; None while it runs."""
        return self._torchrun.poll()

    def await_end(self, seconds: float) -> None:
        """Wait until torchrun ends, or for so many seconds."""
        try:
            process = os.pidfd_open(self.pid)
        except OSError:  # its status has been read, or there is no descriptor left
            time.sleep(seconds)
            return
        ends = select.poll()
        ends.register(process, select.POLLIN)
        ends.poll(seconds * 1000)
        os.close(process)

    def stopped(self) -> tuple[int, ...]:
        """The ranks that were SIGSTOPped when they were last looked at."""
        return tuple(sorted(rank for rank, state in self._states.items() if state in ("T", "t")))

    def oom_struck(self) -> bool:
        """Whether the kernel's OOM killer has struck in the memory cgroups of this host's ranks."""
        return self._memory.kills() > 0

    def torchrun_oom_killed(self) -> bool:
        """Whether that may be what ended torchrun."""
        return self.oom_struck() and self.poll() == -signal.SIGKILL and not self.killed

    def tell_ranks_to_stop(self, signals: Iterable[signal.Signals], *, guarded: bool) -> bool:
        """Tell each rank on this host to stop, once. False: no rank exists yet. Ranks that have left already count as
        told: they knew before the supervisor did, from other ranks or from a request, and torchrun ends by itself.

        Ranks with a guard get SIGTERM. Ranks of a script without a guard get all signals that came, as from torchrun.
        torchrun itself does not obey SIGTERM; it learns that ranks which end now were told to stop.
        """
        beats = self.beats()
        told = {(rank, signal.SIGTERM) for rank in living_ranks(beats, self._paths).values()}
        try:
            if not guarded:
                told |= {(process, number) for process in ranks_of(self.pid) for number in signals}
            new = told - self._told
            if new and not guarded:
                self._torchrun.send_signal(signal.SIGTERM)
            for process, number in new:
                send([process], number)
                self._told.add((process, number))
        except OSError:  # no descriptor is free to look at them: who was not told yet is told at the next call
            return True
        return bool(self._told or beats)

    def beats(self) -> dict[int, Heartbeat]:
        """The heartbeats of this host's ranks in this attempt: from memory, and from the run directory those of ranks
        that could not open the board.

        Of a job on many nodes all ranks have files there. To read them a second on each host is too much for any shared
        disk, so there the board alone counts, where there is one.
        """
        beats, many = self.beats_in_memory(), self._node is not None
        if many and self._board is not None:
            return beats
        found = read_heartbeats(self._paths.ranks)
        mine = {rank: beat for rank, beat in found.items() if not many or beat.host == THIS_HOST}
        return {rank: beat for rank, beat in mine.items() if beat.attempt == self.attempt} | beats

    def beats_in_memory(self) -> dict[int, Heartbeat]:
        """The heartbeats on the board, which needs no disk."""
        beats = self._board.read() if self._board is not None else {}
        return {rank: beat for rank, beat in beats.items() if beat.attempt == self.attempt}

    def computing(self) -> set[int]:
        """The ranks of this host (as `look` found them) that have used the processor since the last call."""
        before = self._computed
        ticks = {rank: ticks_computed(pid) for rank, pid in self._pids.items()}
        self._computed = {rank: count for rank, count in ticks.items() if count is not None}
        return {rank for rank, count in self._computed.items() if count > before.get(rank, count)}

    def look(self) -> dict[int, str]:
        """The states of this host's ranks as in /proc (`T`: stopped), by rank. They are kept for `left`.

        A rank that has died has the state `GONE`. This state is not kept: a stopped rank that was killed counts as
        stopped.
        """
        beats = self.beats()
        ranks = living_ranks(beats, self._paths)
        self._pids = {rank: process.pid for rank, process in ranks.items()}
        self._memory.watch(process.pid for process in ranks.values())
        found = {rank: state for rank, process in ranks.items() if (state := state_of(process.pid)) is not None}
        self._states.update(found)
        return dict.fromkeys(dead_ranks(beats), GONE) | found

    def take_stacks(self) -> tuple[int, ...]:
        """Make this host's ranks write their stacks. Returns the ranks that did. Raises OSError."""
        return take_stacks(self._paths, self.attempt, living_ranks(self.beats(), self._paths), self._node)

    def kill(self, last: bytes | None = end_marks.ATTEMPT_ENDS, *, hopeless: bool = False) -> int:
        """End torchrun. Returns its status. The ranks end with the attempt, without SIGTERM if `hopeless`.

        last: why they are asked for a last snapshot first, of `end_marks.REASONS`; None: end it at once.
        """
        self.hopeless, self.killed = hopeless, True
        if last is not None:
            stopped = [rank for rank, state in self.look().items() if state == "T"]  # a debugger's stop is a short one
            if not ask_for_last_snapshot(self._paths, self.attempt, last, stopped):
                ranks = living_ranks(self.beats(), self._paths)
                self.ended_ranks = ranks.keys()
                with contextlib.suppress(OSError):  # no descriptor is free to look at them: they end with the attempt
                    send(ranks.values(), signal.SIGKILL)
                    psutil.wait_procs(ranks.values(), timeout=_GONE)
                # Now torchrun has somebody speak for this host.
                ask_for_last_snapshot(self._paths, self.attempt, last, begins_within=_SPEAKER)
        self._torchrun.kill()
        return self._torchrun.wait()


class Host:
    """Runs attempts here, one at a time.

    environment: the supervisor's. private: a directory outside the run for messages of ranks and torchrun. audience:
    gets the output of the ranks. node: the name of this node, where there are many. Call `close` at the end.
    """

    def __init__(
        self, options: LaunchOptions, environment: Mapping[str, str], private: Path, audience: Audience,
        node: str | None = None,
    ) -> None:  # fmt: skip
        self._options, self._environment, self._private, self._node = options, environment, private, node
        self._paths, self._job = options.paths, options.job
        self._guarded, self._started, self._audience = options.expects_guard, 0, audience
        self._run_id = str(uuid.uuid4())
        self._supervisor = name_process(os.getpid())  # once: to look needs a descriptor, which may lack later
        self._standby = Standby()
        self._standby_of: int | None = None  # the attempt in which it was started
        self._meeting: Callable[[], list[psutil.Process]] | None = None
        self._board = board_if_possible()
        self._refusal = private / "refusal.json"
        self._failures = private / "failures.json"
        self.output = Output(
            private,
            self._paths.attempt_logs,
            audience,
            lambda: self.guarded,
            # Not `Path.exists`, which raises where a disk fails: the thread that asks empties the ranks' pipes.
            lambda attempt, rank: os.path.exists(self._paths.failure(attempt, rank)),
        )
        become_subreaper()
        self._before_us = descendants()

    @property
    def guarded(self) -> bool:
        """Whether the script is known to have a guard: it has made one here, the run directory holds a run, or the
        order is about a guard."""
        signs = guard_mark(self._refusal), self._paths.identity
        self._guarded = self._guarded or any(map(os.path.exists, signs))
        return self._guarded

    def end_leftovers(self, say: Callable[[str], None]) -> None:
        """End the processes that a killed supervisor left on this host. Call it while holding the run directory."""

        def end() -> None:
            if remains := leftovers(self._paths):
                say(f"ending {len(remains)} processes that an earlier supervisor left behind")
                end_all(lambda: leftovers(self._paths), patience=_PATIENCE_WITH_LEFTOVERS)

        until_ended(end, say)

    @contextmanager
    def attempt(self, number: int, group: NodeGroup | None = None) -> Iterator[Running]:
        """torchrun runs inside the `with` block; after it, every process that torchrun started on this host is gone.

        group: the nodes of the attempt, where the job's flags do not say so. Raises RollbackError where a process
        cannot be ended.
        """
        with contextlib.suppress(OSError):  # somebody has emptied /tmp since the last attempt
            self._private.mkdir(0o700)
        self._refusal.unlink(missing_ok=True)
        self._failures.unlink(missing_ok=True)
        if self._meeting is not None:  # who leads after a lost leader counts from an older record
            for former in (self._paths.failures(number), self._paths.stacks(number)):
                shutil.rmtree(former, ignore_errors=True)
            forget_last_snapshot(self._paths, number)
        environment = self._rank_environment(number)
        if self._board is not None:
            self._board.clear()
        self._started += 1
        with self.output.of_attempt(number, self._job) as output:
            command = torchrun_command(output.job, group)
            streams = output.stdout, output.stderr
            torchrun = self._standby.take(command, environment, *streams) or start(
                command, environment, self._audience.say, *streams
            )
            running = Running(self._paths, number, tuple(command), torchrun, self._board, self._node)
            try:
                yield running
            finally:
                # Also when we fail ourselves: nothing that we started may go on writing to the run directory.
                torchrun.kill()
                torchrun.wait()
                try:
                    if not running.killed:  # torchrun is gone, and so is who would speak for ranks that do not answer
                        ask_for_last_snapshot(self._paths, number, end_marks.ATTEMPT_ENDS)
                finally:
                    patience = 0.0 if running.hopeless else _PATIENCE
                    until_ended(partial(self._end_processes, patience), self._audience.say)

    def _end_processes(self, patience: float) -> None:
        """End what torchrun has started, for `patience` seconds by SIGTERM."""
        others = [*self._before_us, *(self._meeting() if self._meeting else ())]
        end_all(lambda: descendants(apart_from=[*others, *self._standby.waiting]), patience=patience)
        reap(apart_from=[*others, *self._standby.waiting])

    def _rank_environment(self, attempt: int) -> dict[str, str]:
        """The environment of torchrun, which passes it on to all ranks."""
        options = self._options
        instructions = Instructions(
            os.getpid(), str(self._refusal), str(self._failures), str(guard_mark(self._refusal)), self._run_id,
            self._started, options.grace,
        )  # fmt: skip
        return {
            **LARGE_COPIES,
            **self._environment,
            **(threads_of_ranks(self._job, self._environment) if options.preload else {}),
            ENV_HOST: THIS_HOST,
            ENV_RUN: self._paths.address,  # a script may change its working directory
            ENV_ATTEMPT: str(attempt),
            **settings_as_environment(options.settings),
            ENV_SUPERVISOR: self._supervisor,
            ENV_HEARTBEATS: self._board.path if self._board is not None else "",
            ENV_REFUSAL: instructions.refusal,
            ENV_TORCHRUN: json.dumps(asdict(instructions)),
            **({ENV_PRELOAD: "1"} if options.preload else {}),
            **({ENV_APART: "1"} if self._meeting is not None else {}),
        }

    def stay_apart(self, meeting: Callable[[], list[psutil.Process]]) -> None:
        """Every host has a run directory of its own. meeting: the process by which they meet; it outlives attempts."""
        self._meeting = meeting

    def conditions(self, salt: str) -> dict[str, Any]:
        """The conditions of a start now: fields of `AttemptStarted`. salt: the run's."""
        return conditions_of(self._job, self._environment, salt)

    def keep_standby(self, attempt: int) -> None:
        """Keep a torchrun process for the next attempt ready, its imports done. Call it once the present attempt
        trains, here or on other nodes.

        It is started once in an attempt: what has ended one (no memory, an import that fails) would end the next one.
        """
        if self._options.preload and self._standby_of != attempt and not self._standby.waiting:
            self._standby_of = attempt
            self._standby.prepare(self._rank_environment(attempt))

    def close(self) -> None:
        """The last attempt is over."""
        self.output.release()
        self._standby.drop()
        if self._board is not None:
            self._board.close()

    def left(self, status: int, running: Running) -> HostOutcome:
        """What the attempt that has just ended left on this host. status: torchrun's."""
        failures = sound_model(self._failures, Failures, _ACCOUNT)
        return HostOutcome(
            status=status,
            guarded=self.guarded,
            refusal=sound_model(self._refusal, Refusal, _ACCOUNT),  # who wrote it may have been killed meanwhile
            failures=failures.with_ended(running.ended_ranks) if failures is not None else None,
            stopped=running.stopped(),
            oom_hosts=(THIS_HOST,) if running.oom_struck() else (),
            torchrun_oom_killed=running.torchrun_oom_killed(),
            kept=last_snapshot_on_host(self._paths, running.attempt),
            unrecorded=unrecorded_by(running.beats_in_memory()),
        )
