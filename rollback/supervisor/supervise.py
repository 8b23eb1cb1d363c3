"""One launch: the run directory, the nodes, the attempts.

The order is important in three places:

- The run directory is read before it is locked, and locked before anything starts. A job that its ranks refuse leaves
  the directory as it was: so the supervisor's journal is written only after the ranks have attached.
- All processes of an attempt are gone before its evidence is read, and before the next attempt starts.
- A decision is journalled before it is carried out.
"""

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.tiers import base_of, fast_tier_of
from rollback.environment import ENV_NO_RUN
from rollback.errors import ExitCode, RollbackError, RunInUse, UsageError, message_of
from rollback.facts.history import in_durable_ring
from rollback.facts.supervisor import AttemptStarted
from rollback.ring.url.fetch import fetch, unfetch
from rollback.ring.url.store import Store
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.paths import RunPaths
from rollback.rundir.record_location import forget_record_location, read_record_location
from rollback.supervisor.attempts import Attempts
from rollback.supervisor.buddy.buddy import Buddy
from rollback.supervisor.claim import Claim, EarlierAttempts, claim_or_private, read_past
from rollback.supervisor.complete import nothing_left, nothing_left_at
from rollback.supervisor.draining import reach
from rollback.supervisor.journal import SupervisorJournal
from rollback.supervisor.nodes.follow import Follower
from rollback.supervisor.nodes.lead import Leader
from rollback.supervisor.nodes.meeting import EndpointMeeting, Meeting, SharedMeeting, find_meeting
from rollback.supervisor.nodes.membership import NodePlace, OwnNode, command_of, membership, place_among_nodes
from rollback.supervisor.nodes.nodes import Nodes
from rollback.supervisor.nodes.protocol import RecordPlace, RunResult
from rollback.supervisor.signals import StopSignals
from rollback.supervisor.torchrun.command import LaunchOptions
from rollback.supervisor.torchrun.host import Host
from rollback.supervisor.torchrun.output import Audience

_LOOK = 5.0  # seconds that a URL has to answer to who waits for other nodes: they may come meanwhile


def supervise(options: LaunchOptions, audience: Audience, signals: StopSignals) -> RunResult:
    """Run the job to its end, over as many attempts as the budget allows, or until one of the signals comes.

    Raises RollbackError, with the run directory unchanged, where the directory cannot be used or the ranks refuse it;
    also where processes of an attempt cannot be ended.
    """
    alike = {"--spare-nodes": options.spare_nodes, "--replicas": options.replicas}
    command = command_of(options.job, options.settings, alike)
    place = place_among_nodes(options.job.flags, options.node_timeout, options.spare_nodes, command)
    if place is None and options.replicas > 1:
        raise UsageError(
            f"--replicas {options.replicas}: the copy is kept by another host, and this job has one node",
            hint="leave it out, or say with --nnodes how many there are",
        )
    url = options.settings.ring
    with _until_told(signals, f"{url} was looked at" if url else "the job was looked at"):
        expected = 0.0 if place is None else place.timeout
        store = reach(url, writing=place is None, expected=expected, say=audience.say)
    with _private_directory() as private:
        claim: Claim | None = None
        environment = dict(os.environ)
        if place is None:
            paths, claim, obstacle = claim_or_private(options.paths, private / "run", insist=options.expects_guard)
            options = replace(options, paths=paths)
            environment.pop(ENV_NO_RUN, None)
            if obstacle is not None:
                environment[ENV_NO_RUN] = json.dumps(obstacle.fields)
        host = Host(options, environment, private, audience, place.name if place else None)
        with closing(host), _buddy(options, place, audience.say) as buddy:
            own = None if place is None else OwnNode(options.paths, place, audience.say, options.settings.ring, buddy)
            launch = HostLaunch(options, own, store, audience.say, host, signals)
            if own is not None:
                return launch.take_part(own)
            assert claim is not None
            return launch.lead(claim)


@contextmanager
def _until_told(signals: StopSignals, doing: str) -> Iterator[None]:
    """For what waits for a URL: a checkpoint may take hours, and a store that does not answer the whole patience."""
    try:
        with signals.breaking_off():
            yield
    except KeyboardInterrupt:
        raise RollbackError(
            f"told to stop while {doing}", hint="the same command goes on", exit_code=ExitCode.RESUMABLE
        ) from None


