"""Which samples incidents have in common: a pure function from incidents to suspects.

Incidents that met the same batch say the same thing once: they are one *occasion*. A sample that occasions have in
common is a *suspect* of them: the one of the most occasions explains these, and only what is left over is explained by
others. Of equals the one with the later occasion counts, since what was left out meanwhile has not done it. So an
innocent sample that two batches shared by chance is let go as soon as a better suspect explains one of the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from rollback.facts.training import Incident, SampleQuarantine

MOST = 4096  # samples of an incident; among more, suspects could not be told from chance


def suspects(incidents: Iterable[Incident]) -> dict[int, tuple[int, ...]]:
    """Suspected samples, each with the incidents that it explains. Same incidents, same suspects."""
    occasions: list[Incident] = []
    for incident in incidents:
        if incident.samples:
            occasions = [known for known in occasions if not _meet(known, incident)] + [incident]
    found: dict[int, tuple[int, ...]] = {}
    while explained := _best(occasions):
        numbers, samples = explained
        found.update(dict.fromkeys(samples, numbers))
        occasions = [occasion for occasion in occasions if occasion.incident not in numbers]
    return found


def quarantine_after(facts: Iterable[SampleQuarantine], suspected: Mapping[int, object]) -> tuple[int, ...]:
    """The samples that are to be left out: suspects, but for those that were let go by order, and those by order.

    facts: of the run so far, in their order. What came of an incident was by suspicion; the rest was ordered.
    """
    ordered: set[int] = set()
    let_go: set[int] = set()
    for fact in facts:
        if fact.incident is None:
            ordered = (ordered | set(fact.added)) - set(fact.released)
            let_go = (let_go | set(fact.released)) - set(fact.added)
    return tuple(sorted((suspected.keys() - let_go) | ordered))


def _best(occasions: list[Incident]) -> tuple[tuple[int, ...], list[int]] | None:
    """The incidents that have a sample in common, as many as possible, and the samples; None where no two have."""
    seen: defaultdict[int, list[int]] = defaultdict(list)
    for occasion in occasions:
        for sample in occasion.samples:
            seen[sample].append(occasion.incident)
    shared = {tuple(numbers) for numbers in seen.values() if len(numbers) > 1}
    if not shared:
        return None
    best = max(shared, key=lambda numbers: (len(numbers), numbers[::-1]))
    return best, sorted(sample for sample, numbers in seen.items() if tuple(numbers) == best)


def _meet(one: Incident, other: Incident) -> bool:
    return one.onset_batch <= other.detection_batch and other.onset_batch <= one.detection_batch
