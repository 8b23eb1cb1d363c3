"""What a start adds to the record; and the refusal to go on without a change after an incident stopped the run."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from rollback.checkpoints import ring, tiers
from rollback.checkpoints.fast_tier import end_marks, last_snapshot_result
from rollback.checkpoints.fast_tier.slots import forget
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.resume import beyond_the_record, healthy_before, is_on_record
from rollback.config import Settings, spelt
from rollback.errors import ExitCode, NoUsableCheckpoint, RollbackError, StoppedAsStructural, WrongSetting
from rollback.facts.history import History
from rollback.facts.supervisor import RunEnded
from rollback.facts.training import (
    THE_SUPERVISOR,
    Blamed,
    Committed,
    Evicted,
    Quarantined,
    Restored,
    SampleQuarantine,
    SkipAdded,
    Tier,
    Window,
)
from rollback.rundir.journal.journal import of_kind, read_entries
from rollback.rundir.metrics.metric_lines import read_last_metrics
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.rundir.requests import names, sound_requests
from rollback.suspects import beside_later_ones, left_out_at
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder, say, say_if_it_fails
from rollback.train.data.cursor import Cursor
from rollback.train.data.skips import why_kept
from rollback.train.run import supervised
from rollback.wording import AdviceText, first_few

JOURNAL_GONE = AdviceText(
    "journal-gone",
    "there is the checkpoint {names} and no journal of the attempts that made it: what was skipped before it, and what "
    "was planned when they ended, is not known. Training goes on from it as if that were nothing; if the run directory "
    "was copied, bring its journal/ too",
)
JOURNAL_CUT = AdviceText(
    "journal-cut",
    "the journal ends in front of checkpoints that were made later: {names}. What was skipped before them since is not "
    "known. Training goes on as if that were nothing; if there is a copy of journal/ that has more, bring it back",
)
SKIPS_UNKNOWN = AdviceText(
    "skips-unknown",
    "what led to {names} is not in the journal, which could not take it or of which an older copy was put back, and no "
    "checkpoint that is on record is left: what was skipped before it is not known. Training goes on from it as if "
    "that were nothing",
)
UNEQUAL_EPOCHS = AdviceText(
    "unequal-epochs",
    "the ranks have different numbers of batches in an epoch ({counts}): where the shortest ends they wait for each "
    "other, and the job stands still until that is taken for a hang. Give all ranks as many batches, as torch's "
    "DistributedSampler does, and Accelerate with even_batches=True; or end before that with max_steps=",
)
_SHOWN = 4  # numbers of batches
NOT_ON_RECORD = "it is from behind a rollback that the journal could not take: what was skipped before it is not known"


def not_on_record(history: History, manifests: Iterable[Manifest], ahead: Collection[str]) -> dict[str, str]:
    """The checkpoints that are not gone on from while there is one that is on record, and why. ahead: as for
    `is_on_record`."""
    return {
        manifest.name: tiers.PUT_BACK if manifest.name in ahead else NOT_ON_RECORD
        for manifest in manifests if not is_on_record(history, manifest, ahead)
    }  # fmt: skip


def require_a_change(paths: RunPaths, settings: Settings, history: History) -> None:
    """Raise StoppedAsStructural, or NoUsableCheckpoint, where an incident stopped the run and nothing has changed.

    The run may go on with other deciding settings, after a request of an operator, or with `accept_structural`, which
    says that the change is in the script, the data or the machine.
    """
    if settings.accept_structural or settings.decides_otherwise(history.settings):
        return
    how, account = "as structural", _structural_end_of_supervisor(paths, history)
    error: type[RollbackError] = StoppedAsStructural
    if (stopped := history.given_up) is not None:
        how, account = f"{how} at step {stopped.step}", stopped.account
        if stopped.reason == "no_checkpoint":
            how, error = f"for want of a good checkpoint at step {stopped.step}", NoUsableCheckpoint
    if account is None or _asked_for_something(paths, history.answers):
        return
    raise error(
        f"the run in {paths.root} was stopped {how}, and nothing has changed since: {account}",
        hint="change a setting that decides about incidents, ask for a `rollback rewind` or `rollback skip`, or, where "
        "the script or the data have changed, say --accept-structural; nothing was touched",
    )


def _structural_end_of_supervisor(paths: RunPaths, history: History) -> str | None:
    """Why the last attempt was stopped as structural, where the ranks' journal could not take that, as on a full disk,
    and the supervisor's could; None: it was not."""
    for entry, fact in of_kind(read_entries(paths.supervisor_journal, [RunEnded])[-1:], RunEnded):
        if fact.exit_code == ExitCode.STRUCTURAL and entry.attempt >= history.last_attempt:
            return fact.reason
    return None


def require_samples(settings: Settings, cursor: Cursor) -> None:
    """Raise WrongSetting where samples that the settings leave out cannot be: the record would say that they were.

    Where another data set is accepted, the order may be from before it shrank.
    """
    listed = {sample for one in settings.skip_samples for sample in one.samples}
    if not listed or (cursor.leaves_out and settings.accept_data_change):
        return
    if (why := why_kept(listed, cursor)) is not None:
        raise WrongSetting(
            f"{spelt('skip_samples')}: {why}", hint="leave it out, or say --skip A:B to pass over whole batches"
        )