@contextmanager
def _private_directory() -> Iterator[Path]:
    """A directory for messages of ranks and torchrun, locked: systemd removes what is some days old below /tmp, but
    nothing that is. What cannot be removed at the end (on NFS, what somebody still has open) stays: a run does not fail
    for it."""
    with tempfile.TemporaryDirectory(prefix="rollback-", ignore_cleanup_errors=True) as made:
        private = Path(os.path.realpath(made))  # no link is followed in it
        fd = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield private
        finally:
            os.close(fd)


@dataclass(frozen=True)
class HostLaunch:
    """What a launch has on this host. own: of many nodes; None: there is one. store: the ring's URL, from which a run
    may be fetched."""

    options: LaunchOptions
    own: OwnNode | None
    store: Store | None
    say: Callable[[str], None]
    host: Host
    signals: StopSignals

    def take_part(self, own: OwnNode) -> RunResult:
        """One node of many: lead if no other node leads, else follow. A follower without a leader starts again here."""
        paths, place = own.paths, own.place
        beside = Follower(own, self.host, self.options.grace, self.signals, SharedMeeting(paths, place.most))
        called: int | None = None  # for which attempt the last leader called its nodes; 0: it came to none
        while True:
            past = read_past(paths)
            follower = beside
            try:
                claim = Claim(paths, past)
            except RunInUse as in_use:
                with membership(paths, place):
                    result = beside.follow(in_use)
            else:
                try:
                    is_complete = partial(self._nothing_left_at_url, past, called)
                    found = find_meeting(own, self.signals, is_complete, again=called is not None)
                except BaseException:
                    _let_go(claim, paths)
                    raise
                if isinstance(found, RunResult):
                    _let_go(claim, paths)
                    return found.model_copy(update={"record": self._record()})
                meeting, leads = found
                with _staying_apart(meeting, self.host):
                    if leads:
                        return self.lead(claim, meeting)
                    follower = Follower(own, self.host, self.options.grace, self.signals, meeting)
                    try:
                        result = follower.follow()
                    finally:
                        _let_go(claim, paths)
            if result is not None and result.refuses is not None:
                raise result.as_error()
            if result is not None:
                return result
            called = follower.called

    def _nothing_left_at_url(self, past: EarlierAttempts, called: int | None) -> str | None:
        """called: 0: the last leader was lost before it could say whether anything is left."""
        options = self.options
        if self.store is None or not options.fetches or called == 0:
            return None
        begun = max(past.last_attempt, called or 0)
        with _until_told(self.signals, f"nodes were waited for, and {self.store.url} was looked at"):
            store = Store(self.store.url, patience=_LOOK)
            return nothing_left_at(store, options, begun, self.say)

    def _record(self) -> RecordPlace:
        """Where the record is, for a node that nobody has told how the run ended."""
        paths = self.options.paths
        if (told := read_record_location(paths)) is not None:
            return RecordPlace(host=told[0], directory=told[1])
        return RecordPlace(url="" if os.path.exists(paths.train_journal) else self.options.settings.ring or "")

    def lead(self, claim: Claim, meeting: Meeting | None = None) -> RunResult:
        """Decide about attempts, then release the run directory."""
        own_journal = SupervisorJournal(self.options.paths, self.say)
        try:
            with self._all_nodes(meeting, own_journal) as nodes:
                result = RunResult(
                    exit_code=ExitCode.FAILED, reason="the leading supervisor failed; its output says how"
                )
                try:
                    result = self._run(claim, own_journal, nodes)
                    return result
                except RollbackError as error:
                    result = RunResult.of_error(error)
                    raise
                finally:
                    nodes.farewell(result)
        finally:
            let_go = claim.release if own_journal.opened else claim.undo
            own_journal.close()
            let_go()

    def _run(self, claim: Claim, own_journal: SupervisorJournal, nodes: Nodes) -> RunResult:
        options = self.options
        brought = self._fetch()
        try:
            past = read_past(options.paths, claim.before)
            forget_record_location(options.paths)
            if (told := nothing_left(options, past, self.say)) is not None:
                return RunResult(exit_code=ExitCode.DONE, reason=told)
            _require_adopted_again(past, options)
            result = Attempts(options, self.say, self.host, own_journal, self.signals, nodes, claim.keep).run(past)
            return result.model_copy(update={"durable": _durable(options.paths)})
        except RollbackError as error:
            if error.exit_code in (ExitCode.UNFIT, ExitCode.USAGE) and not own_journal.opened:
                with suppress(OSError, RollbackError):
                    unfetch(options.paths, brought)
            raise

    def _fetch(self) -> tuple[str, ...]:
        """Bring the newest state from the ring's URL. Returns what was brought."""
        if self.store is None or not self.options.fetches:
            return ()
        doing = f"the newest state was fetched from {self.store.url}"
        with _until_told(self.signals, doing), self.store.told_if_stuck(self.say):
            if self.own is not None:  # of many nodes, the one that leads asks whether it may write
                self.store.probe()
            return fetch(self.store, self.options.paths, self.say)

    @contextmanager
    def _all_nodes(self, meeting: Meeting | None, own_journal: SupervisorJournal) -> Iterator[Nodes]:
        if self.own is None or meeting is None:
            yield Nodes()
            return
        with membership(self.own.paths, self.own.place):
            yield Leader(self.own, meeting, own_journal.note)


