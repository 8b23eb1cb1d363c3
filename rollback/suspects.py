"""Which samples incidents have in common: a pure function from incidents to suspects.

Incidents with the same batch are one *occasion*. A sample that occasions have in common is their *suspect*. The suspect
with the most occasions explains these; other suspects explain only the occasions that are left. Of two suspects with
equally many occasions, the one with the later occasion counts: the other one has been left out in the meantime, so it
cannot be the cause. An innocent sample that two batches share by chance is released as soon as a better suspect
explains one of the two.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

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


def left_out_at(facts: Sequence[SampleQuarantine], batch: int) -> tuple[int, ...]:
    """The samples that are left out of a batch: of the facts that apply there, the last one in the list says it."""
    return next((fact.samples for fact in reversed(facts) if fact.batch <= batch), ())


def beside_later_ones(facts: Sequence[SampleQuarantine], new: SampleQuarantine) -> list[SampleQuarantine]:
    """The fact of a new order, and with its change once more what `facts` say of later batches, if anything.

    `--skips-of` gives orders for batches to come. The new fact stands behind these in the list, so alone it would end
    them.
    """
    found, before = [new], {*new.samples}
    for later in sorted((fact for fact in facts if fact.batch > new.batch), key=lambda fact: fact.batch):
        samples = ({*left_out_at(facts, later.batch)} | {*new.added}) - {*new.released}
        if samples != before:
            changed = {
                "batch": later.batch, "samples": tuple(sorted(samples)), "added": tuple(sorted(samples - before)),
                "released": tuple(sorted(before - samples)), "why": f"as before, by {later.who}", "request": None,
                "incident": later.incident,
            }  # fmt: skip
            found.append(new.model_copy(update=changed))
            before = samples
    return found


def quarantine_after(facts: Iterable[SampleQuarantine], suspected: Mapping[int, object], batch: int) -> tuple[int, ...]:
    """The samples to leave out of a batch: all suspects that no order released, and all samples that the orders for it
    and for earlier ones have added.

    facts: of the run so far, in their order. A fact with an incident came from suspicion; every other fact came from an
    order.
    """
    ordered: set[int] = set()
    let_go: set[int] = set()
    for fact in facts:
        if fact.incident is None:
            if fact.batch <= batch:
                ordered = (ordered | set(fact.added)) - set(fact.released)
            let_go = (let_go | set(fact.released)) - set(fact.added)
    return tuple(sorted((suspected.keys() - let_go) | ordered))


def _best(occasions: list[Incident]) -> tuple[tuple[int, ...], list[int]] | None:
    """The largest set of incidents that share a sample, and those samples; None where no two incidents share one."""
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
