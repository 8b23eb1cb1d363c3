"""The ranks of this job, and the few blocking collectives outside the training loop.

One process without torch.distributed is a job of one rank. All ranks must call a method that says *collective* at the
same point; its result is the same on all ranks.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from rollback import errors
from rollback.environment import ENV_APART, ENV_RUN, host_name
from rollback.errors import RollbackError, UsageError
from rollback.system.threads import in_daemon

_PARCEL = 32 << 20  # bytes in one broadcast: small tensors together, large ones in parts
_PATIENCE, _MOMENT = 2.0, 0.0002  # seconds
MEET_EVERY = 0.2
"""Seconds after which ranks meet again while one of them does what takes long."""
_T = TypeVar("_T")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class InCollective:
    """Tensors in a collective. Make it before the collective starts."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = [(tensor, tensor._use_count()) for tensor in tensors]  # type: ignore[attr-defined]

    def take_back(self) -> None:
        """Wait until the backend's threads have released the tensors, which may be later than the collective's end.

        They need the interpreter's lock for it. At the interpreter's end they would never get it.
        """
        deadline = time.monotonic() + _PATIENCE
        while any(tensor._use_count() > count for tensor, count in self._tensors) and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(_MOMENT)


def announced_ranks() -> int:
    """How many ranks there are, by torchrun or whatever started this one; 1: nobody says so. Raises UsageError."""
    said = os.environ.get("WORLD_SIZE", "").strip() or "1"
    if not said.isdecimal():
        raise UsageError(
            f"the environment variable WORLD_SIZE is {said!r}, which is no number of ranks",
            hint="torchrun and rollback launch set it; elsewhere leave it out",
        )
    return int(said)


