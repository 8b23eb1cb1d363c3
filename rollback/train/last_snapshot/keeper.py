"""Keeping: the ranks that live agree on a step's end that they hold, and one of each host writes its state. A rank
stands at the end of a step for as long as nothing behind it has begun to change the state."""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rollback.checkpoints.fast_tier import last_locks, last_snapshot_result
from rollback.checkpoints.fast_tier.end_marks import RANK_ENDS, RANK_ENDS_ELSEWHERE, StepEnd
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.checkpoints.format.manifest import Manifest
from rollback.train.last_snapshot.device import TensorReader
from rollback.train.last_snapshot.exchange import Exchange, keep_together
from rollback.train.last_snapshot.host_proxy import speaking_for_lost_hosts
from rollback.train.last_snapshot.hosts import Hosts
from rollback.train.last_snapshot.membership import Membership
from rollback.train.last_snapshot.peers import POLL, HostMarks
from rollback.train.last_snapshot.proof import NotProved, why_not
from rollback.train.last_snapshot.small_state import SharedState
from rollback.train.last_snapshot.writers import (
    JudgedAhead,
    StateWriter,
    combined_digest,
    digest_of_large_state,
    digests_of_parameters,
    versions_of,
)
from rollback.train.run import AttachedRun
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.state import TrainingState
from rollback.wording import gone_in_words, ranks_in_words

_SETTLE = 2.0  # seconds for ranks that still live to come to the end of the step that they are in
_PATIENCE = 30.0  # for all of it: as long as torchrun gives its ranks
_AMONG_HOSTS = _PATIENCE - 2.0  # the rest is for the other ranks of a host when the hosts could not agree
_LEAST_WAIT = 0.5  # for the digests of the others


class StandingEnd(NamedTuple):
    """A step's end, and how much had begun to change the state until then."""

    end: StepEnd
    changes: int
    versions: int
    small: SharedState
    digest: int | None
    """Of the parameters and the optimizer's tensors, where a script may write to them and torch does not count it:
    in an attempt's first steps, and in the work between two epochs. None: not needed."""


class CommonEnd(NamedTuple):
    """A step's end at which this rank stands and of which all ranks of its host have told."""

    standing: StandingEnd
    marks: HostMarks


