"""Gradient norms of all tensors, measured at the end of backward and compared when the optimizer begins.

Clipping comes between the two and destroys the evidence: one NaN in the total norm makes every gradient NaN, and an
infinite norm makes every gradient zero. So the norms are measured right after backward, and the optimizer's gradients
are only compared with them. If these are the same tensors times one factor, a single small tensor (the *telltale*)
shows the factor. If they were changed in another way, they are measured again. Nothing waits for the device.

    backward   `BackwardWatch` -> at the end of backward, before DDP averages: the telltale's norm
               -> after DDP has averaged, and FSDP2 has set what is sharded: all norms, unscaled
    clipping   by torch: it is lent the norm, and tells the factor
    pre-step   hook of the optimizer -> unchanged, scaled, or measured again

Where the last updates have all been clipped so, the next one is measured at clipping, before torch changes anything:
then nothing has to be remembered from backward to clipping. If that one is not clipped so, it is measured in the
pre-step hook, as it is applied, and those behind it at the end of backward again. On a device a norm is lent from then
on: before, who has written to a gradient past torch's counters could be found by waiting alone.

An update of fewer batches than the one before is measured at clipping, too: its last backward was not expected to be
the last one.

Gradients in single precision are measured in it, as torch does for clipping, others in double precision. On the CPU
that is also used where single precision has overflowed, which can be seen there without waiting.
"""

import ctypes
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollback.train.sharded import copies_of, is_sharded, local_of, storage_version
from rollback.train.updates.backward import BackwardWatch, at_end_of_backward, choose_telltale, nearer_the_input
from rollback.train.updates.clipping import factor_of, lend_norms
from rollback.train.updates.wrappers import ddp_inside

_HOST = torch.device("cpu")
_PLAIN = frozenset((Tensor, nn.Parameter))
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_grad, _version, _layout, _dtype, _device = map(operator.attrgetter, ("grad", "_version", "layout", "dtype", "device"))
_params = operator.itemgetter("params")
_bits = operator.attrgetter("value")
_requires_grad, _is_view = operator.attrgetter("requires_grad"), Tensor._is_view
_TRIED = 3  # updates in a row that lent their norm to clipping
_Versions = tuple[list[int], list[int]]  # see `storage_version`: of all gradients, in order


class GradientNorms(NamedTuple):
    """Norms of the gradients of one update, unscaled, on their device. Of sharded gradients: of this rank's parts."""

    parameters: list[nn.Parameter]
    """The parameters that had a gradient."""
    each: Tensor
    """The norm of each of these. On a device, of gradients in single precision: Inf from 1.8e19 on, as in clipping."""
    total: Tensor | float
    """The norm over all, in the gradients' own type; Inf where it overflows."""
    clip_factor: Tensor | float | None
    """The factor by which the optimizer's gradients are smaller (clipping); NaN: this rank's part does not show it;
    None: they had to be measured again."""
    own: Tensor | None
    """The norm of the telltale on this rank alone; None: it was not seen."""
    squares: Tensor | None = None
    """Of sharded ones: the sum of squares, weighted as `GaugeFields.squares` says; None: they are not sharded."""