class Ranks:
    """The rank, the world size, and the device of the group's collectives."""

    def __init__(self) -> None:
        self.distributed = dist.is_initialized()
        expected = announced_ranks()
        if not self.distributed and expected > 1:
            raise UsageError(
                f"WORLD_SIZE is {expected} but torch.distributed is not initialised",
                hint="call torch.distributed.init_process_group() before making the Guard",
            )
        self.rank = dist.get_rank() if self.distributed else 0
        self.world_size = dist.get_world_size() if self.distributed else 1
        self.device = _device_of_group() if self.distributed else torch.device("cpu")
        self.on_this_host = list(range(self.world_size))
        """The ranks of this host, this rank included. Before `meet`, all ranks are assumed to share one."""
        self.host_count = 1
        self.apart = bool(os.environ.get(ENV_APART))
        """Whether every host has a run directory of its own."""
        self.sums_in_memory = 0
        """How many sums of the pulse this rank has begun in shared memory."""

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    def meet(self) -> None:
        """Collective: find out which ranks share a host and its memory."""
        own = os.environ.get(ENV_RUN) if self.apart else ""
        hosts = self.from_each(f"{host_name()} {_BOOT.read_text().strip() if _BOOT.exists() else ''} {own}")
        self.on_this_host = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.host_count = len(set(hosts))

    @property
    def first_of_host(self) -> bool:
        return self.rank == self.on_this_host[0]

    @property
    def first_in_directory(self) -> bool:
        """Whether this rank is the one that makes what is missing in its run directory."""
        return self.first_of_host if self.apart else self.is_rank_0

    def collectives_begun(self) -> int | None:
        """Number of collectives that this rank has begun, in its default process group or in memory that the ranks
        share; None: there is no group.

        Not collective. A rank that missed one is one behind. Any thread may call it, also while another thread waits.
        """
        if not self.distributed or not dist.is_initialized():
            return None
        try:
            group: Any = dist.distributed_c10d._get_default_group()
            return int(group._get_sequence_number_for_group()) + self.sums_in_memory
        except (RuntimeError, ValueError):  # a backend that does not count, or a group that is being destroyed
            return None

    @property
    def patience(self) -> timedelta:
        """For how long the script lets a collective of its default group wait."""
        try:
            group: Any = dist.distributed_c10d._get_default_group()
            told: timedelta = group._get_backend(self.device).options._timeout
        except (AttributeError, RuntimeError, ValueError):  # a backend that does not tell
            return default_pg_timeout
        return told

    def barrier(self) -> None:
        """Collective: wait for all ranks."""
        if self.distributed:
            dist.barrier()

    def all_of(self, condition: bool) -> bool:
        """Collective: whether the condition holds on every rank."""
        if not self.distributed:
            return condition
        count = torch.tensor([int(condition)], dtype=torch.int32, device=self.device)
        self.add_up(count)
        return int(count.item()) == self.world_size

    def add_up(self, numbers: Tensor) -> None:
        """Collective: put the sum over the ranks in their place."""
        if self.distributed:
            handed = InCollective(numbers)
            dist.all_reduce(numbers)
            handed.take_back()

    def agreed(self, act: Callable[[], _T]) -> _T:
        """Collective: what `act` gives on this rank, where it gives something on every rank.

        Raises, on all ranks, the error for the reader that it raises on the first rank that has one: else that rank
        would leave, and the others wait for it. `act` must call nothing collective of these ranks: one that raises
        before it would meet the others in another collective.
        """
        if not self.distributed:
            return act()
        given, met = None, None
        try:
            given = act()
        except RollbackError as error:
            met = error
        told = self.from_each(met and [_name_of(type(met)), met.fields])
        if (first := next(filter(None, told), None)) is not None:
            kind, fields = first
            raise getattr(errors, kind)(**fields) from met
        return cast(_T, given)

    def first_does(self, act: Callable[[], _T]) -> _T | None:
        """Collective: what `act` gives on rank 0; None on the others. Raises as `agreed`.

        For what takes long, such as a download. Rank 0 acts in a thread, and all ranks meet several times a second
        meanwhile: none waits in a collective for longer than that has time.
        """
        if not self.distributed:
            return act()
        ended = in_daemon(act, "rollback-first") if self.is_rank_0 else None
        while not self.all_of(ended is None or bool(wait([ended], MEET_EVERY).done)):
            pass
        return self.agreed(lambda: ended.result() if ended is not None else None)

    def first_fault(self, fault: str | None) -> str | None:
        """Collective: the fault of the first rank that has one; None: no rank has one."""
        return next(filter(None, self.from_each(fault)), None)

    def from_first(self, value: Any) -> Any:
        """Collective: rank 0's JSON value. (broadcast_object_list would pickle.)"""
        if not self.distributed:
            return json.loads(json.dumps(value))
        body = json.dumps(value).encode() if self.is_rank_0 else b""
        size = torch.tensor([len(body)], dtype=torch.int64, device=self.device)
        self._broadcast(size, 0)
        buffer = torch.zeros(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.is_rank_0:
            buffer.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        self._broadcast(buffer, 0)
        return json.loads(bytes(buffer.cpu().numpy()))

    def spread(self, tensors: Sequence[Tensor], source: int, to: int | None = None) -> None:
        """Collective: fill tensors from rank `source`. They must be contiguous, with the same types on all ranks.

        to: the only rank to be filled; only it and the source call then. Where there are several such pairs, each rank
        calls in the order of the sources, then of those that are filled.
        """
        flat = [item.detach().reshape(-1).view(torch.uint8) for item in tensors]
        for pieces in _parcels(flat):
            buffer = torch.empty(sum(map(len, pieces)), dtype=torch.uint8, device=self.device)
            parts = torch.split(buffer, [len(piece) for piece in pieces])
            if self.rank == source:
                for piece, part in zip(pieces, parts, strict=True):
                    part.copy_(piece)
            if to is None:
                self._broadcast(buffer, source)
            else:
                self._pass_on(buffer, source, to)
            if self.rank != source:
                for piece, part in zip(pieces, parts, strict=True):
                    piece.copy_(part)

    def from_each(self, value: Any) -> list[Any]:
        """Collective: every rank's JSON value, in rank order."""
        if not self.distributed:
            return [json.loads(json.dumps(value))]
        body = json.dumps(value).encode()
        size = torch.tensor([len(body)], dtype=torch.int64, device=self.device)
        sizes = self._gather(size).flatten().tolist()
        longest = max(1, *sizes)
        mine = torch.frombuffer(bytearray(body.ljust(longest)), dtype=torch.uint8).to(self.device)
        all_of_them = self._gather(mine).numpy()
        return [json.loads(bytes(item[:length])) for item, length in zip(all_of_them, sizes, strict=True)]

    def exchanged(self, value: Any, others: Iterable[int]) -> dict[int, Any]:
        """The JSON values of these ranks, each of which names this one, too. It costs nothing on others.

        Collective for them. Each rank takes its pairs in one order, as in `spread`.
        """
        body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        given: dict[int, Any] = {}
        for source, to in sorted(pair for rank in {*others} - {self.rank} for pair in permutations((rank, self.rank))):
            size = torch.tensor([len(body)], device="cpu")
            self.spread([size], source, to)
            text = body if source == self.rank else torch.zeros(int(size), dtype=torch.uint8, device="cpu")
            self.spread([text], source, to)
            if source != self.rank:
                given[source] = json.loads(bytes(text.numpy()))
        return given

    def _gather(self, mine: Tensor) -> Tensor:
        """Each rank's as a row, on the host: the device is waited for once, and not for each rank."""
        rows = mine.new_zeros(self.world_size, len(mine))
        to = [*rows]
        handed = InCollective(*to, mine)
        dist.all_gather(to, mine)
        handed.take_back()
        return rows.cpu()

    def _pass_on(self, buffer: Tensor, source: int, to: int) -> None:
        handed = InCollective(buffer)
        if self.rank == source:
            dist.send(buffer, to)
        else:
            dist.recv(buffer, source)
        handed.take_back()

    def _broadcast(self, buffer: Tensor, source: int) -> None:
        handed = InCollective(buffer)
        dist.broadcast(buffer, src=source)
        handed.take_back()


def _name_of(kind: type[RollbackError]) -> str:
    """Of a class that all rooms know, for an error of one's own."""
    return next(one.__name__ for one in kind.__mro__ if hasattr(errors, one.__name__))


def _device_of_group() -> torch.device:
    """Where the default group's collectives are. Over NCCL on a GPU: the one to which the script has bound the group,
    which need not be the one that this thread has chosen."""
    if "nccl" not in str(dist.get_backend()):
        return torch.device("cpu")
    bound: torch.device | None = getattr(dist.distributed_c10d._get_default_group(), "bound_device_id", None)
    return bound or torch.device("cuda", torch.cuda.current_device())


def _parcels(flat: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The bytes in order, as lists of pieces with at most _PARCEL bytes in each list."""
    parcel: list[Tensor] = []
    left = _PARCEL
    for item in flat:
        start = 0
        while start < len(item):
            piece = item[start : start + left]
            parcel.append(piece)
            start, left = start + len(piece), left - len(piece)
            if not left:
                yield parcel
                parcel, left = [], _PARCEL
    if parcel:
        yield parcel