def take_over_last_snapshot(paths: RunPaths, history: History, chosen: Manifest | None, record: Recorder) -> None:
    """Journal what the ranks of the attempt before have kept for this one, and complete its metrics. On rank 0.

    chosen: the checkpoint that this attempt goes on from. A supervisor has journalled the reason already.
    """
    tier = tiers.fast_tier_of(paths)
    if chosen is None or tier is None or chosen.name in history.committed:
        return
    for account in last_snapshot_result.read_results(end_marks.marks_of(tier), chosen.attempt):
        if account.checkpoint != chosen.name:
            continue
        at: Tier = "fast" if account.tier == "fast" else "durable"
        record.note(
            Committed(
                checkpoint=chosen.name, step=chosen.step, batch=chosen.batch, timeline=chosen.timeline,
                bytes=chosen.bytes, seconds=account.seconds, tier=at,
            )
        )  # fmt: skip
        if not supervised():
            record.note(account.as_fact())
        record.complete_metrics(account.metrics)


def healthy_until(paths: RunPaths, history: History, chosen: Manifest, record: Recorder) -> int:
    """How many steps in front of the checkpoint that this attempt goes on from were all healthy. On rank 0, behind
    `take_over_last_snapshot`. Fewer where the metrics lack lines: what is not on record counts as not healthy."""
    record.flush()
    return healthy_before(read_last_metrics(paths.metrics), chosen.step, history.timeline)


def leave_out_what_is_new(
    history: History, blamed: Sequence[Blamed], settings: Settings, batch: int, record: Recorder
) -> None:
    """Journal the samples and windows that settings or the supervisor have added. batch: the present position."""
    for order in left_out_by_order(history.quarantine, settings, blamed, batch):
        history.quarantine.append(order)
        record.note(order, order.in_words())
    added = [SkipAdded(window=w, who="settings", why="given at the start of an attempt") for w in settings.skip]
    for crash in blamed:
        if not leaves_out(settings, crash):
            added.append(SkipAdded(window=crash.window, who=THE_SUPERVISOR, why=crash.in_words()))
    passed_over, known = Window.merged(history.skip_list), {fact.window for fact in history.added}
    new: list[tuple[SkipAdded, str | None]] = []
    for fact in added:
        if fact.window not in known:
            known.add(fact.window)
            new.append((fact, given_too_late(fact.window, passed_over, batch)))
    history.added.extend(fact for fact, _ in new)
    record.note_all(new)


def given_too_late(window: Window, passed_over: Sequence[Window], batch: int) -> str | None:
    """What is to be said where a new window begins before the position; None: nothing. passed_over: merged windows that
    were in force before."""
    if window.first >= batch:
        return None
    late = Window(first=window.first, last=min(window.last, batch - 1))
    if any(known.first <= late.first and late.last <= known.last for known in passed_over):
        return None
    return (
        f"skip {window}: {late.in_words()} cannot be skipped any more: the run goes on at batch {batch}. To skip "
        f"them too, rewind to a step at or before batch {window.first}: rollback rewind RUN --to STEP"
    )


def left_out_by_order(
    recorded: Sequence[SampleQuarantine], settings: Settings, blamed: Iterable[Blamed], batch: int
) -> list[SampleQuarantine]:
    """The samples that settings and the supervisor leave out and that are not on record, from `batch` on or later.

    An order may come again: a sample is left out, taken in, and left out once more. So equal orders are counted: only
    those beyond the ones on record are new. Batches cannot tell them apart: an order that comes with a later start is
    on record with the batch of that start. Their reasons do tell an order from what another one had to say once more of
    later batches (`beside_later_ones`), which may add and release the same samples.
    """
    orders: list[tuple[str, str, int, set[int], set[int]]] = []
    given: set[int] = set()
    for one in settings.skip_samples:
        listed = {*one.samples}
        orders.append(("settings", "given at the start of an attempt", one.batch, listed - given, given - listed))
        given = listed
    for crash in blamed:
        if leaves_out(settings, crash):
            orders.append((THE_SUPERVISOR, crash.in_words(), crash.window.first, {*crash.samples}, set()))
    known = list(recorded)
    on_record = Counter((fact.who, fact.why, frozenset(fact.added), frozenset(fact.released)) for fact in recorded)
    for who, why, first, added, released in orders:
        order = (who, why, frozenset(added), frozenset(released))
        on_record[order] -= 1
        if on_record[order] >= 0:
            continue
        begins = max(first, batch)
        # Settings give whole lists, one after the other, and so what is to be for later batches too.
        before = left_out_at(known, begins) if who == THE_SUPERVISOR else known[-1].samples if known else ()
        new = SampleQuarantine(
            batch=begins, samples=tuple(sorted(({*before} | added) - released)), who=who, why=why,
            added=tuple(sorted(added)), released=tuple(sorted(released)),
        )  # fmt: skip
        known += beside_later_ones(known, new) if who == THE_SUPERVISOR else [new]
    return known[len(recorded) :]


