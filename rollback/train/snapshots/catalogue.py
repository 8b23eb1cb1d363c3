"""The checkpoints that a run holds, and which of them are good: the ring as every rank sees it.

Never looks at the disk. It is fed with landings and verdicts, which are the same on all ranks, so that all ranks hold
the same view.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rollback.checkpoints.manifest import Manifest
from rollback.checkpoints.retention import choose_evictions
from rollback.policy import PolicyCheckpoint
from rollback.rundir.paths import parse_checkpoint_name


class Catalogue:
    """Committed checkpoints of the present timeline with their status.

    probation: healthy verdicts on steps after a checkpoint that make it good.
    """

    def __init__(self, probation: int, manifests: Iterable[Manifest], good: Iterable[str]) -> None:
        self._probation = probation
        self._held = {manifest.name: manifest for manifest in manifests}
        self._good = {name for name in good if name in self._held}
        self._left: dict[str, Manifest] = {}
        self._healthy: dict[str, int] = {name: 0 for name in self._held if name not in self._good}

    def begin(self, name: str) -> None:
        """A snapshot was taken: its probation runs from now, not from its commit."""
        self._healthy[name] = 0

    def land(self, manifest: Manifest) -> bool:
        """A checkpoint was committed. Whether it is good at once: the state before any step is known to be."""
        self._held[manifest.name] = manifest
        if manifest.step == 0:
            self._good.add(manifest.name)
            del self._healthy[manifest.name]
        return manifest.step == 0

    def drop(self, name: str) -> None:
        self._left.pop(name, None)
        self._held.pop(name, None)
        self._healthy.pop(name, None)
        self._good.discard(name)

    def leave(self, name: str) -> None:
        """A checkpoint leaves the fast tier; if it is good, it may be gone back to where the ring has it."""
        left = self._held[name] if name in self._good else None
        self.drop(name)
        if left is not None:
            self._left[name] = left

    def admit(self, manifest: Manifest, good: bool) -> None:
        """A checkpoint may be gone back to that was held no longer, or never by this attempt."""
        if manifest.name in self._held:
            return
        self._left.pop(manifest.name, None)
        self._held[manifest.name] = manifest
        if good:
            self._good.add(manifest.name)
        else:
            self._healthy[manifest.name] = 0

    def consult(self, in_ring: Collection[str], in_slots: Collection[str]) -> None:
        """What the ring holds, as one rank saw it and told all: the good ones that left the fast tier are back."""
        for name in list(self._held):
            if name not in in_ring and name not in in_slots:
                self.drop(name)
        for name in [name for name in self._left if name in in_ring]:
            self._held[name] = self._left.pop(name)
            self._good.add(name)

    def judge(self, healthy: bool, onset: int | None) -> list[Manifest]:
        """Count a verdict; the checkpoints that became good by it.

        An onset (a watch or a call) holds all back: those taken after it start again when it has passed, and those
        before it wait, since a verdict on what they led to is pending.
        """
        if not healthy:
            for name in self._healthy:
                _, step = parse_checkpoint_name(name) or (0, 0)
                if onset is not None and step > onset:
                    self._healthy[name] = 0
            return []
        passed = []
        for name in list(self._healthy):
            self._healthy[name] += 1
            if self._healthy[name] >= self._probation and name in self._held:
                del self._healthy[name]
                self._good.add(name)
                passed.append(self._held[name])
        return passed

    def about_to_pass(self) -> list[str]:
        """The checkpoints that the next healthy verdict makes good."""
        passing = self._probation - 1
        return [name for name, healthy in self._healthy.items() if healthy >= passing and name in self._held]

    def restart_probation(self) -> None:
        """The steps after the candidates will be run again: what was counted of them does not count any more."""
        self._healthy = dict.fromkeys(self._healthy, 0)

    def as_held(self) -> list[PolicyCheckpoint]:
        """Oldest first, as the policy wants them."""
        return [PolicyCheckpoint(m.name, m.step, m.batch, m.name in self._good) for m in self._in_order()]

    def manifest(self, name: str) -> Manifest:
        return self._held[name]

    def newest(self) -> Manifest | None:
        return self._in_order()[-1] if self._held else None

    def surplus(self, keep: int, counted: Collection[str] | None = None) -> list[tuple[str, str]]:
        """What must leave a ring (by default all that is held) of capacity `keep`, with the reason."""
        names = [m.name for m in self._in_order() if counted is None or m.name in counted]
        return choose_evictions(names, self._good, (), keep)

    def _in_order(self) -> list[Manifest]:
        return sorted(self._held.values(), key=lambda manifest: manifest.seq)
