"""Whether a batch, or a sample in it, is to blame for an exception, or whether it comes again without one. Pure.

A rank that raised the same exception (by fingerprint) twice with the same sample will raise it a third time:

- a sample that also raises when it is read singly is left out from then on, in all epochs;
- else the samples that both batches have in common are left out;
- else, if it was the same batch twice, all ranks skip the batch with the rest of its update.

The budget of restarts handles all other cases:

- another batch without such a sample: a random crash is not the data's fault;
- no batch in hand: between two epochs, or behind the training, no batch is at fault;
- a mistake in the script, for all that can be seen, as an exception in the first update of the run is;
- an exception of rollback itself: its innermost frame is in this package;
- another class of cause: memory, a full disk, hardware, signals, hangs and lost peers say nothing about the data;
- the same exception at the same step although data were left out for it `SKIPS_THAT_DID_NOT_HELP` times: the step or
  the code is at fault.
"""

from collections.abc import Iterable

from rollback.facts.training import AttemptEnded, Blamed, JournalEntry
from rollback.supervisor.diagnosis.first_cause import FirstCause

SKIPS_THAT_DID_NOT_HELP = 3


def blame(first: FirstCause | None, attempt: int, past: Iterable[JournalEntry]) -> Blamed | None:
    """The data that caused the failure of `attempt`; None: not the data. past: the supervisor's journal."""
    if first is None or not first.may_blame_the_batch or first.mistake or first.record is None:
        return None
    record = first.record
    present = {*(record.unreadable or record.samples)}
    at_this_batch: list[int] = []
    alike: dict[int, set[int]] = {}
    skips = 0
    for line in past:
        match line.fact:
            case AttemptEnded() as fact if line.attempt < attempt and fact.fingerprint == record.fingerprint:
                if fact.batch == record.batch:
                    at_this_batch.append(line.attempt)
                if (fact.batch != record.batch or record.unreadable) and (common := present & {*fact.samples}):
                    alike[line.attempt] = common
            case Blamed() as fact if fact.fingerprint == record.fingerprint and fact.step == record.step:
                skips += 1
                if record.batch in fact.window and not fact.samples:
                    return None
    before = [*alike] or at_this_batch
    if not before or skips >= SKIPS_THAT_DID_NOT_HELP:
        return None
    return Blamed(
        window=record.whole_step,
        batch=record.batch,
        rank=record.rank,
        step=record.step,
        fingerprint=record.fingerprint,
        error=first.text,
        attempts=(before[-1], attempt),
        samples=tuple(sorted(alike[before[-1]])) if alike else (),
    )


def comes_again(first: FirstCause | None, attempt: int, journal: Iterable[JournalEntry]) -> bool:
    """Whether an exception with no batch in hand is that of the last attempt, and came at the same step as there.

    No data are to blame for it, so nothing can be left out, and what the attempts keep on the way is no sign of
    progress: a script that raises behind its first epoch raises there again. It may pass all the same, as what the
    world outside raises does: so it counts as no progress, and not as a mistake of the script. journal: the
    supervisor's, up to the end of `attempt`.
    """
    if first is None or first.why != "exception" or first.record is None or first.record.in_hand:
        return False
    ends = [line.fact for line in journal if isinstance(line.fact, AttemptEnded) and line.attempt <= attempt]
    return len({(end.fingerprint, end.step) for end in ends[-2:]}) < len(ends[-2:])
