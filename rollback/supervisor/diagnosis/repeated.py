"""Whether an exception with no batch in hand comes again at one place. Pure.

No data are to blame for it, so nothing can be left out, and what the attempts keep on the way is no sign of progress: a
script that raises behind its first epoch raises there again. It may pass all the same, as what the world outside raises
does: so it counts as no progress, and not as a mistake of the script.
"""

from collections.abc import Iterable

from rollback.facts.training import AttemptEnded, JournalEntry
from rollback.supervisor.diagnosis.first_cause import FirstCause


def comes_again(first: FirstCause | None, attempt: int, journal: Iterable[JournalEntry]) -> bool:
    """Whether it is the exception of the last attempt, and came at the same step as there.

    journal: the supervisor's, up to the end of `attempt`.
    """
    if first is None or first.why != "exception" or first.record is None or first.record.in_hand:
        return False
    ends = [line.fact for line in journal if isinstance(line.fact, AttemptEnded) and line.attempt <= attempt]
    return len({(end.fingerprint, end.step) for end in ends[-2:]}) < len(ends[-2:])
