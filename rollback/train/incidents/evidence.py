"""What a rank keeps of its last updates, and what it writes of them when an incident is called.

An incident is called one step after it shows at the earliest, a spike `patience` steps after it began. By then the
gradients are gone. So the rank keeps, for the last updates, the losses, the vector of gradient norms, and references to
the batches: on the device and unread, until somebody asks. Batches are bounded in bytes. When it gets tight the step
that the sentinel suspects stays, and older ones go first.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollback.checkpoints.format.shard import write_shard
from rollback.facts.training import Incident
from rollback.rundir.evidence import (
    BatchKept,
    Explosion,
    KeptTensor,
    LeftOut,
    NamedNorm,
    Norms,
    Origin,
    RankEvidence,
    StepSeen,
    write_evidence,
)
from rollback.system import files
from rollback.train.comm.recorder import say
from rollback.train.data.cursor.base import Indices
from rollback.train.data.cursor.digest import is_in_one_piece
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.run import AttachedRun
from rollback.train.sharded import detached
from rollback.train.snapshots.capture import piece_of
from rollback.train.state import tree
from rollback.train.state.nonfinite import kind_in
from rollback.train.updates.gradients import GradientNorms, norm_of_each

_STEPS = 64  # remembered; of each a few hundred numbers
_INCIDENTS = 32  # of a run, whose batches are kept
_LISTED = 8
_EACH = 10_000
_TENSORS = 1024  # in a batch
_DEPTH = 8
_PLAIN = frozenset((int, float, bool, str, bytes, type(None)))
_VANISHING, _EXPLODING = 1e-8, 100.0
_LARGEST_NORM = {torch.float16: 65504.0, torch.float64: math.inf}
_LARGEST_NORM_ELSE = math.sqrt(torch.finfo(torch.float32).max)


@dataclass
class _Step:
    step: int = 0
    losses: list[Tensor | float] = field(default_factory=list)
    gradients: GradientNorms | None = None
    parts: list[tuple[str, Tensor, int]] = field(default_factory=list)
    """Tensors of its batches: name, tensor, and its version as it was handed out."""
    left_out: list[LeftOut] = field(default_factory=list)
    indices: list[Indices] = field(default_factory=list)
    nbytes: int = 0
    """Of the parts."""

    def samples(self) -> set[int]:
        """Data set indices of its batches; where it is known which of them did it, of those alone."""
        batches = self.indices
        if len(batches) == len(self.losses):
            broken = [own for own, loss in zip(batches, self.losses, strict=True) if not math.isfinite(loss)]
            batches = broken or batches
        return {index for own in batches for index in own or ()}


class IncidentEvidence:
    """One rank's memory of its last updates. Nothing here is collective; only `harm` and `write` wait for the device.

    limit: bytes of finished steps' batches that are held, and so the most that an incident's file has; 0 holds none.
    """

    def __init__(self, run: AttachedRun, model: nn.Module, limit: int) -> None:
        self._paths = run.paths
        self._rank = run.ranks.rank
        self._alone = not run.ranks.distributed
        self._attempt = run.attempt
        self._model = model
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._order = {name: place for place, name in enumerate(self._names.values())}
        self._limit = limit
        self._steps: list[_Step] = []
        self._held = 0  # bytes of the finished steps' batches; 64 objects out of cold caches at each step cost more
        self._in_progress = _Step()
        self._suspected: int | None = None
        self._failed = False

    def keep_batch(self, position: int, batch: Any, indices: Indices = None) -> None:
        """A batch is handed out. indices: of the data set, where there are any."""
        step = self._in_progress
        step.indices.append(indices)
        if self._limit == 0:
            return
        found: list[tuple[str, Tensor | str]] = []
        _find_tensors(batch, str(position), found)
        for count, (name, value) in enumerate(found):
            if count >= _TENSORS:
                step.left_out.append(LeftOut(name=name, reason=f"more than {_TENSORS} tensors"))
                break
            if isinstance(value, str):
                step.left_out.append(LeftOut(name=name, reason=value))
                continue
            if value.nbytes > (left := self._limit - step.nbytes):
                reason = f"{value.nbytes} bytes, and {left} of the limit were left"
                step.left_out.append(LeftOut(name=name, reason=reason))
                continue
            # A loader's workers hand over shared memory, which is scarce where /dev/shm is small: give it back.
            # (`Tensor.is_shared` takes several times as long.)
            tensor = value.clone() if value.is_cpu and value.untyped_storage().is_shared() else value
            step.parts.append((name, tensor, 0 if tensor.is_inference() else tensor._version))
            step.nbytes += tensor.nbytes

    def end_step(self, step: int, losses: list[Tensor | float], gradients: GradientNorms | None) -> None:
        """Note that an update is over. The batches kept since the last update belong to it."""
        ended, self._in_progress = self._in_progress, _Step()
        ended.step, ended.losses, ended.gradients = step, losses, gradients
        self._steps.append(ended)
        self._held += ended.nbytes
        if self._held > self._limit:
            self._make_room()
        if len(self._steps) > _STEPS:
            self._held -= self._steps.pop(1 if self._steps[0].step == self._suspected else 0).nbytes

    def suspect(self, onset: int | None) -> None:
        """Note the step at which the sentinel suspects the trouble began; None: it suspects no step."""
        self._suspected = onset

    def rollback_applied(self, event: RollbackApplied) -> None:
        """What came after that step has not happened. Nothing of a probe was kept."""
        if event.cause is RollbackCause.PROBE:
            return
        self._steps = [step for step in self._steps if step.step < event.step]
        self._held = sum(step.nbytes for step in self._steps)
        self._in_progress = _Step()
        self._suspected = None

    def samples(self, steps: Collection[int]) -> list[int]:
        """Data set indices of what this rank was handed out in these steps, as far as it remembers."""
        return sorted(set().union(*(step.samples() for step in self._steps if step.step in steps)))

    def harm(self, incident: Incident) -> float:
        """How much this rank itself saw of a trouble until it was detected, since all see it in the next step: its
        largest loss, infinite if that or its own gradient (before the ranks' were averaged) was not finite."""
        steps = [step for step in self._steps if incident.onset_step <= step.step <= incident.detection_step]
        own = [step.gradients.own for step in steps if step.gradients and step.gradients.own is not None]
        losses = [float(loss) for step in steps for loss in step.losses]
        if not all(map(math.isfinite, losses)) or not all(map(math.isfinite, own)):
            return math.inf
        return max(losses, default=-math.inf)

    def write(self, incident: Incident) -> None:
        """Write what this rank saw of an incident. A failure is reported once and raises nothing: behind it the plan is
        journalled, which another attempt carries out where this one cannot."""
        steps = [step for step in self._steps if step.step >= incident.onset_step]
        try:
            files.make_directory(self._paths.incident(incident.incident))
            batch = self._write_batch(incident.incident, steps[0] if steps else None)
            write_evidence(self._paths.evidence(incident.incident, self._rank), self._account(incident, steps, batch))
        except (OSError, ValueError, RuntimeError) as error:  # of a device without room for what is computed, too
            if not self._failed:
                # Most errors of a device itself are raised again by whatever it is asked next.
                then = " if the device still answers" if isinstance(error, torch.AcceleratorError) else ""
                path = self._paths.evidence(incident.incident, self._rank)
                say(f"writing the evidence {path} failed ({error}); training goes on{then}")
            self._failed = True

    def _make_room(self) -> None:
        for step in self._steps[:-1]:
            if step.parts and step.step != self._suspected:
                self._let_go(step, "later batches needed the room")
            if self._held <= self._limit:
                return
        self._let_go(self._steps[-1], "no room beside the batches of the suspected step")

    def _let_go(self, step: _Step, why: str) -> None:
        """Keep no batch of this step."""
        step.left_out.append(LeftOut(name="all", reason=why))
        self._held -= step.nbytes
        step.parts, step.nbytes = [], 0

    # Writing down --------------------------------------------------------------------------------------------------

    def _account(self, incident: Incident, steps: list[_Step], batch: BatchKept) -> RankEvidence:
        norms = {
            step.step: self._norms(step.gradients.parameters, step.gradients.each.double().tolist())
            for step in steps if step.gradients
        }  # fmt: skip
        kinds = {step.step: _kind(norms[step.step], step.gradients) for step in steps if step.gradients}
        exploded = next((step for step, kind in kinds.items() if kind), next(iter(kinds), None))
        weights = self._weights()
        buffers = [
            name for name, item in self._model.named_buffers() if tree.is_storable(item) and kind_in(item) is not None
        ]
        return RankEvidence(
            incident=incident.incident,
            rank=self._rank,
            attempt=self._attempt,
            timeline=incident.timeline,
            onset_step=incident.onset_step,
            detection_step=incident.detection_step,
            origin=self._origin(steps, norms, kinds, weights, buffers),
            steps=[
                StepSeen(
                    step=step.step,
                    losses=[float(loss) for loss in step.losses],
                    grad_norm=float(step.gradients.total) if step.gradients else None,
                    kind=kinds.get(step.step),
                )
                for step in steps
            ],
            gradients=None if exploded is None else norms[exploded],
            gradients_step=exploded,
            weights=weights,
            nonfinite_buffers=buffers,
            batch=batch,
        )

    def _origin(
        self,
        steps: list[_Step],
        norms: Mapping[int, Norms],
        kinds: Mapping[int, Explosion | None],
        weights: Norms,
        buffers: list[str],
    ) -> Origin | None:
        for step in steps:
            if not all(math.isfinite(loss) for loss in step.losses):
                return Origin(where="loss", step=step.step, name=None, local=None)
            if step.gradients and kinds[step.step] == "nonfinite":
                own, broken = step.gradients.own, norms[step.step].exploding["nonfinite"]
                local = None if own is None or self._alone else not math.isfinite(own)
                return Origin(where="gradients", step=step.step, name=broken[0] if broken else None, local=local)
        if broken := weights.exploding["nonfinite"]:
            return Origin(where="parameters", step=None, name=broken[0], local=None)
        if buffers:
            return Origin(where="buffers", step=None, name=buffers[-1], local=None)
        return None

    def _weights(self) -> Norms:
        parameters = [p for p in self._model.parameters() if _has_norm(p)]
        norms = norm_of_each([detached(p) for p in parameters]).tolist() if parameters else []
        return self._norms(parameters, norms)

    def _norms(self, parameters: list[nn.Parameter], norms: list[float]) -> Norms:
        """norms: of these parameters, or of their gradients."""
        names = [self._names.get(id(p), "?") for p in parameters]
        named = [NamedNorm(name=name, norm=norm) for name, norm in zip(names, norms, strict=True)]
        finite = sorted((item for item in named if math.isfinite(item.norm)), key=lambda item: item.norm)
        exploding: dict[Explosion, list[tuple[float, str]]] = {"large": [], "overflow": [], "nonfinite": []}
        for item, parameter in zip(named, parameters, strict=True):
            if not math.isfinite(item.norm):
                # Backward carries it towards the input: the one nearest to the output comes first.
                exploding["nonfinite"].append((-self._order.get(item.name, 0), item.name))
            elif item.norm > _LARGEST_NORM.get(parameter.dtype, _LARGEST_NORM_ELSE):
                exploding["overflow"].append((-item.norm, item.name))
            elif item.norm > _EXPLODING:
                exploding["large"].append((-item.norm, item.name))
        return Norms(
            tensors=len(named),
            total=math.sqrt(math.fsum(norm * norm for norm in norms)) if norms else None,
            largest=finite[: -_LISTED - 1 : -1],
            smallest=finite[:_LISTED],
            vanishing=[item.name for item in named if item.norm < _VANISHING],
            exploding={kind: [name for _, name in sorted(found)] for kind, found in exploding.items()},
            each=named[:_EACH],
        )

    def _write_batch(self, incident: int, step: _Step | None) -> BatchKept:
        if step is None:
            reason = "no step from the onset on is remembered: this process began later"
            return BatchKept(step=None, file=None, tensors=[], left_out=[LeftOut(name="all", reason=reason)])
        left_out = list(step.left_out)
        parts = step.parts
        if incident >= _INCIDENTS and parts:
            left_out.append(LeftOut(name="all", reason=f"a run keeps the batches of its first {_INCIDENTS} incidents"))
            parts = []
        if self._limit == 0:
            left_out.append(LeftOut(name="all", reason="evidence_limit is 0"))
        path = self._paths.incident_batch(incident, self._rank)
        if parts:
            files.unlink(path)
            pieces = [piece_of(name, tensor) for name, tensor, _ in parts]
            write_shard(path, pieces, {"incident": str(incident), "rank": str(self._rank), "step": str(step.step)})
        return BatchKept(
            step=step.step,
            file=path.name if parts else None,
            tensors=[
                KeptTensor(
                    name=name,
                    dtype=tree.DTYPE_CODE[tensor.dtype],
                    shape=list(tensor.shape),
                    altered=not tensor.is_inference() and tensor._version != version,
                )
                for name, tensor, version in parts
            ],
            left_out=left_out,
        )


def _find_tensors(value: Any, path: str, found: list[tuple[str, Tensor | str]], depth: int = 0) -> None:
    """Add the tensors of a nested batch by path, and in words what cannot be kept. Numbers and texts are left out.

    Of too many, one more than are kept is found: it is named.
    """
    if len(found) > _TENSORS:
        return
    match value:
        case Tensor():
            found.append((path, _why_not(value) or value.detach()))
        case np.ndarray():
            found.append((path, _as_tensor(value)))
        case None | bool() | int() | float() | str() | bytes():
            return
        case _ if depth > _DEPTH:
            found.append((path, "nested too deeply"))
        case list() | tuple():
            # Of lists of numbers there may be many: to look at each by itself would cost more than a step.
            for place, item in [each for each in enumerate(value[:_TENSORS]) if type(each[1]) not in _PLAIN]:
                _find_tensors(item, f"{path}/{place}", found, depth + 1)
        case Mapping():
            for key in itertools.islice(value, _TENSORS):
                _find_tensors(value[key], f"{path}/{tree.escape(str(key))}", found, depth + 1)
        case _ if dataclasses.is_dataclass(value):
            for part in dataclasses.fields(value):
                _find_tensors(getattr(value, part.name, None), f"{path}/{tree.escape(part.name)}", found, depth + 1)
        case _:
            found.append((path, f"a {type(value).__name__}, which is not looked into"))


def _as_tensor(value: np.ndarray[Any, Any]) -> Tensor | str:
    try:
        tensor = torch.from_numpy(value)
    except (TypeError, ValueError):
        return f"an array of {value.dtype} that torch cannot take as it is"
    return _why_not(tensor) or tensor


def _why_not(value: Tensor) -> str | None:
    """Why a tensor of a batch cannot be kept, in words; None: it can."""
    if not is_in_one_piece(value):
        return f"a {type(value).__name__} ({value.layout}) that is not in one piece of memory"
    if value.dtype not in tree.DTYPE_CODE or value.is_meta:
        return f"a tensor of {value.dtype} on {value.device}"
    return None


def _kind(norms: Norms, gradients: GradientNorms) -> Explosion | None:
    """The worst kind that an update's gradients show."""
    total, reported = norms.total or 0.0, float(gradients.total)
    if norms.exploding["nonfinite"] or math.isnan(reported):
        return "nonfinite"
    if norms.exploding["overflow"] or math.isinf(reported):
        return "overflow"
    return "large" if max(total, reported) > _EXPLODING else None


def _has_norm(parameter: Tensor) -> bool:
    """torch has none of whole numbers, nor of numbers in a byte."""
    return (parameter.is_floating_point() or parameter.is_complex()) and parameter.element_size() > 1
