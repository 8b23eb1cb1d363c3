"""The assembly of a guard's loop: what it is made of, and in which order its members hear of a rollback."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from rollback.checkpoints import tiers
from rollback.errors import RollbackError
from rollback.ring.drainer import Drainer
from rollback.ring.shard_copier import ShardCopier
from rollback.train.advice.advisor import Advisor
from rollback.train.advice.unkept_state import UnkeptState
from rollback.train.catalogue.catalogue import Catalogue
from rollback.train.catalogue.draining import end_draining, start_draining
from rollback.train.catalogue.remote import HostCopies, RemoteRing
from rollback.train.comm.pulse import Pulse
from rollback.train.comm.recorder import say
from rollback.train.data.batches import Batches
from rollback.train.data.cursor.generators import generators_beside, outside_of
from rollback.train.data.passes import Passes
from rollback.train.data.prefetch import PrefetchWatch
from rollback.train.data.skips import SkipList
from rollback.train.ending import TrainingEnd
from rollback.train.incidents.evidence import IncidentEvidence
from rollback.train.incidents.judge import Judge
from rollback.train.incidents.requests import Requests
from rollback.train.incidents.rewinder import Rewinder, needs_rehearsal
from rollback.train.introspection import own_variables
from rollback.train.last_snapshot.survivor import LastSnapshot
from rollback.train.loop import TrainingLoop
from rollback.train.pass_rehearsal import PassRehearsal
from rollback.train.probe.batches import ProbeUpdates
from rollback.train.probe.prober import Prober
from rollback.train.process.failure_record import FailureRecorder
from rollback.train.process.heartbeat import HeartbeatWriter
from rollback.train.process.stopping import StopRequest
from rollback.train.run import AttachedRun
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.snapshots.schedule import SnapshotSchedule
from rollback.train.snapshots.tier_choice import open_tier
from rollback.train.snapshots.unseen_writes import UnseenWrites
from rollback.train.state.state import TrainingState
from rollback.train.step import StepInProgress
from rollback.train.updates.hooks import weak_hook
from rollback.train.updates.learning_rate import LoweredRate
from rollback.train.updates.optimizer import Updates
from rollback.wording import counted


def _checkpoint_side(
    run: AttachedRun, state: TrainingState, show: Callable[[str], None], if_refused: ExitStack
) -> tuple[CheckpointManager, SnapshotSchedule, Drainer | ShardCopier | None]:
    """Collective: what takes and manages checkpoints, and what copies them to the durable ring, unless another process
    does. show: gets what this rank is doing, for its heartbeat."""
    paths, ranks, record, settings = run.paths, run.ranks, run.record, run.settings
    open_own_tier = partial(open_tier, paths, ranks, run.run_id, tiers.base_of(settings.fast_tier))
    tier = open_own_tier()
    drainer = start_draining(paths, settings, record, ranks)
    if_refused.callback(end_draining, drainer)
    fast, held = None, run.held
    if tier[0] is not None:
        taken = [item.slot for item in held if item.slot is not None]
        fast = FastTier(tier[0], ranks.rank, leads=ranks.first_of_host, here=ranks.on_this_host, taken=taken)
    else:  # what is in slots alone is not lost: a later attempt may find it
        held = [item._replace(slot=None) for item in held if item.in_ring]
    if (out_of_reach := len(run.held) - len(held)) and ranks.is_rank_0:
        say(
            f"{counted(out_of_reach, 'checkpoint is', 'checkpoints are')} in memory alone, and this attempt cannot go "
            f"back there, since it has no fast tier ({tier[1]}); the next checkpoint is taken as soon as there is room "
            "for it"
        )
    snapshots = Snapshots(paths, ranks, state.finite, run.next_seq, run.attempt, fast)
    if_refused.callback(snapshots.close)
    catalogue = Catalogue(settings.probation, held)
    remote = RemoteRing(paths, ranks, record, settings.ring, show) if settings.ring else None
    copies = HostCopies(paths, ranks, settings.ring, show) if ranks.apart else None
    manager = CheckpointManager(run, snapshots, catalogue, remote, copies)
    manager.wanted = bool(out_of_reach)
    return manager, SnapshotSchedule(run, state, manager, tier, open_own_tier), drainer


def assemble(
    run: AttachedRun,
    state: TrainingState,
    model: nn.Module,
    loader: Any,
    max_steps: int | None,
    if_refused: ExitStack,
    refuse: Callable[[RollbackError], object],
) -> TrainingLoop:
    """Collective: make the loop of a guard that has attached to this run.

    if_refused: its exits are what is to be done where no guard comes of it, whatever was raised: the script may catch
    that and go on, without a guard or with another one. refuse: ends the job from within the script's training.
    """
    stop = StopRequest()
    if_refused.callback(stop.give_up)  # behind all else: it may end this process
    if run.lock is not None:
        if_refused.callback(run.lock.release)
    if_refused.callback(run.record.close)
    cursor, optimizer, objects = state.cursor, state.optimizer, state.objects
    rank = run.ranks.rank
    heartbeat = HeartbeatWriter(run.paths, run.ranks, run.attempt, state.counters.step, cursor.batch)
    if_refused.callback(heartbeat.stop)
    if_refused.callback(heartbeat.end, in_hand=False)
    failures = FailureRecorder(run.paths.failure(run.attempt, rank), rank, run.attempt, heartbeat, cursor)
    if_refused.push(failures.give_back)
    run.ranks.agreed(heartbeat.start)
    skips, updates = SkipList(run), Updates(optimizer, objects.get("scaler"), model)
    batches = Batches(run, loader, cursor, skips)
    if_refused.callback(batches.close)
    checkpoints, schedule, drainer = _checkpoint_side(run, state, heartbeat.turn_to, if_refused)
    snapshots = checkpoints.snapshots
    evidence = IncidentEvidence(run, state.model, run.settings.evidence_bytes)
    pulse = Pulse(run.ranks, next((p.device for p in model.parameters()), torch.device("cpu")))
    variables = list(own_variables())
    generators = generators_beside(state.modules, {"optimizer": optimizer, **objects}, loader, variables)
    if not cursor.reads_ahead:  # else they may have drawn for a batch that belongs to no step yet
        state.kept.keep_generators(generators)
    elif cursor.kind == "stateful":
        generators = outside_of(loader, generators)
    advisor = Advisor(state, updates, model, UnkeptState(state, generators, variables))
    kept = ProbeUpdates(wanted=run.settings.probe and not run.settings.observe_only)
    judge = Judge(
        run, pulse, state.sentinel, state.finite, checkpoints, evidence, advisor, skips, kept.judged, cursor.batch,
        max_steps,
    )  # fmt: skip
    lowered_rate = LoweredRate(optimizer, lambda: state.counters.step, run.history.lowered)
    if_refused.callback(lowered_rate.end)
    prefetch = PrefetchWatch(model, optimizer, updates.telltale, refuse)
    step = StepInProgress(state, updates, evidence, advisor, prefetch, heartbeat)
    passes = Passes(cursor, objects.values(), state.switches)
    requests = Requests(run, stop, judge, checkpoints, skips, cursor)
    training_end = TrainingEnd(run, state, schedule, checkpoints, judge, max_steps)
    unseen_writes = UnseenWrites(state, snapshots, model, updates.telltale)
    last_snapshot = LastSnapshot(
        run, state, snapshots, pulse, batches, lambda: judge.timeline, judge.judge_ahead, lambda: updates.telltale,
        unseen_writes, lambda: step.batches >= state.counters.batches_per_step,
    )  # fmt: skip
    if_refused.callback(last_snapshot.leave)
    failures.before_the_end = weak_hook(last_snapshot.raised)
    rehearsing = needs_rehearsal(state.broadcasts.wrappers, run.ranks.world_size, state.counters.step)
    rewinder = Rewinder(run, state, judge, checkpoints, rehearsing=rehearsing)
    pass_rehearsal = PassRehearsal(state, step, rewinder, schedule)
    prober = Prober(run, state, pulse, kept, judge, rewinder, step)
    # The judge journals the outcome of an incident before the operator gets an answer. Passes step the script's
    # schedulers. The script itself (`on_rollback`) comes last, when everything else is done.
    rewinder.before = last_snapshot.note_change
    rewinder.subscribers += [
        last_snapshot.rollback_applied, kept.rollback_applied, evidence.rollback_applied,
        batches.rollback_applied, checkpoints.rollback_applied, judge.rollback_applied, passes.rollback_applied,
        requests.rollback_applied, step.rollback_applied, schedule.rollback_applied, lowered_rate.rollback_applied,
    ]  # fmt: skip
    if run.restored is not None:
        passes.resume(left=state.counters.epoch_left, strayed=rewinder.written)
    return TrainingLoop(
        run, state, model, batches, passes, step, advisor, checkpoints, schedule, drainer, pulse, judge, rewinder,
        prober, pass_rehearsal, requests, unseen_writes, last_snapshot, training_end, failures, lowered_rate,
    )  # fmt: skip
