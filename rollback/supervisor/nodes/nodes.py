"""What a job's nodes are to the supervisor that decides."""

from collections.abc import Callable, Sequence

from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.rundir.heartbeats import Heartbeat
from rollback.rundir.host_records import Transport
from rollback.supervisor.diagnosis.outcome import HostOutcome
from rollback.supervisor.nodes.protocol import LeadersMove, RunResult
from rollback.supervisor.torchrun.command import NodeGroup


class Nodes:
    """The nodes of a job, for the supervisor that decides. This class is for a job on one node.

    Calls do not wait unless they say so.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes in the attempt; empty for a job on one node."""
        return ()

    @property
    def group(self) -> NodeGroup | None:
        """How torchrun on this node takes part in the attempt; None: as its flags say."""
        return None

    @property
    def transport(self) -> Transport | None:
        """Reaches the other hosts where each has a run directory of its own."""
        return None

    def attached(self) -> None:
        """Tell all nodes that the ranks have attached, so that there is a record."""

    def resume(self, nodes: Sequence[str]) -> None:
        """Tell with which nodes the job has trained last, by the record. Call it before the first `gather`."""

    def failed(self, rank: int | None, *, progressed: bool) -> None:
        """Tell with which rank the last attempt failed, and whether it had got further than all before it."""

    def take_another_number(self) -> str | None:
        """The job does not fit so many nodes, or so few: begin the next attempt with another number. Returns which, in
        words; None: no other one is left."""
        return None

    def gather(self, attempt: int, interrupted: Callable[[], bool]) -> bool:
        """Wait until every node is ready for this attempt, and let them start. False: `interrupted` came true.

        Raises NodesMissing where a known node does not come back, RunDirectoryError where nodes never came.
        """
        return True

    def look(self) -> None:
        """Hear what the other nodes say; `gather` and `move` do. Raises RunDirectoryError where another node leads."""

    def move(self, own: int | None) -> LeadersMove:
        """What the leader does now. own: the status of this node's torchrun."""
        return "wait" if own is None else "settled"

    def stop(self) -> None:
        """Make all ranks stop and save."""

    def end(self) -> None:
        """End the attempt on all other nodes."""

    def states(self) -> dict[int, str]:
        """The ranks on other nodes that are stopped, in an uninterruptible call or gone: as `Running.look`."""
        return {}

    def beats(self) -> dict[int, Heartbeat]:
        """The last heartbeats of the ranks on other nodes."""
        return {}

    @property
    def lag(self) -> float:
        """Seconds by which these may be old, and no rank at fault."""
        return 0.0

    def take_stacks(self, own: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Make the ranks of all nodes write their stacks. Returns the ranks that did. Waits some seconds.

        own: takes the stacks on this node; may raise OSError.
        """
        return own()

    def signals(self) -> list[tuple[str, str]]:
        """Stop signals of other nodes since the last call: node and signal."""
        return []

    @property
    def insistent(self) -> bool:
        """Whether another node was told to stop twice."""
        return False

    def left(self, own: HostOutcome) -> HostOutcome:
        """What the attempt left on all nodes, once it is over everywhere."""
        return own

    def last_snapshot(self, own: LastSnapshotResult | None, attempt: int) -> LastSnapshotResult | None:
        """What the ranks of all nodes that have gathered kept at the end of an attempt. own: those of this node."""
        return own

    def farewell(self, result: RunResult) -> None:
        """Tell all nodes how the run ended, and wait until they have read it."""
