"""Whether an exception with no batch in hand comes again and again. Pure.

No data are to blame for it, so nothing can be left out, and what the attempts keep on the way is no sign of progress: a
script that raises behind its first epoch raises there again, and one whose evaluation never works raises in the next
one, as far behind as this one was. It may pass all the same, as what the world outside raises does: so it counts as no
progress, and not as a mistake of the script.
"""

from collections.abc import Iterable, Sequence

from rollback.facts.training import AttemptEnded, JournalEntry
from rollback.supervisor.diagnosis.first_cause import FirstCause


def comes_again(first: FirstCause | None, attempt: int, journal: Iterable[JournalEntry]) -> bool:
    """Whether it is the exception of the last attempt, and came at the same step as there, or as many steps on as that
    was behind the one before it.

    journal: the supervisor's, up to the end of `attempt`.
    """
    if first is None or first.why != "exception" or first.record is None or first.record.in_hand:
        return False
    ends = [line.fact for line in journal if isinstance(line.fact, AttemptEnded) and line.attempt <= attempt]
    since, before = _distance(ends[-2:]), _distance(ends[-3:-1])
    return since is not None and since in (0, before)


def _distance(ends: Sequence[AttemptEnded]) -> int | None:
    """In steps, of two ends by the same exception; None: they are not such ends."""
    match ends:
        case [AttemptEnded(step=int(first)) as one, AttemptEnded(step=int(second)) as other]:
            return second - first if one.fingerprint == other.fingerprint else None
        case _:
            return None
