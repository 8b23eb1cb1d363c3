"""Combines the evidence of all ranks about an incident: where it began, and how large the gradients were."""

from collections.abc import Mapping
from typing import get_args

from rollback.inspect.audit.report import BatchFile, EvidenceEntry, LeadingTensor
from rollback.inspect.document import fields_of
from rollback.rundir.evidence import MOST_WITNESSES, Explosion, Norms, Origin, RankEvidence, Where
from rollback.rundir.paths import shard_name
from rollback.wording import ranks_in_words

_ORDER = get_args(Where)
_KINDS: tuple[Explosion, ...] = ("nonfinite", "overflow", "large")
_SHOWN = 5
_NAMED = 8  # ranks
_WITNESSES = "each of the {} ranks that wrote evidence"
_IN_WORDS = {
    "nonfinite": "elements that are not finite",
    "overflow": "finite elements whose norm overflows",
    "large": "a large norm",
}


def put_together(seen: Mapping[int, RankEvidence], world_size: int | None) -> EvidenceEntry | None:
    """The evidence of an incident from that of the ranks; None: no rank has any."""
    if not seen:
        return None
    origins = {rank: item.origin for rank, item in seen.items() if item.origin is not None}
    ranks = _first(origins)
    origin = origins[ranks[0]] if ranks else None
    count = world_size or len(seen)
    everywhere = len(ranks) > 1 and len(ranks) == min(count, MOST_WITNESSES)
    named = ranks_in_words(ranks, _NAMED)
    who = named if not everywhere else "every rank" if len(ranks) == count else _WITNESSES.format(len(ranks))
    teller = seen[ranks[0] if ranks else min(seen)]
    norms = teller.gradients
    kinds = {step.kind for step in teller.steps if step.step == teller.gradients_step}
    kind = next((kind for kind in _KINDS if kind in kinds), None)
    leading = _leading(norms)
    return EvidenceEntry(
        began=_began(origin, who) if origin else _large(kind, norms, teller, leading),
        **fields_of(origin, "where", "step", "name"),
        ranks=[] if everywhere else ranks,
        explosion=kind,
        exploding={each: len(norms.exploding.get(each, ())) for each in _KINDS} if norms else {},
        leading=leading,
        vanishing=len(norms.vanishing) if norms else 0,
        smallest_gradient=norms.smallest[0].norm if norms and norms.smallest else None,
        largest_gradient=norms.largest[0].norm if norms and norms.largest else None,
        smallest_weight=teller.weights.smallest[0].norm if teller.weights.smallest else None,
        largest_weight=teller.weights.largest[0].norm if teller.weights.largest else None,
        batches=[
            BatchFile(
                rank=rank,
                step=item.batch.step,
                file=f"incidents/{item.incident:04d}/{shard_name(rank)}" if item.batch.file else None,
                tensors=len(item.batch.tensors),
                left_out=[f"{part.name}: {part.reason}" for part in item.batch.left_out],
            )
            for rank, item in sorted(seen.items())
        ],
    )


def _first(origins: Mapping[int, Origin]) -> list[int]:
    """The ranks on which it began: the earliest; for gradients, those whose own gradient was not finite."""
    if not origins:
        return []

    def place(origin: Origin) -> tuple[float, int]:
        return (float("inf") if origin.step is None else origin.step, _ORDER.index(origin.where))

    earliest = min(map(place, origins.values()))
    ranks = sorted(rank for rank, origin in origins.items() if place(origin) == earliest)
    return [rank for rank in ranks if origins[rank].local] or ranks


def _leading(norms: Norms | None) -> list[LeadingTensor]:
    if norms is None:
        return []
    sizes = {item.name: item.norm for item in norms.each}
    named = [(name, kind) for kind in _KINDS for name in norms.exploding.get(kind, ())]
    found = [LeadingTensor(name=name, norm=sizes.get(name), kind=kind) for name, kind in named[:_SHOWN]]
    return found or [LeadingTensor(name=item.name, norm=item.norm, kind=None) for item in norms.largest[:_SHOWN]]


def _began(origin: Origin, who: str) -> str:
    where = {
        "loss": "the loss (before backward)",
        "gradients": f"the gradients of {origin.name}" if origin.name else "the gradients, between backward and step",
        "parameters": f"the parameters: {origin.name}",
        "buffers": f"the buffers: {origin.name}",
    }[origin.where]
    step = "" if origin.step is None else f", in step {origin.step}"
    return f"began in {where} on {who}{step}"


def _large(kind: Explosion | None, norms: Norms | None, teller: RankEvidence, leading: list[LeadingTensor]) -> str:
    if norms is None:
        return "everything was finite; the gradients of its first steps are not known"
    total = "unknown" if norms.total is None else f"{norms.total:.4g}"
    lead = f", led by {leading[0].name}" if leading else ""
    what = f"{_IN_WORDS[kind]} ({total}{lead})" if kind else f"no large gradient (norm {total}{lead})"
    return f"everything was finite; {what} in step {teller.gradients_step}"