class StandingEnds:
    """The ends whose state this rank holds, newest first: more than one behind an epoch's last step, before and behind
    the work between two epochs. The main thread adds and counts; any thread asks."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._versions = partial(versions_of, list(state.model.parameters()), state.optimizer)
        self._ends: tuple[StandingEnd, ...] = ()
        self.changes = 0
        """How often something has begun to change the state. Whoever is about to, adds one."""

    def add(self, end: StepEnd, small: SharedState, digest: int | None) -> None:
        """The state is that of this end."""
        ends = self._ends
        before = ends[:1] if ends and ends[0].end != end and self.is_still(ends[0]) else ()
        self._ends = StandingEnd(end, self.changes, self._versions(), small, digest), *before

    @property
    def newest(self) -> StandingEnd | None:
        """Whether or not the state is still that one."""
        return next(iter(self._ends), None)

    @property
    def still(self) -> tuple[StandingEnd, ...]:
        """Those that are held still: none once something has begun to change the state."""
        ends = self._ends
        return ends if ends and self.is_still(ends[0]) else ()

    def is_still(self, standing: StandingEnd) -> bool:
        return standing.changes == self.changes

    def require_unchanged(self, standing: StandingEnd) -> None:
        """Raise NotProved if anything has been written since that end."""
        if not self.is_still(standing) or standing.versions != self._versions():
            raise NotProved(f"the state of step {standing.end.step} was changed while it was read")

    def still_intact(self, ends: Sequence[CommonEnd], read: TensorReader) -> Sequence[CommonEnd]:
        """Those of these ends whose weights and optimizer this rank still has. Raises NotProved: it has none."""
        if all(standing.digest is None for standing, _ in ends):
            return ends
        digest = digest_of_large_state(self._state, read)
        if not (same := [each for each in ends if each.standing.digest in (None, digest)]):
            step = ends[0].standing.end.step
            raise NotProved(f"weights or optimizer are not those of step {step} any more")
        return same


class Keeper:
    """One rank's part in one last snapshot. reason, bell: see `LastSnapshot.keep`. judge_ahead: see `LastSnapshot`.

    Any thread; it needs neither the group nor the main thread.
    """

    def __init__(
        self,
        run: AttachedRun,
        state: TrainingState,
        snapshots: Snapshots,
        members: Membership,
        standing: StandingEnds,
        judge_ahead: Callable[[Sequence[bytes]], JudgedAhead],
        reason: str,
        bell: bytes,
    ) -> None:
        self._run, self._state, self._snapshots = run, state, snapshots
        self._standing, self._judge_ahead = standing, judge_ahead
        self._paths, self._mark, self._peers, self._hosts = members.paths, members.mark, members.peers, members.hosts
        self._read = members.device.read
        self._tier = snapshots.memory.fast_tier.paths
        self._reason, self._bell = reason, bell
        self._began = 0.0
        self._gone: tuple[int, ...] = ()

    def keep(self) -> None:
        """Keep the state of a step's end if it can be proved to be that, or wait for whoever is at it. Leaves a
        result."""
        speaking = speaking_for_lost_hosts(self._hosts, self._tier, _AMONG_HOSTS)
        with contextlib.suppress(OSError), last_locks.busy(self._paths), speaking:
            self._keep_or_tell_why_not()

    def _keep_or_tell_why_not(self) -> None:
        self._peers.ring(self._bell)
        self._began = time.monotonic()
        self._gone = tuple(self._peers.lost(self._bell == RANK_ENDS))
        # Where one is gone, what this rank has met follows from that.
        reason = gone_in_words(self._gone) if self._gone else self._reason
        result = LastSnapshotResult(attempt=self._run.attempt, rank=self._run.ranks.rank, reason=reason)
        try:
            if self._hosts is not None and self._bell != RANK_ENDS_ELSEWHERE:
                self._hosts.ring()
            result = self._keep(result)
        except Exception as error:  # noqa: BLE001 - the rank ends either way; the record says why nothing was kept
            result = result.model_copy(update={"why_not": why_not(error)})
            if self._hosts is not None:
                self._hosts.refuse(why_not(error))
        if result.checkpoint is None:  # else it is written already
            last_snapshot_result.write_result(self._paths, result)

    def _keep(self, result: LastSnapshotResult) -> LastSnapshotResult:
        """Again, if this rank has come to another step's end meanwhile: it was behind the one that is gone."""
        while True:
            try:
                ends = self._await_common_ends(time.monotonic() + _SETTLE)
            except NotProved:
                if self._hosts is None or not self._peers.all_ends(self._began, over=True):
                    raise
                return self._keep_by_marks(self._hosts, result)
            try:
                return self._keep_one(ends, result)
            except NotProved:
                if self._standing.is_still(ends[0].standing) or time.monotonic() > self._began + _PATIENCE:
                    raise

    def _keep_one(self, ends: Sequence[CommonEnd], result: LastSnapshotResult) -> LastSnapshotResult:
        """Keep the state of the first of these ends; of several hosts, of that one which all have."""
        told = time.monotonic()
        ends = self._standing.still_intact(ends, self._read)
        first = ends[0].standing
        digests = digests_of_parameters(self._state, self._read)
        digest = combined_digest(digests)
        self._standing.require_unchanged(first)
        self._mark.tell_digest(first.end, digest)
        wait = max(_LEAST_WAIT, 3 * (time.monotonic() - told))
        with last_locks.alone(self._paths, self._began + _PATIENCE):
            if self._another_has_kept():
                return result
            self._peers.require_same(first.end, digest, time.monotonic() + wait)
            writers = {each.standing.end: self._writer_of(each, digests) for each in ends}
            if self._hosts is None:
                judged_ahead = self._judge_ahead(ends[0].marks.sent)
                writer = writers[first.end]
                manifest, tier = writer.write_alone(judged_ahead.sentinel)
                return self._tell(result, manifest, writer.metrics(judged_ahead), (), tier)
            here = {standing.end: marks for standing, marks in ends}
            return self._tell(result, *keep_together(
                self._exchange(self._hosts), self._tier, self._run.ranks.on_this_host, self._gone,
                lambda late: self._peers.all_ends(self._began, over=late) | here, writers=writers, digest=digest,
                next_seq=self._snapshots.next_seq, stands=lambda: self._standing.is_still(first),
            ))  # fmt: skip

    def _keep_by_marks(self, hosts: Hosts, result: LastSnapshotResult) -> LastSnapshotResult:
        """No rank of this host stands at these ends. Those of other hosts may, and lack nothing but these marks."""
        with last_locks.alone(self._paths, self._began + _PATIENCE):
            if self._another_has_kept():
                return result
            return self._tell(result, *keep_together(
                self._exchange(hosts), self._tier, self._run.ranks.on_this_host, self._gone,
                lambda late: self._peers.all_ends(self._began, over=True),
            ))  # fmt: skip

    def _exchange(self, hosts: Hosts) -> Exchange:
        return Exchange(hosts, self._judge_ahead, self._began + _AMONG_HOSTS - time.monotonic())

    def _another_has_kept(self) -> bool:
        return any(other.checkpoint for other in last_snapshot_result.read_results(self._paths, self._run.attempt))

    def _tell(self, result: LastSnapshotResult, manifest: Manifest, *told: Any) -> LastSnapshotResult:
        """Before another rank is let in. told: as for `LastSnapshotResult.kept`."""
        result = result.kept(time.monotonic() - self._began, manifest, *told)
        last_snapshot_result.write_result(self._paths, result)
        return result

    def _writer_of(self, common: CommonEnd, digests: dict[str, bytes]) -> StateWriter:
        standing = common.standing
        return StateWriter(
            self._run, self._state, self._snapshots, standing.end, common.marks.bodies, standing.small,
            digests, self._read, lambda: self._standing.require_unchanged(standing),
        )  # fmt: skip

    def _await_common_ends(self, deadline: float) -> list[CommonEnd]:
        """The steps' ends at which this rank stands and which all ranks of this host have told of, and what they told;
        newest first. Where another rank is further, this one will be there in a moment."""
        why = "this rank has not come to the end of a step"
        while True:
            over, newest, ends = time.monotonic() > deadline, self._standing.newest, self._standing.still
            found: list[CommonEnd] = []
            for standing in ends:
                end, first = standing.end, standing is ends[-1]  # early marks tell of the first of these ends
                marks, missing = self._peers.marks_of(end, self._began, early=first, over=over)
                if not missing and (over or not self._peers.any_is_beyond(end)):
                    found.append(CommonEnd(standing, marks))
                    if self._hosts is None:
                        break
                else:
                    why = f"{ranks_in_words(missing)} had not come to the end of step {end.step}"
            if found:
                return found
            if newest is not None and not ends:
                why = (
                    f"this rank was in its update behind step {newest.end.step}, had not ended that step, or stood at "
                    "an epoch's end, where no run goes on unless the script says that it may"
                )
            if over:
                raise NotProved(why)
            time.sleep(POLL)
