"""Whether and when another attempt follows a failed attempt. Pure."""

from dataclasses import dataclass, replace

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0
_DOUBLED = 10  # times at most: a float takes a thousand, and a budget may be larger
STARTS_WITHOUT_ATTACHING = 2


@dataclass(frozen=True)
class Restart:
    """Start another attempt after `delay` seconds."""

    delay: float
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Start no other attempt."""

    reason: str


@dataclass(frozen=True)
class Budget:
    """The restarts that are left. Progress refills them.

    So a run of months survives any number of crashes if each attempt gets further than all before it. A run that always
    fails at the same place ends after `limit` restarts.
    """

    limit: int
    left: int
    unattached: int = 0
    """Attempts in a row that failed before their ranks had attached, or by a mistake in the script."""

    @classmethod
    def full(cls, limit: int) -> "Budget":
        return cls(limit=limit, left=limit)

    def after_failure(
        self, *, progressed: bool, attached: bool, killed: bool, blamed: bool = False, mistake: str = ""
    ) -> "tuple[Budget, Restart | GiveUp]":
        """The budget after a failed attempt, and what follows.

        progressed: the attempt got further than all before it. attached: its ranks had agreed where to begin. killed:
        somebody ended the attempt, or the system gave it no process. blamed: data are to blame and will be left out, so
        no delay is needed. mistake: where the script failed for a reason that no restart mends; empty: it did not.

        The first restart after progress comes at once. The second one waits, and from there the delay doubles. A job
        that fails twice in a row before its ranks have attached gets no third attempt: a delay does not cure a syntax
        error, nor another mistake. An attempt that somebody killed does not count for this, unless a mistake was its
        first cause: the supervisor itself kills ranks that have raised and hang as they leave.
        """
        budget = replace(
            self,
            left=self.limit if progressed else self.left,
            unattached=0 if progressed or ((attached or killed) and not mistake) else self.unattached + 1,
        )
        if budget.unattached >= STARTS_WITHOUT_ATTACHING:
            where = f"{mistake}, which no restart mends" if mistake else "before training began"
            return budget, GiveUp(f"{budget.unattached} attempts in a row failed {where}")
        if budget.left == 0:
            spent = f"{self.limit} restarts brought no progress" if self.limit else "no restarts are allowed"
            return budget, GiveUp(spent)
        repeats = budget.limit - budget.left
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(repeats - 1, _DOUBLED)) if repeats else 0.0
        reason = "it got further than all before it" if progressed else f"no progress, restart {repeats + 1}"
        if blamed:
            delay, reason = 0.0, f"what is to blame is left out from now on; {reason}"
        return replace(budget, left=budget.left - 1), Restart(delay, reason)


def after_unguarded(restarts: int, allowed: int) -> Restart | GiveUp:
    """What follows when a script without a guard has failed, by torchrun's own rule.

    restarts: number of restarts so far. allowed: the number that --max-restarts allows.
    """
    if restarts >= allowed:
        return GiveUp(f"--max-restarts allows {allowed} restarts of a script without a guard")
    return Restart(0.0, f"restart {restarts + 1} of {allowed} by --max-restarts")
