"""Whether there can be last snapshots, and what a rank has for them."""

import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import RANK_ENDS_ELSEWHERE, EndMark, EndMarkPaths
from rollback.errors import RollbackError, message_of
from rollback.facts.training import NoLastSnapshot
from rollback.system.durable import write_file
from rollback.train.last_snapshot.device import NO_DEVICE, Device, NoAnswer, NoDevice, device_of
from rollback.train.last_snapshot.hosts import Hosts, HostsOfJob, place_of_store
from rollback.train.last_snapshot.peers import Peers
from rollback.train.last_snapshot.proof import StoreGone
from rollback.train.last_snapshot.small_state import SmallStateReader
from rollback.train.last_snapshot.writers import sweep_slots
from rollback.train.run import AttachedRun
from rollback.train.sharded import is_sharded
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.state import TrainingState

SWITCHED_OFF = "it is switched off (--last-snapshot off)"
NO_STORE = "the ranks are on several hosts, which can agree only by torchrun's own store, and these ranks have none"


@dataclass(frozen=True)
class Membership:
    """This rank's mark, and how it reaches the others. hosts: None where there is one host. close: of all of it."""

    paths: EndMarkPaths
    mark: EndMark
    peers: Peers
    hosts: Hosts | None
    device: NoDevice
    close: Callable[[], None]


def join(
    run: AttachedRun, state: TrainingState, snapshots: Snapshots, small_state: SmallStateReader
) -> Membership | str:
    """Collective: make the marks. Or why there can be no last snapshot; the same on all ranks, and nothing stays."""
    ranks = run.ranks
    if run.settings.last_snapshot == "off" or not run.settings.snapshot_every:
        return SWITCHED_OFF
    if not snapshots.memory.has_fast_tier:
        return "there is no fast tier"
    if (why := ranks.first_fault(_why_not(run, state) or small_state.why_not_copied())) is not None:
        return why
    pids = ranks.from_each(os.getpid())
    tier = snapshots.memory.fast_tier
    paths = end_marks.marks_of(tier.paths)
    peers, marks, devices = Peers(paths, ranks), list[EndMark](), [NO_DEVICE]
    closing = contextlib.ExitStack()

    def prepare() -> None:
        if ranks.first_of_host:
            end_marks.prepare(paths)
            sweep_slots(tier)

    def make() -> None:
        marks.append(EndMark(paths, ranks.rank))
        closing.callback(marks[-1].close)
        if (device := device_of(state)) is not None:
            devices.append(Device(device, paths, ranks.rank))
            closing.callback(devices[-1].close)

    def watch() -> None:
        closing.callback(peers.close)
        peers.watch(pids)

    with closing:
        for act in (prepare, make, watch):
            if (why := ranks.first_fault(_fault_of(act))) is not None:
                return why
        hosts = _meet_hosts(run, paths) if ranks.host_count > 1 else None
        if isinstance(hosts, str):
            return hosts
        if hosts is not None:
            closing.callback(hosts.close)
        return Membership(paths, marks[-1], peers, hosts, devices[-1], closing.pop_all().close)


def _why_not(run: AttachedRun, state: TrainingState) -> str | None:
    """Why the parameters of this job are not kept, in words; None: they are."""
    if run.ranks.host_count > 1 and place_of_store() is None:
        return NO_STORE
    parameters = list(state.model.parameters())
    if any(map(is_sharded, parameters)):
        return "the model is sharded"
    if state.cursor.reads_ahead:
        return (
            "the data can only be read in order, and whether they are at their end, where no run goes on, shows when "
            "the next batch is read"
        )
    if device_of(state) is None:
        return None
    if len({item.device for item in parameters}) > 1:
        return "the parameters of a rank are not all on one GPU"
    if len({item.device for item in state.model.buffers() if item.is_cuda} | {device_of(state)}) > 1:
        return "the buffers of a rank are on other GPUs, too"
    if run.settings.last_snapshot != "on":
        return "the parameters are on a GPU, where it has to be asked for: --last-snapshot on"
    return None


def _meet_hosts(run: AttachedRun, paths: EndMarkPaths) -> Hosts | str:
    ranks, place, why = run.ranks, place_of_store(), None
    assert place is not None
    here, keys = tuple(ranks.on_this_host), ranks.from_first(f"rollback-last/{uuid.uuid4()}")
    firsts = tuple(sorted({*ranks.from_each(here[0])}))
    job = HostsOfJob(place=place, keys=keys, hosts=firsts, own=here[0], ranks=here, attempt=run.attempt)
    hosts = Hosts(job)

    def rung() -> None:
        for rank in ranks.on_this_host:
            end_marks.ring_bell(paths, rank, RANK_ENDS_ELSEWHERE)

    try:
        if ranks.first_of_host:
            write_file(paths.hosts, job.model_dump_json().encode(), durable=False)
            hosts.wait_for_bell(rung, lambda text: note_stopped(run, text))
    except (StoreGone, OSError, RollbackError) as error:
        why = message_of(error)
    if (why := ranks.first_fault(why)) is not None:
        hosts.close()
    return why or hosts


def note_stopped(run: AttachedRun, why: str) -> None:
    """Journal that a rank leaves no marks any more. On rank 0; any thread."""
    run.record.note(NoLastSnapshot(reason=why), f"no last snapshots from now on: {why}")


def _fault_of(act: Callable[[], None]) -> str | None:
    try:
        act()
    except (OSError, RollbackError, NoAnswer) as error:
        return f"the memory for it cannot be had: {error}"
    return None
