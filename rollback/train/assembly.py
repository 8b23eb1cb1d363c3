"""The assembly of a guard: what it is made of, and in which order its members hear of a rollback."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollback.checkpoints import tiers
from rollback.checkpoints.format.manifest import Manifest
from rollback.ring.drainer import Drainer
from rollback.ring.helper import Helper
from rollback.train.catalogue.catalogue import Catalogue, HeldAtStart
from rollback.train.catalogue.draining import start_draining
from rollback.train.catalogue.remote import HostCopies, RemoteRing
from rollback.train.comm.pulse import Pulse
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import say
from rollback.train.data.batches import Batches
from rollback.train.data.passes import Passes
from rollback.train.data.prefetch import PrefetchWatch
from rollback.train.data.skips import SkipList
from rollback.train.ending import TrainingEnd
from rollback.train.incidents.evidence import IncidentEvidence
from rollback.train.incidents.judge import Judge
from rollback.train.incidents.requests import Requests
from rollback.train.incidents.rollback import Rewinder, needs_rehearsal
from rollback.train.introspection import own_variables
from rollback.train.last_snapshot.survivor import LastSnapshot
from rollback.train.pass_rehearsal import PassRehearsal
from rollback.train.prober import Prober
from rollback.train.process.heartbeat import HeartbeatWriter
from rollback.train.process.stopping import Departure, StopRequest
from rollback.train.run import AttachedRun
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.snapshots.schedule import SnapshotSchedule
from rollback.train.snapshots.tier_choice import open_tier
from rollback.train.snapshots.unseen_writes import UnseenWrites
from rollback.train.state.state import TrainingState
from rollback.train.state.unkept import Unkept, generators_beside
from rollback.train.step import StepInProgress
from rollback.train.updates.advice import Advisor
from rollback.train.updates.hooks import weak_hook
from rollback.train.updates.layers import Layers
from rollback.train.updates.learning_rate import LoweredRate
from rollback.train.updates.optimizer import Updates


@dataclass(frozen=True)
class CheckpointSide:
    """The parts of a guard that see to its checkpoints."""

    snapshots: Snapshots
    """Snapshots on their way to becoming checkpoints."""
    manager: CheckpointManager
    """The manager of the existing checkpoints."""
    schedule: SnapshotSchedule
    """Decides when the next snapshot is taken."""
    drainer: Drainer | Helper | None
    """Copies checkpoints to the durable ring; None: another process does."""


def _checkpoint_side(run: AttachedRun, state: TrainingState, show: Callable[[str], None]) -> CheckpointSide:
    """Collective: make these parts. show: gets what this rank is doing, for its heartbeat."""
    paths, ranks, record, settings = run.paths, run.ranks, run.record, run.settings
    tier = open_tier(paths, ranks, run.run_id, tiers.base_of(settings.fast_tier))
    drainer = start_draining(paths, settings, record, ranks)
    fast, taken, held = None, run.slots.values(), run.manifests
    if tier[0] is not None:
        fast = FastTier(tier[0], ranks.rank, leads=ranks.first_of_host, here=ranks.on_this_host, taken=taken)
    else:  # what is in slots alone is not lost: a later attempt may find it
        held = [manifest for manifest in run.manifests if manifest.name in run.in_ring]
    if out_of_reach := [manifest.name for manifest in run.manifests if manifest not in held]:
        _tell_what_is_out_of_reach(out_of_reach, tier[1], ranks)
    snapshots = Snapshots(paths, ranks, run.next_seq, run.attempt, fast)
    in_slots = run.slots if fast is not None else {}
    catalogue = Catalogue(settings.probation, [_as_held(run, item, in_slots.get(item.name)) for item in held])
    remote = RemoteRing(paths, ranks, record, settings.ring, show) if settings.ring else None
    copies = HostCopies(paths, ranks, settings.ring, show) if ranks.apart else None
    manager = CheckpointManager(run, snapshots, catalogue, remote, copies)
    manager.wanting = bool(out_of_reach)
    return CheckpointSide(snapshots, manager, SnapshotSchedule(run, state, manager, tier), drainer)


def _as_held(run: AttachedRun, manifest: Manifest, slot: int | None) -> HeldAtStart:
    """The healthy verdicts that it has had are those of the steps behind it that this attempt does not train again."""
    behind = max(0, run.restored.step - manifest.step) if run.restored is not None else 0
    return HeldAtStart(manifest, manifest.name in run.history.good, slot, min(run.healthy_before, behind))


def _tell_what_is_out_of_reach(names: list[str], why: str, ranks: Ranks) -> None:
    if ranks.first:
        count = "1 checkpoint is" if len(names) == 1 else f"{len(names)} checkpoints are"
        say(
            f"{count} in memory alone, and this attempt cannot go back there, since it has no fast tier ({why}); the "
            "next checkpoint is taken as soon as there is room for it"
        )


class GuardAssembly:
    """All that a guard is made of, for the run that it has attached to. Making it is collective."""

    def __init__(
        self, run: AttachedRun, state: TrainingState, model: nn.Module, loader: Any, max_steps: int | None
    ) -> None:
        self._run, self._state, self._model = run, state, model
        self.departure = Departure()
        cursor, optimizer, objects = state.cursor, state.optimizer, state.objects
        stop, heartbeat = StopRequest(), HeartbeatWriter(run.paths, run.ranks, run.attempt, cursor)
        layers, skips = Layers(state.model), SkipList(run)
        updates = Updates(optimizer, objects.get("scaler"), model, layers)
        self._batches = Batches(run, loader, cursor, skips)
        self._checkpoints = _checkpoint_side(run, state, heartbeat.turn_to)
        manager, schedule = self._checkpoints.manager, self._checkpoints.schedule
        evidence = IncidentEvidence(run, state.model, run.settings.evidence_bytes)
        self._pulse = pulse = Pulse(run.ranks, next((p.device for p in model.parameters()), torch.device("cpu")))
        variables = list(own_variables())
        generators = generators_beside(state, loader, variables)
        if not cursor.reads_ahead:  # else they may have drawn for a batch that belongs to no step yet
            state.kept.keep_generators(generators)
        self._unkept = Unkept(state, generators, variables)
        self._judge = Judge(
            run, pulse, state.sentinel, state.finite, manager, evidence,
            Advisor(state.model, optimizer, layers, self._unkept), skips, cursor.batch, max_steps,
        )  # fmt: skip
        lowered_rate = LoweredRate(optimizer, lambda: state.counters.step, run.history.lowered)
        prefetch = PrefetchWatch(model, optimizer, updates.telltale)
        self._step_in_progress = StepInProgress(state, updates, evidence, prefetch, heartbeat)
        heartbeat.evaluates = weakref.WeakMethod(self._step_in_progress.evaluates)
        self._passes = Passes(cursor, objects.values(), state.gradients)
        self._requests = Requests(run, stop, self._judge, manager, skips, cursor)
        self._end = TrainingEnd(run, state, schedule, manager, self._judge, max_steps)
        self._unseen = UnseenWrites(state, self._checkpoints.snapshots, model, updates.telltale)
        self._last = LastSnapshot(
            run, state, self._checkpoints.snapshots, lambda: self._judge.timeline, pulse.sent,
            pulse.await_sum, self._judge.foresee, updates.telltale, self._unseen,
            lambda: self._step_in_progress.batches >= state.counters.batches_per_step, self._batches.may_be_marked,
        )  # fmt: skip
        heartbeat.failure_recorder.before_the_end = weak_hook(self._last.raised)
        rehearsing = needs_rehearsal(model, run.ranks.world_size, state.counters.step)
        self._rewinder = Rewinder(run, state, self._judge, manager, rehearsing=rehearsing)
        self._pass_rehearsal = PassRehearsal(state, self._step_in_progress, self._rewinder, schedule)
        self._prober = Prober(run, model, state, pulse, self._judge, self._rewinder, self._step_in_progress)
        # The judge journals the outcome of an incident before the operator gets an answer. Passes step the script's
        # schedulers. The script itself (`on_rollback`) comes last, when everything else is done.
        self._rewinder.before = self._last.note_change
        self._rewinder.subscribers += [
            self._last.rollback_applied, self._judge.kept.rollback_applied,
            evidence.rollback_applied, self._batches.rollback_applied, manager.rollback_applied,
            self._judge.rollback_applied, self._passes.rollback_applied, self._requests.rollback_applied,
            self._step_in_progress.rollback_applied, schedule.rollback_applied, lowered_rate.rollback_applied,
        ]  # fmt: skip
        if run.restored is not None:
            self._passes.resume(left=state.counters.epoch_left, strayed=self._rewinder.written)