def leaves_out(settings: Settings, blamed: Blamed) -> bool:
    """Whether a blamed failure leaves samples out; else its window is skipped."""
    return bool(blamed.samples) and settings.quarantine == "suspects"


def _asked_for_something(paths: RunPaths, answered: Iterable[str]) -> bool:
    try:
        open_ones = {*names(paths)} - {*answered}
    except OSError:
        return False
    return any(request.order != "stop" for _, request in sound_requests(paths, open_ones))


def finish_pending_plan(history: History, chosen: Manifest, tier: Tier | None, record: Recorder) -> None:
    """Journal that this attempt has carried out the plan that a crash interrupted."""
    if history.pending is None:
        return
    case = history.cases[-1]
    case.restored = Restored(
        incident=case.incident.incident, checkpoint=chosen.name, step=chosen.step, batch=chosen.batch,
        steps_lost=case.incident.step - chosen.step, seconds=0.0, route="relaunch", tier=tier,
    )  # fmt: skip
    record.note(case.restored, f"the rollback that was under way is carried out: step {chosen.step}")


def where_it_goes_on(history: History, chosen: Manifest, found: Collection[str]) -> str:
    """Where the run goes on, in words. found: the names of all checkpoints that there are, damaged ones too."""
    end = history.finished
    if end is None or chosen.name != end.checkpoint:
        missing = (CheckpointName(name) for name in history.restorable if name not in found)
        newest = max(missing, key=lambda name: name.sort_key, default=None)
        # A plan goes back by intent, and discards what is newer.
        missed = (
            newest is not None and history.pending is None and newest.sort_key > CheckpointName(chosen.name).sort_key
        )
        lost = f"; the newest checkpoint on record, {newest}, is missing" if missed else ""
        return f"resuming at step {chosen.step}, batch {chosen.batch} ({chosen.name}){lost}"
    by = f", by {end.by}" if end.by else ""
    lost = f"; {end.left_over} batches behind its last update do not count if it goes on" if end.left_over else ""
    return f"the run was complete: it ended at step {end.step}{by} (final state: {end.checkpoint}){lost}"


def tell_what_is_not_on_record(
    history: History, manifests: Iterable[Manifest], ahead: Collection[str], chosen: Manifest | None, record: Recorder
) -> None:
    """On rank 0: others have no journal. manifests: of all checkpoints. ahead: as for `is_on_record`. chosen: the one
    that this attempt goes on from."""
    if chosen is not None and not record.history.attached:
        record.advise_of(JOURNAL_GONE, [chosen.name])
    if history.attached:
        known = [manifest for manifest in manifests if manifest.name not in ahead]  # else told when it was put aside
        record.advise_of(JOURNAL_CUT, beyond_the_record(history, known))
    if chosen is not None and not is_on_record(history, chosen, ahead):
        record.advise_of(SKIPS_UNKNOWN, [chosen.name])


def tell_of_unequal_epochs(batches: Sequence[int | None], record: Recorder) -> None:
    """Not refused: training may end before the shortest epoch does. batches: of an epoch, by rank, where known."""
    first_with = {count: rank for rank, count in reversed([*enumerate(batches)]) if count is not None}
    if len(first_with) > 1:
        counts = first_few([f"{count} on rank {rank}" for count, rank in sorted(first_with.items())], _SHOWN)
        record.advise(UNEQUAL_EPOCHS.of(counts=counts))


def put_aside(
    paths: RunPaths, damaged: Mapping[str, str], slots: Mapping[str, int], ranks: Ranks, record: Recorder
) -> None:
    """Put checkpoints that cannot be used out of the way, and journal why. slots: where they lie in memory.

    A slot is given up too: a later start, whose record has other rollbacks, must not find it again.
    """
    tier = tiers.fast_tier_of(paths) if ranks.first_of_host else None
    for name, reason in damaged.items():
        # Each by itself: a disk that refuses keeps nothing in memory.
        if ranks.first_in_directory and os.path.lexists(paths.checkpoint(name)):
            say_if_it_fails(f"moving checkpoint {name} to quarantine", partial(ring.quarantine, paths, name))
        if tier is not None and name in slots:
            say_if_it_fails(f"giving up the slot of checkpoint {name}", partial(forget, tier, slots[name]))
        record.note(Quarantined(checkpoint=name, reason=reason), f"checkpoint {name} cannot be used: {reason}")


def evict_what_was_cut_off(paths: RunPaths, names: Sequence[str], in_ring: Collection[str], record: Recorder) -> None:
    """Rank 0: evict what a plan discards, where a crash prevented it, and what was taken at the end of an epoch behind
    which no attempt has come. in_ring: the checkpoints in the run directory; the others lie in memory alone, where
    nobody counts on their slots."""
    reason = "beyond where the run goes on"
    for name in names:
        if name not in in_ring:
            record.note(Evicted(checkpoint=name, reason=reason, tier="fast"))
            continue
        try:
            evicted = ring.evict(paths, name)
        except OSError as error:
            say(f"evicting checkpoint {name} failed ({error}); it stays where it is and is not used")
            continue
        if evicted:
            record.note(Evicted(checkpoint=name, reason=reason))