_IMPORTS_ROLLBACK = re.compile(rb"^\s*(import|from)\b.*\brollback\b", re.MULTILINE)


def _was_adopted(started: AttemptStarted) -> bool:
    if started.flags is not None:
        return "adopt" in started.flags
    return any(Path(word).match("rollback/trainers/adopt/script.py") for word in started.command)  # in older runs


def _require_adopted_again(past: EarlierAttempts, options: LaunchOptions) -> None:
    """Raise UsageError where `--adopt` was forgotten: the script would begin anew, without protection."""
    started, script = past.last_guarded_start, options.job.script
    if started is None or options.job.runner or not _was_adopted(started):
        return
    try:
        may_have_guard = _IMPORTS_ROLLBACK.search(Path(script).read_bytes())
    except OSError:  # a module, a folder: not looked into
        return
    if not may_have_guard:
        raise UsageError(
            f"the run in {options.paths.root} was made with --adopt, which this command leaves out: {script} does not "
            "import rollback, and would train from its beginning, without protection",
            hint="add --adopt; or import rollback in the script, where a module of yours makes the guard by now; or "
            "name another run directory with --run DIR",
        )


@contextmanager
def _buddy(options: LaunchOptions, place: NodePlace | None, say: Callable[[str], None]) -> Iterator[Buddy | None]:
    """What keeps another host's snapshots here and has this one's kept elsewhere, where that is wanted and can be."""
    base, buddy = base_of(options.settings.fast_tier), None
    if place is not None and options.replicas > 1 and base is not None:
        try:
            buddy = Buddy(options.paths, base, place.name, place.address, say)
        except (OSError, RollbackError) as error:
            say(f"no snapshot is copied to or from this host ({message_of(error)})")
    elif (tier := fast_tier_of(options.paths)) is not None:
        try:
            slots.remove_copies(tier)  # of a launch that wanted copies
        except OSError as error:
            say(f"giving back the memory of other hosts' snapshots in {tier.root}: {error}")
    with nullcontext() if buddy is None else closing(buddy):
        yield buddy


@contextmanager
def _staying_apart(meeting: Meeting, host: Host) -> Iterator[None]:
    """Where every host has a run directory of its own: that of the host knows it, and the store goes at the end."""
    if not isinstance(meeting, EndpointMeeting):
        yield
        return
    with closing(meeting.store):
        host.stay_apart(lambda: meeting.store.processes)
        yield


def _let_go(claim: Claim, paths: RunPaths) -> None:
    """A host that does not keep the record has nothing in its run directory before its ranks have attached."""
    (claim.release if os.path.exists(paths.identity) else claim.undo)()


def _durable(paths: RunPaths) -> tuple[str, ...]:
    try:
        return tuple(sorted(in_durable_ring(fold_journal(paths.supervisor_journal).history)))
    except RollbackError:
        return ()
