"""The facts of the supervisor's journal: attempts, how they ended, and what was decided."""

from __future__ import annotations

from typing import ClassVar, Literal

from rollback.facts.fact import Fact, Window, Writer

Why = Literal[
    "stopped", "hang", "hardware", "oom_kill", "signal", "out_of_memory", "exception", "exit", "aborted", "timeout",
    "lost_peer", "node_lost", "launcher", "told_to_stop",
]  # fmt: skip
"""Classes of what can end an attempt before its time; `rollback.supervisor.diagnosis.classify` has the table."""


class AttemptStarted(Fact):
    """torchrun was started; where there are many `nodes`, on all of them.

    `arguments` are the script's, `environment` the variables that matter for what is trained, `script` the first 32 hex
    digits of the SHA-256 of its content (null: it could not be read); what looks like a secret is `***` or left out, in
    `command` too; in `arguments` 16 bits of its PBKDF2 with `salt`, which is the run's, follow on `***`. `changed` says
    in words what is not as at the start before. `job`: a hash over the script, its arguments, and the content of the
    files that these name.
    """

    writer: ClassVar[Writer] = "supervisor"
    kind: Literal["attempt_started"] = "attempt_started"
    command: tuple[str, ...]
    host: str
    pid: int
    nodes: tuple[str, ...] = ()
    script: str | None = None
    arguments: tuple[str, ...] | None = None
    environment: dict[str, str] | None = None
    changed: tuple[str, ...] = ()
    job: str | None = None
    salt: str | None = None


class AttemptEnded(Fact):
    """torchrun and all its ranks are gone. `cause` is in words, from the evidence in the run directory.

    `why` is its class (null: the attempt ended as it should), `rank` the one with which it began, `batch` what that
    rank had in hand, `samples` what may have done it in that, `followed` the ranks whose failure is a consequence,
    `fingerprint` that of the exception, `host` where that rank ran.
    """

    writer: ClassVar[Writer] = "supervisor"
    kind: Literal["attempt_ended"] = "attempt_ended"
    status: int
    cause: str
    step: int | None
    seconds: float
    why: Why | None = None
    rank: int | None = None
    batch: int | None = None
    followed: tuple[int, ...] = ()
    fingerprint: str | None = None
    host: str | None = None
    samples: tuple[int, ...] = ()


class Hung(Fact):
    """No rank showed a sign of progress within `limit` seconds: stacks were taken and everything was ended.

    `suspect` is the rank that the others seem to wait for, null where none stands out; `raised` the ranks that had
    raised and not ended, `died` those whose processes were gone.
    """

    writer: ClassVar[Writer] = "supervisor"
    kind: Literal["hung"] = "hung"
    suspect: int | None
    reason: str
    silent: float
    limit: float
    stacks: tuple[int, ...]
    raised: tuple[int, ...] = ()
    died: tuple[int, ...] = ()

    def in_words(self) -> str:
        return f"hang: {self.reason}; nothing moved for {self.silent:.0f} s; ending all ranks"


class StuckAtExit(Fact):
    """All ranks had closed their guards and were leaving Python, and `ranks` (those of this host that were still
    there) had not ended `silent` seconds later: they are ended. What they were to do is done."""

    writer: ClassVar[Writer] = "supervisor"
    kind: Literal["stuck_at_exit"] = "stuck_at_exit"
    ranks: tuple[int, ...]
    silent: float

    def in_words(self) -> str:
        who = f" ({', '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"all ranks had done their work {self.silent:.0f} s ago, and some have not ended{who}: ending them"


class Blamed(Fact):
    """A rank raised the same exception again, at the same batch or with the same sample in hand.

    The next attempt leaves `samples` out from `window` on; where none are known, it passes over `window`.
    """

    writer: ClassVar[Writer] = "supervisor"
    kind: Literal["blamed"] = "blamed"
    window: Window
    batch: int
    rank: int
    step: int
    fingerprint: str
    error: str
    attempts: tuple[int, ...]
    samples: tuple[int, ...] = ()

    @property
    def answer(self) -> str:
        """What the next attempt does about it (it skips the window where quarantine is off)."""
        if self.samples:
            return f"the samples {', '.join(map(str, self.samples))} will be left out from batch {self.window.first} on"
        return f"batches {self.window} will be skipped"

    def in_words(self) -> str:
        attempts = " and ".join(map(str, self.attempts))
        return f"the same exception in attempts {attempts} (fingerprint {self.fingerprint}): {self.error}"


class RestartScheduled(Fact):
    """The supervisor will start another attempt."""

    writer: ClassVar[Writer] = "supervisor"
    kind: Literal["restart_scheduled"] = "restart_scheduled"
    delay: float
    budget_left: int
    reason: str


class Signalled(Fact):
    """The supervisor, or that of another `node`, was told to stop and passed it on to the ranks."""

    writer: ClassVar[Writer] = "supervisor"
    kind: Literal["signalled"] = "signalled"
    signal: str
    node: str | None = None


class RunEnded(Fact):
    """The supervisor is done with this run for now; `exit_code` is what it exited with."""

    writer: ClassVar[Writer] = "supervisor"
    kind: Literal["run_ended"] = "run_ended"
    exit_code: int
    reason: str
