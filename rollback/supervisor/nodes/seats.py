"""Which nodes take part in an attempt, and with which rank among the nodes; who waits as a spare. Pure.

A node has a seat: its place among the ranks of the nodes. It keeps its seat from attempt to attempt, since what its
ranks have in memory is of use to the ranks of that seat only. Whoever is left over waits, as a spare.

| a node that had a seat | and a spare that is ready | then |
|---|---|---|
| follows, but is not ready yet | any | it is waited for |
| still ends its ranks, under a leader that is gone | any | the same |
| is lost | yes | the spare gets its seat at once |
| has not come yet, since the leader is new | yes | it is waited for a moment, then as above |
| has failed twice without progress in between | yes | the spare gets its seat; it waits, and is taken last |
| has failed twice without progress in between | no, but soon | the spare is waited for a moment, then as without |
| any of these | no | as without spares: the nodes that are there go on if they are enough, or wait |
"""

import re
from collections.abc import Collection, Iterable, Sequence


def rank_by_name(node: str) -> list[tuple[bool, int, str]]:
    """What nodes are sorted by where they have no seat yet: node-9 comes before node-10."""
    return [(not text.isdigit(), int(text) if text.isdigit() else 0, text) for text in re.split(r"(\d+)", node)]


def seats(
    before: Sequence[str],
    leader: str,
    there: Iterable[str],
    most: int,
    *,
    failing: Collection[str] = (),
    leader_first: bool = False,
) -> tuple[str, ...]:
    """The nodes of the next attempt, in the order of their ranks: at most `most`, the leader always among them.

    before: the seats of the last attempt. there: the nodes that are ready besides the leader. failing: nodes that are
    taken only where there are no others. leader_first: the leader must have rank 0.
    """
    others = sorted({*there} - {leader}, key=lambda node: (node in failing, node not in before, rank_by_name(node)))
    chosen = sorted([leader, *others[: most - 1]], key=rank_by_name)
    kept = {node: before.index(node) for node in chosen if node in before[: len(chosen)]}
    free = iter(sorted({*range(len(chosen))} - {*kept.values()}))
    seated = sorted(chosen, key={node: kept[node] if node in kept else next(free) for node in chosen}.__getitem__)
    if leader_first:
        place = seated.index(leader)
        seated[0], seated[place] = seated[place], seated[0]
    return tuple(seated)


def replacements(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, str]]:
    """Each node that lost its seat, with the node that came in for it."""
    out = [node for node in before if node not in after]
    new = [node for node in after if node not in before]
    by_seat = {node: after[place] for place, node in enumerate(before[: len(after)]) if node in out}
    rest = iter([node for node in new if node not in by_seat.values()])
    pairs = [(node, by_seat[node] if by_seat.get(node) in new else next(rest, "")) for node in out]
    return [(node, other) for node, other in pairs if other]


def awaited(
    before: Sequence[str],
    ready: Collection[str],
    coming: Collection[str],
    *,
    spares: Iterable[str],
    failing: Collection[str],
) -> list[str]:
    """The nodes to wait for though enough are ready: without them a seat would get another node than it should.

    before: the seats of the last attempt. ready: the leader too. coming: with a seat, and not known to be lost. spares:
    which are ready or will be in a moment.
    """
    able = [node for node in spares if node not in before and node not in failing]
    able.sort(key=lambda node: (node not in ready, rank_by_name(node)))
    replaced = [node for node in before if node in failing][: len(able)]
    wanted = [node for node in before if node in coming and node not in replaced] + able[: len(replaced)]
    return [node for node in wanted if node not in ready]
