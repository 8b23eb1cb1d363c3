"""Whether an exception with no batch in hand comes again and again. Pure.

No data are to blame for it, so nothing can be left out, and what the attempts keep on the way is no sign of progress: a
script that raises behind its first epoch raises there again, and one whose evaluation never works raises in the next
one, as far behind as this one was. What the world outside raises, as a server that is not there, may pass.
"""

from collections.abc import Iterable, Sequence

from rollback.facts.training import AttemptEnded, JournalEntry
from rollback.supervisor.diagnosis.first_cause import FirstCause

_OF_OUTSIDE = ("OSError", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError",
               "Timeout", "TimeoutError", "URLError", "HTTPError")  # fmt: skip
AS_BEFORE = "as the one before them did, with no batch in hand"


def steps_since(first: FirstCause | None, attempt: int, journal: Iterable[JournalEntry]) -> int | None:
    """How many steps behind the last attempt's failure this one is: 0, or as many as that was behind the one before it;
    None: it is another exception, has a batch in hand, or came where it had not to be expected.

    journal: the supervisor's, up to the end of `attempt`.
    """
    if first is None or first.why != "exception" or first.record is None or first.record.in_hand:
        return None
    ends = [line.fact for line in journal if isinstance(line.fact, AttemptEnded) and line.attempt <= attempt]
    since, before = _distance(ends[-2:]), _distance(ends[-3:-1])
    return since if since in (0, before) else None


def _distance(ends: Sequence[AttemptEnded]) -> int | None:
    """In steps, of two ends by the same exception; None: they are not such ends."""
    match ends:
        case [AttemptEnded(step=int(first)) as one, AttemptEnded(step=int(second)) as other]:
            return second - first if one.fingerprint == other.fingerprint else None
        case _:
            return None


def as_mistake(first: FirstCause | None, since: int | None) -> str:
    """Where the script fails for a reason that no restart mends, in words; empty: it may be another one."""
    if first is None or first.mistake or since is None or first.record is None:
        return first.mistake if first is not None else ""
    elsewhere = first.record.ours or first.record.error.endswith(_OF_OUTSIDE)
    return "" if elsewhere else AS_BEFORE
