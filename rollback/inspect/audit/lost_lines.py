"""What is there that the ranks' journal must once have named: it lacks lines. Nothing else would show that, since the
lines that are left are sound."""

from collections.abc import Sequence

from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.resume import beyond_the_record
from rollback.facts.history import History
from rollback.rundir.lock import read_holder
from rollback.rundir.paths import RunPaths
from rollback.rundir.records import read_last_metrics
from rollback.system.processes import is_alive
from rollback.wording import first_few

_SHOWN = 3


def lost_lines(paths: RunPaths, history: History, taken: Sequence[Manifest]) -> list[str]:
    """A notice where lines are lost, or none. taken: the checkpoints that are there."""
    holder = read_holder(paths)
    if holder is not None and is_alive(holder.get("pid"), holder.get("host"), holder.get("start")) != "no":
        return []  # where its disk takes nothing, it has the lines in its memory
    beyond, last_attempt = beyond_the_record(history, taken), max(history.reached, default=0)
    judged = next(iter(read_last_metrics(paths.metrics, 1)), None)
    if not beyond and judged is not None and judged.attempt > last_attempt:
        beyond = [f"the metrics of attempt {judged.attempt}"]
    if not beyond:
        return []
    journal = paths.train_journal
    how = f"lacks lines: it ends in front of {first_few(beyond, _SHOWN)}"
    if not last_attempt:
        how = f"{'is empty' if journal.exists() else 'is missing'}, and there is {first_few(beyond, _SHOWN)}"
    return [
        f"{journal} {how}. Incidents, what was skipped, and which checkpoints are good are not known from there on. "
        "`rollback launch` goes on from the newest checkpoint as if they were nothing, and says "
        "so: if there is a copy of the journal, put it back before that"
    ]
