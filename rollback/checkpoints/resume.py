"""Where a run goes on: a pure function of its record and of the checkpoints on disk."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence

from rollback.checkpoints.format.manifest import Manifest
from rollback.facts.history import History
from rollback.facts.training import ScriptLeft
from rollback.rundir.metrics.metric_lines import Metric
from rollback.rundir.paths import CheckpointName
from rollback.sentinel.verdict import Kind

_UNNAMED = 2  # checkpoints that a crash may leave without a line


def of_present_timeline(history: History, manifests: Sequence[Manifest]) -> list[Manifest]:
    """The checkpoints that still belong to the run, oldest first."""
    belongs = _of_the_run(history, min((manifest.timeline for manifest in manifests), default=0))
    return [manifest for manifest in manifests if belongs(manifest.name, manifest.timeline)]


def on_record(history: History, names: Iterable[str]) -> list[CheckpointName]:
    """Those of these checkpoints that belong to the run by its record, oldest first, wherever they lie: they were
    committed, and no rollback has cut them off."""
    timelines = {CheckpointName(name): history.committed[name].timeline for name in names if name in history.committed}
    belongs = _of_the_run(history, min(timelines.values(), default=0))
    return [name for name in sorted(timelines, key=lambda name: name.sort_key) if belongs(name, timelines[name])]


def _of_the_run(history: History, oldest: int) -> Callable[[str, int], bool]:
    """Whether a checkpoint of this name and timeline still belongs to the run. oldest: the first timeline asked for.

    A rollback cuts off what its timeline had beyond the restored checkpoint. Those checkpoints are usually listed in
    the plan, but one committed while the plan was being written is not, so the timeline of each counts.
    """
    # By timeline, descending: what it and all later ones have cut off begins behind the checkpoint of this order.
    beyond: list[tuple[int, tuple[int, int]]] = []
    for case in reversed(history.cases):
        if (plan := case.plan) is None or not plan.goes_back or not plan.checkpoint:
            continue
        if plan.timeline <= oldest:  # timelines only grow
            break
        if planned := CheckpointName.parse(plan.checkpoint):
            beyond.append((plan.timeline, min(planned.sort_key, beyond[-1][1] if beyond else planned.sort_key)))
    timelines = [-timeline for timeline, _ in beyond]

    def belongs(name: str, timeline: int) -> bool:
        # Not by the number alone: a last snapshot that is asked for while ranks train on has that of their next one.
        later = bisect_left(timelines, -timeline)
        is_cut_off = later > 0 and CheckpointName(name).sort_key > beyond[later - 1][1]
        return name not in history.discarded and not is_cut_off

    return belongs


def candidates(history: History, manifests: Sequence[Manifest], ahead: Collection[str] = ()) -> list[Manifest]:
    """The checkpoints to try at the start of an attempt, best first.

    With a plan pending: the planned one, then older good ones. Else the newest: after a crash nothing speaks against
    it, and if it carries an unnoticed trouble the sentinel will meet that again. One that was taken because training
    might have ended, and had not, comes behind these: after it the pass that goes on has no batch. Last come those
    that are not on record. ahead: as for `is_on_record`.
    """
    present = of_present_timeline(history, manifests)
    pending = history.pending
    if pending is None or pending.checkpoint is None:

        def reluctance(manifest: Manifest) -> tuple[bool, bool]:
            return not is_on_record(history, manifest, ahead), is_provisional(history, manifest)

        newest_first = present[::-1]
        return sorted(newest_first, key=reluctance)
    planned = next((m for m in present if m.name == pending.checkpoint), None)
    older = [m for m in present if m.name in history.good and m.step < (pending.step or 0)]
    return ([planned] if planned else []) + older[::-1]


def newest_good_on_record(history: History) -> str | None:
    """The newest good checkpoint of the run by its record, wherever it lies.

    A plan discards what is held. What has left memory before is cut off as well, though its record still calls it good.
    """
    for name in reversed(history.committed):  # most often the first or second: a long run has a hundred thousand
        if name in history.good and on_record(history, [name]):
            return name
    return None


def is_on_record(history: History, taken: Manifest, ahead: Collection[str]) -> bool:
    """Whether the record has what led to a checkpoint: the rollback with which its timeline began, and all that was on
    record when it was committed. Without any record of the ranks that cannot be told.

    ahead: the names of those in memory that were committed when the record had more than now (`tiers.PUT_BACK`).

    A plan that the disk refuses waits in memory, and is lost with rank 0. A checkpoint from behind that rollback, which
    memory still holds, lacks batches that no record says were skipped. The trouble comes again where the run goes on
    from before it, and is answered again, on record.
    """
    return not history.attached or (taken.timeline <= history.timeline and taken.name not in ahead)


def beyond_the_record(history: History, taken: Iterable[Manifest]) -> list[str]:
    """Names of checkpoints that the ranks' journal must have named, and does not: it has lost lines. Oldest first.

    A crash may leave two without their lines: the one that was just made, and the last snapshot of that attempt. An
    attempt is on record before it makes any.
    """
    newest = max((CheckpointName(name).sort_key for name in history.committed), default=(-1, -1))
    last_attempt = max(history.reached, default=0)
    beyond = sorted((it for it in taken if it.sort_key > newest), key=lambda manifest: manifest.sort_key)
    if len({it.name for it in beyond}) > _UNNAMED or any(it.attempt > last_attempt for it in beyond):
        return list(dict.fromkeys(it.name for it in beyond))
    return []


def is_provisional(history: History, manifest: Manifest) -> bool:
    """Whether a checkpoint was taken at the end of an epoch that was not, as far as is known, that of the training."""
    there = script_left_at(history, manifest) is not None  # where it goes on is that end
    return manifest.over and not there and manifest.name != history.final and manifest.name not in history.good


def script_left_at(history: History, manifest: Manifest) -> ScriptLeft | None:
    """How a script that was told to stop has left behind an epoch's last batch, where a checkpoint was taken there."""
    left = history.script_left
    there = manifest.over and left is not None and (left.checkpoint, left.step) == (manifest.name, manifest.step)
    return left if there else None


def healthy_before(judged: Iterable[Metric], step: int, timeline: int) -> int:
    """How many steps in front of `step` are on record as healthy, without a gap, in this timeline.

    judged: the last lines of the metrics. Of a step that was trained again the later line counts.
    """
    lines = {line.step: (line.verdict, line.timeline) for line in judged}
    first = step
    while lines.get(first - 1) == (Kind.HEALTHY.value, timeline):
        first -= 1
    return step - first


def next_seq(history: History, on_disk: Iterable[str]) -> int:
    """The sequence number of the next checkpoint: beyond all that disk or record know of.

    The newest may have left the ring. Its number must not come back: the record says of its name that it was discarded.
    """
    names = {*on_disk, *history.committed, *history.discarded, *history.left_run_directory}
    return max((parsed.seq for name in names if (parsed := CheckpointName.parse(name))), default=-1) + 1
