"""Looks for a hang while an attempt runs, and takes the stacks before everything is ended."""

import time

from rollback.facts.training import Hung, StuckAtExit
from rollback.rundir.failures import in_order_of_blame, merely_noticed, read_failures
from rollback.rundir.paths import RunPaths
from rollback.supervisor.diagnosis.hang import GONE, HangDetector, HangLimits, suspect
from rollback.supervisor.nodes.nodes import Nodes
from rollback.supervisor.torchrun.host import Running

_EVERY = 1.0


class HangWatcher:
    """Reads heartbeats about once a second, however often `look` is called."""

    def __init__(self, paths: RunPaths, limits: HangLimits, running: Running, nodes: Nodes) -> None:
        self._paths, self._running, self._nodes = paths, running, nodes
        self._detector = HangDetector(limits, time.monotonic(), nodes.lag)
        self._next = 0.0

    @property
    def trains(self) -> bool:
        """Whether the attempt has done a step."""
        return self._detector.trains

    def look(self) -> Hung | StuckAtExit | None:
        """The hang, if the ranks hang now: their stacks are on disk then, where they could be taken. Or the fact that
        all ranks have completed their work and do not exit."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + _EVERY
        attempt = self._running.attempt
        far = self._nodes.beats()
        told = self._running.beats_in_memory() | far
        beats = self._running.beats() | told
        here = self._running.look()
        untold = self._running.computing() - {*told}
        states = self._nodes.states() | here
        silence = self._detector.look(now, beats, untold, far)
        if (silent := self._detector.stuck_at_exit(now)) is not None:
            return StuckAtExit(ranks=tuple(sorted(here)), silent=round(silent, 3))
        if silence is None:
            return None
        records = in_order_of_blame(read_failures(self._paths.failures(attempt)).values())
        raised = {record.rank: record.error for record in records if not merely_noticed(record)}
        suspicion = suspect(self._detector.beats, states, raised, silence.mute)
        reason = suspicion.reason
        if silence.stalled:
            reason = f"Python code runs, but no batch was finished; {reason}"
        try:
            stacks = self._nodes.take_stacks(self._running.take_stacks)
        except OSError as error:
            stacks, reason = (), f"{reason} (stacks could not be taken: {error})"
        return Hung(
            suspect=suspicion.rank, reason=reason, silent=round(silence.silent, 3), limit=silence.limit, stacks=stacks,
            raised=tuple(sorted(raised)), died=tuple(sorted(rank for rank, state in states.items() if state == GONE)),
        )  # fmt: skip