class Gradients:
    """The gradients of one rank's update in progress. Nothing here is collective. model: as the script calls it."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: object | None, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._averaged = torch.distributed.is_initialized()
        self._places = {id(p): place for place, p in enumerate(model.parameters())}
        self._ordered: list[nn.Parameter] = []
        self._which: list[int] = []
        """The ids of these as the optimizer has them: they are alive, so nothing else has one."""
        self._any_sharded = False
        self._model, self._ddp = model, ddp_inside(model)
        self._watches: list[BackwardWatch] = []
        self.seen: GradientNorms | None = None
        """The norms at the end of the update's last backward; None: there was none, or it was not expected."""
        self.telltale: nn.Parameter | None = None
        self._watch_backward()
        self._queued = False
        self._awaited = True
        self._own: Tensor | None = None
        self.written: bool | None = None
        """Whether `look` found the gradients changed since they were measured; None: not known."""
        self._versions: _Versions = [], []
        self._firsts: _Firsts | None = None
        """The first element of each gradient then, where their norm may be lent."""
        self._lent: Tensor | None = None
        """The norm over all of them, if it was lent in this update."""
        self._clips_all = False
        """Whether this update is clipped over all its gradients, as they were measured."""
        self._so_in_a_row = 0
        self._at_clipping = False
        """Whether this update is measured where it is clipped."""
        self._factor: Tensor | float | None = None
        """By which clipping has multiplied them."""
        self._found: _Versions = [], []
        lend_norms(self)

    @property
    def scale(self) -> Tensor | None:
        """The factor of GradScaler, on its device; None: there is no scaler."""
        # get_scale() would wait for the device.
        scale = getattr(self._scaler, "_scale", None)
        return scale if isinstance(scale, Tensor) else None

    def expect(self, awaited: bool) -> None:
        """Set whether the next backward is the update's last one. Only that one is measured."""
        self._awaited, self._queued = awaited, False
        self.present_telltale()

    def present_telltale(self) -> nn.Parameter | None:
        """The telltale, or another one where the script has frozen that and no backward reaches it any more."""
        frozen = self.telltale is not None and not self.telltale.requires_grad
        if frozen and any(map(_requires_grad, self._parameters())):  # else it may have frozen all for a while
            self._watch_backward()
        return self.telltale

    def look(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Check whether the gradients are as backward left them. Call it before they are used; `before_step` does."""
        parameters, gradients = _with_gradients(self._parameters())
        self._found = self._versions_of(parameters, gradients)
        self.written = None if self.seen is None else self._found != self._versions
        if self.seen is not None and self.seen.squares is not None and not self.written:
            self.written = None  # torch counts no write to many sharded tensors at once, as clipping does
        return parameters, gradients

    def norm_of(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """For `clipping`: the norm over gradients that nobody has written to since they were measured."""
        seen = self.seen
        if self._at_clipping or seen is None:  # seen is None: this backward was not expected to be the last
            return self._measure_for_clipping(gradients)
        if self.scale is not None or seen.each.dtype is not torch.float32:
            return None
        (parameters, own), firsts = _with_gradients(seen.parameters), self._firsts
        if self._versions_of(parameters, own) != self._versions or (firsts is not None and firsts.are_changed()):
            return None
        all_of_them = [*map(id, gradients)] == [*map(id, own)] and _are_alike(own)
        self._clips_all |= all_of_them
        if self._firsts is None:
            return None
        if all_of_them:
            self._lent = torch.as_tensor(seen.total).clone()
            return self._lent
        places = {id(gradient): place for place, gradient in enumerate(own)}
        wanted = [places.get(id(gradient), -1) for gradient in gradients]
        return None if -1 in wanted else torch.linalg.vector_norm(seen.each[wanted])

    def _measure_for_clipping(self, gradients: Sequence[Tensor]) -> Tensor | None:
        if self.seen is not None:
            return None  # clipped before, since backward: what is there now is not what is to be told
        if self.telltale is None or id(self.telltale.grad) not in map(id, gradients):
            return None  # of another model
        parameters, own = _with_gradients(self._parameters())
        if [*map(id, gradients)] != [*map(id, own)] or not _are_alike(own) or self.scale is not None:
            return None
        self._versions = self._versions_of(parameters, own)
        each, total = _measure(own, None)
        own_total = total.item() if total.is_cpu else total.clone()  # the script may write to what it is lent
        self.seen, self._lent = GradientNorms(parameters, each, own_total, None, self._own), total
        self._clips_all = True
        return self._lent if each.dtype is torch.float32 else None

    def clipped(self, norm: Tensor, most: float) -> None:
        """For `clipping`: the gradients over which this is the norm are clipped to `most`."""
        if norm is self._lent:  # of which there is no graph
            self._factor = factor_of(norm, most)

    def forget(self) -> None:
        """The update is over."""
        self.seen = self._own = self.written = self._factor = None
        self._versions = self._found = [], []

    def before_step(self) -> GradientNorms | None:
        """The norms of what the optimizer will apply; None: there are no gradients. Call it from the pre-step hook."""
        self._so_in_a_row = self._so_in_a_row + 1 if self._clips_all else 0
        self._at_clipping = self._so_in_a_row >= _TRIED
        self._clips_all, self._lent = False, None
        parameters, gradients = self.look()
        if not gradients:
            return None
        seen, telltale = self.seen, self.telltale
        scale = getattr(self._optimizer, "grad_scale", None)  # a fused optimizer unscales by itself
        if seen is None or telltale is None or (writes := self._writes(gradients)) is None:
            each, total = _measure(gradients, scale)
            return GradientNorms(parameters, each, total, None, self._own, self._squares(parameters, each))
        if self.written is False and self.scale is None:
            return seen._replace(clip_factor=1.0)
        if writes == 1 and self._factor is not None:
            return seen._replace(clip_factor=self._factor)
        assert telltale.grad is not None
        place = [*map(id, parameters)].index(id(telltale))
        after = torch.linalg.vector_norm(_as_real(_dense(telltale.grad)), dtype=seen.each.dtype)
        if scale is not None:
            after = after / scale.to(after.device)
        if seen.each.device == _HOST and seen.squares is None:
            return _scaled_on_host(seen, seen.each.tolist()[place], after.item())
        before = seen.each[place]
        # What was zero is still zero, or not finite.
        factor = torch.where(before > 0, after / before, 1.0 + after)
        # A factor above one, or NaN, is no clipping but an error.
        grown = factor.clamp(min=1.0)
        total = torch.as_tensor(seen.total)
        total = total * grown.to(total.dtype)
        if seen.squares is None:
            return seen._replace(total=total, clip_factor=factor.float())
        factor = torch.where(before > 0, factor, math.nan).float()
        return seen._replace(total=total, clip_factor=factor, squares=seen.squares * grown.double().square())

    def _watch_backward(self) -> None:
        for watch in self._watches:
            watch.remove()
        self.seen = None  # by what another one told
        self.telltale = choose_telltale(self._parameters())
        watched = (*nearer_the_input(self._parameters(), self.telltale), self.telltale)
        self._watches = [BackwardWatch(self._model, each, self._backward_reached) for each in watched]

    def _backward_reached(self, *_: object) -> None:
        summed_later = getattr(self._ddp, "require_manual_backward_finalization", False)  # by the script: torch 2.15
        measured = self._awaited and not summed_later
        if self._at_clipping or not measured:
            self.seen = self._factor = None
        if self._queued or not measured:
            return
        if self._averaged or not self._at_clipping:
            self._queued = True
            at_end_of_backward(self._before_averaging if self._averaged else self._after_averaging)

    def _before_averaging(self) -> None:
        telltale = self.telltale  # of a sharded one there is nothing but the mean over the ranks
        gradient = None if telltale is None or is_sharded(telltale) else telltale.grad
        if gradient is not None and gradient._base is None:  # else, with gradient_as_bucket_view, it is averaged now
            self._own = torch.linalg.vector_norm(_dense(gradient))
        self._queued = not self._at_clipping
        if self._queued:
            at_end_of_backward(self._after_averaging)

    def _after_averaging(self) -> None:
        self._queued = False
        if self.telltale is None or self.telltale.grad is None:
            return  # FSDP2 holds back what is not summed yet
        parameters, gradients = _with_gradients(self._parameters())
        self._versions = self._versions_of(parameters, gradients)
        self._firsts = _Firsts.of(gradients, self._versions)
        each, total = _measure(gradients, self.scale)
        self.seen = GradientNorms(parameters, each, total, None, self._own, self._squares(parameters, each))

    def _writes(self, gradients: list[Tensor]) -> int | None:
        """How often each gradient was written to since it was measured; None: they are others, or not equally often."""
        if not self.written:
            return 0
        (addresses, versions), (addresses_then, versions_then) = self._found, self._versions
        if addresses != addresses_then:
            return None
        grown: Iterable[int | float] = map(operator.sub, versions, versions_then)
        if any(map(_is_view, gradients)):  # those of one bucket count their writes together
            wholes = [gradient if gradient._base is None else gradient._base for gradient in gradients]
            counted = Counter(map(id, wholes))
            grown = map(operator.truediv, grown, [counted[id(whole)] for whole in wholes])
        (writes, *others) = {*grown}
        return int(writes) if not others and writes == int(writes) else None

    def _versions_of(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> _Versions:
        if not self._any_sharded:
            return [*map(Tensor.data_ptr, gradients)], [*map(_version, gradients)]
        pairs = zip(parameters, gradients, strict=True)
        versions = [storage_version(parameter.grad if is_sharded(parameter.grad) else own) for parameter, own in pairs]  # type: ignore[arg-type]
        return [address for address, _ in versions], [version for _, version in versions]

    def _squares(self, parameters: list[nn.Parameter], each: Tensor) -> Tensor | None:
        """What this rank adds to the norm's square; None: nothing is sharded. Summands (`Partial`) are no replicas."""
        if not self._any_sharded:
            return None
        ranks = torch.distributed.get_world_size()
        told = [ranks / copies_of(parameter.grad, ranks) for parameter in parameters]  # type: ignore[arg-type]
        # Made on the device it would be waited for, and with it the whole backward.
        weights = torch.tensor(told, dtype=torch.float64, device="cpu")
        return (each.double().square() * weights.to(each.device, non_blocking=True)).sum()

    def _parameters(self) -> list[nn.Parameter]:
        """The optimizer's, in the order of the model: clipping gets their gradients in that order, mostly, and the sum
        of their norms depends on it."""
        given = [*chain.from_iterable(map(_params, self._optimizer.param_groups))]
        if (which := [*map(id, given)]) != self._which:
            self._which = which
            self._ordered = sorted(given, key=lambda p: self._places.get(id(p), len(self._places)))
            self._any_sharded = any(map(is_sharded, given))
        return self._ordered


def _with_gradients(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Those of the parameters that have a gradient, and this rank's parts of their gradients."""
    gradients: list[Tensor] = [*map(_grad, parameters)]
    kinds = {*map(type, gradients)}
    if type(None) in kinds:
        parameters = [p for p in parameters if p.grad is not None]
        gradients = [*map(_grad, parameters)]
    if not _PLAIN.issuperset(kinds) or {*map(_layout, gradients)} != {torch.strided}:
        gradients = [_dense(gradient) for gradient in gradients]
    return parameters, gradients


def _are_alike(gradients: list[Tensor]) -> bool:
    """Whether all are in single precision and on one device: torch measures others otherwise than `_measure`."""
    return {*map(_dtype, gradients)} == {torch.float32} and len({*map(_device, gradients)}) == 1


class _Firsts(NamedTuple):
    """Where the first element of each gradient lies, and its bits.

    torch does not count a write through `.data`, by NumPy or by another library's kernel. One to a whole tensor (what
    ranks do that average by hand, or who scales by the number of tokens) shows here. One to some of its elements alone
    may not.
    """

    places: list[ctypes.c_uint32]
    bits: list[int]

    @classmethod
    def of(cls, gradients: list[Tensor], versions: _Versions) -> "_Firsts | None":
        """None: not all are in single precision and in the host's memory."""
        if not _are_alike(gradients) or gradients[0].device != _HOST:
            return None
        places = [*map(ctypes.c_uint32.from_address, filter(None, versions[0]))]  # what is empty has no address
        return cls(places, [*map(_bits, places)])

    def are_changed(self) -> bool:
        """Ask only while the gradients are where they were."""
        return [*map(_bits, self.places)] != self.bits


def _scaled_on_host(seen: GradientNorms, before: float, after: float) -> GradientNorms:
    """The norms that were seen, for gradients that are scaled since. before, after: the telltale's norm.

    As the end of `Gradients.before_step`, which does it on a device without waiting for it.
    """
    factor = after / before if before > 0 else 1.0 + after
    total = seen.total if factor <= 1 else seen.total * factor
    return seen._replace(total=total, clip_factor=ctypes.c_float(factor).value)  # in single precision, as on a device


def _dense(gradient: Tensor) -> Tensor:
    """This rank's part, without a graph (backward may have been told to make one)."""
    gradient = local_of(gradient)
    if gradient.requires_grad:
        gradient = gradient.detach()
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def _as_real(gradient: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which have the same norm: torch gives a norm of complex ones in no real
    type that is asked for."""
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _measure(gradients: list[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm of each tensor, and of all together, divided by `scale`."""
    if any(map(_requires_grad, gradients)):
        gradients = [*map(Tensor.detach, gradients)]
    as_for_clipping = gradients[0].device != _HOST and _are_alike(gradients)
    each = _each(gradients, torch.float32) if as_for_clipping else norm_of_each(gradients)
    if scale is not None:
        each = each / scale.to(each.device)
    # The sum of squares is what overflows first in single precision.
    total = torch.linalg.vector_norm(each) if each.dtype == torch.float32 else each.square().sum().float().sqrt()
    return each, total.half().float() if gradients[0].dtype == torch.float16 else total


def norm_of_each(tensors: list[Tensor]) -> Tensor:
    """The norms, on the device of the first tensor. A device uses double precision. The host would need a copy of twice
    the size for that, so it uses double precision only where squares overflow in single precision."""
    if tensors[0].device != _HOST:
        return _each(tensors, torch.float64)
    each = _each(tensors, torch.float32)
    norms = each.tolist()
    if math.isfinite(sum(norms)):
        return each
    if overflown := [place for place, norm in enumerate(norms) if norm == math.inf]:  # there may be NaN alone
        each = each.double()
        each[overflown] = _each([tensors[place] for place in overflown], torch.float64)
    return each


def _each(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    device, kinds = gradients[0].device, {*map(_dtype, gradients)}
    if not kinds.isdisjoint(_COMPLEX):
        gradients = [*map(_as_real, gradients)]
        kinds = {*map(_dtype, gradients)}
    if {*map(_device, gradients)} != {device} or torch.float64 in kinds:
        return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64).to(device) for g in gradients])
    return torch.stack(list(torch._foreach_norm(gradients, 2, dtype)))
