"""The facts of the supervisor's journal: attempts, how they ended, and what the supervisor decided."""

from typing import ClassVar, Literal

from pydantic import Field

from rollback.facts.fact import Count, Fact, Window, Writer

Why = Literal[
    "stopped", "hang", "hardware", "oom_kill", "signal", "out_of_memory", "disk", "exception", "exit", "aborted",
    "timeout", "lost_peer", "node_lost", "launcher", "told_to_stop", "left",
]  # fmt: skip
"""Classes of what can end an attempt before its time. Their order decides: of several ranks, the one whose class comes
first is the first cause. `rollback.supervisor.diagnosis.first_cause` has the table."""


class SupervisorFact(Fact):
    """Base of all facts of the supervisor's journal."""

    writer: ClassVar[Writer] = "supervisor"


class AttemptStarted(SupervisorFact):
    """torchrun was started. What looks like a secret is `***` or left out."""

    kind: Literal["attempt_started"] = "attempt_started"
    command: tuple[str, ...]
    host: str
    pid: int
    nodes: tuple[str, ...] = ()
    """All nodes of the attempt, where there are many; in the order of their ranks, where the leader gives them."""
    script: str | None = None
    """The first 32 hex digits of the SHA-256 of the script's content; null: it could not be read."""
    arguments: tuple[str, ...] | None = None
    """The script's arguments. A secret is `***` and 16 bits of its PBKDF2 with `salt`."""
    flags: dict[str, str] | None = None
    """torchrun's flags that say what runs, and `adopt`, by name; null: not on record."""
    environment: dict[str, str] | None = None
    """The environment variables that matter for what is trained."""
    changed: tuple[str, ...] = ()
    """What differs from the start before, in words."""
    job: str | None = None
    """A hash over the script, its arguments, and the content of the files that the arguments name."""
    salt: str | None = None
    """The salt of the run."""


class AttemptEnded(SupervisorFact):
    """torchrun and all its ranks are gone."""

    kind: Literal["attempt_ended"] = "attempt_ended"
    status: int
    cause: str
    """In words, from the evidence in the run directory."""
    step: Count | None
    seconds: float
    why: Why | None = None
    """The class of the cause (see "Why an attempt ended"); null: the attempt ended as it should."""
    rank: int | None = None
    """The rank of the first cause: not always the one that failed first."""
    batch: Count | None = None
    """The batch that this rank was working on."""
    followed: tuple[int, ...] = ()
    """The ranks whose failure is a consequence."""
    fingerprint: str | None = None
    """The fingerprint of the exception."""
    host: str | None = None
    """The host of this rank."""
    samples: tuple[int, ...] = ()
    """The samples of the batch that may have caused the failure."""


class Hung(SupervisorFact):
    """No rank showed progress for `limit` seconds: the supervisor took stacks and ended everything."""

    kind: Literal["hung"] = "hung"
    suspect: int | None
    """The rank that the others seem to wait for; null: no rank stands out."""
    reason: str
    silent: float
    limit: float
    stacks: tuple[int, ...]
    raised: tuple[int, ...] = ()
    """The ranks that had raised an exception and had not ended."""
    died: tuple[int, ...] = ()
    """The ranks whose processes were gone."""

    def in_words(self) -> str:
        return f"hang: {self.reason}; nothing moved for {self.silent:.0f} s; ending all ranks"


class StuckAtExit(SupervisorFact):
    """All ranks had closed their guards, and some did not exit: the supervisor ends them. Their work is complete."""

    kind: Literal["stuck_at_exit"] = "stuck_at_exit"
    ranks: tuple[int, ...]
    """The ranks of this host that still existed."""
    silent: float
    """Seconds since the last sign of life of any rank."""

    def in_words(self) -> str:
        who = f" ({', '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"all ranks had done their work {self.silent:.0f} s ago, and some have not ended{who}: ending them"


class Blamed(SupervisorFact):
    """A rank raised the same exception again, at the same batch or with the same sample."""

    kind: Literal["blamed"] = "blamed"
    window: Window
    """From this window on, the next attempt leaves `samples` out; where it knows no samples, it skips the window."""
    batch: Count
    rank: int
    step: Count
    fingerprint: str
    error: str
    attempts: tuple[int, ...]
    samples: tuple[int, ...] = ()

    @property
    def answer(self) -> str:
        """What the next attempt does about it. (It skips the window where quarantine is off.)"""
        if self.samples:
            return f"the samples {', '.join(map(str, self.samples))} will be left out from batch {self.window.first} on"
        return f"{self.window.in_words()} will be skipped"

    def in_words(self) -> str:
        attempts = " and ".join(map(str, self.attempts))
        return f"the same exception in attempts {attempts} (fingerprint {self.fingerprint}): {self.error}"


class RestartScheduled(SupervisorFact):
    """The supervisor will start another attempt."""

    kind: Literal["restart_scheduled"] = "restart_scheduled"
    delay: float
    budget_left: int
    reason: str


class NodeReplaced(SupervisorFact):
    """From the next attempt on, a spare node has the place of another node."""

    kind: Literal["node_replaced"] = "node_replaced"
    node: str
    by: str
    rank: int
    """The rank among the nodes that the spare takes over."""
    why: Literal["lost", "failing"]
    """`lost`: its supervisor fell silent. `failing`: its ranks failed again and again, without progress in between."""

    def in_words(self) -> str:
        why = {"lost": "is lost", "failing": "fails again and again"}[self.why]
        return f"{self.node} {why}: {self.by} takes its place (node rank {self.rank})"


class SpareNodes(SupervisorFact):
    """The nodes that wait have changed. They wait for the place of a node that is lost, or that fails."""

    kind: Literal["spare_nodes"] = "spare_nodes"
    nodes: tuple[str, ...]
    unfit: dict[str, str] = Field(default_factory=dict)
    """Nodes that cannot take part, since they would run something else than the leader; what differs, by node."""

    def in_words(self) -> str:
        unfit = "".join(f"; {node} cannot take part: it has other {what}" for node, what in self.unfit.items())
        return (", ".join(self.nodes) or "none") + unfit


class PartBroughtBack(SupervisorFact):
    """A node lacked its part of a snapshot, and got it from another host's memory before its ranks started."""

    kind: Literal["part_brought_back"] = "part_brought_back"
    node: str
    checkpoint: str
    step: Count
    bytes: Count
    seconds: float
    source: str
    """The host that had it."""

    def in_words(self) -> str:
        return f"{self.node} got its part of step {self.step} from the memory of {self.source} in {self.seconds:.1f} s"


class NoBuddyCopy(SupervisorFact):
    """A node's snapshots are in no other host's memory (`--replicas 2`), and are lost with its host; or are again."""

    kind: Literal["no_buddy_copy"] = "no_buddy_copy"
    node: str
    reason: str | None
    """Journalled when it changes; null: they are there again."""

    def in_words(self) -> str:
        if self.reason is None:
            return f"snapshots of {self.node} are in another host's memory again"
        return f"snapshots of {self.node} are in no other host's memory: {self.reason}"


ABOUT_NODES = (NodeReplaced, PartBroughtBack, NoBuddyCopy)
"""What reports tell of an attempt's nodes, in words."""


class Signalled(SupervisorFact):
    """The supervisor was told to stop and passed the signal on to the ranks."""

    kind: Literal["signalled"] = "signalled"
    signal: str
    node: str | None = None
    """The node whose supervisor was told, if it was another one."""


class RunEnded(SupervisorFact):
    """The supervisor has finished its work on this run for now."""

    kind: Literal["run_ended"] = "run_ended"
    exit_code: int
    """What it exited with."""
    reason: str
