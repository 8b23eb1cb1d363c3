"""Clipping and the guard read the gradients once between them, and what is clipped is bit for bit what torch clips."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # makes its table of functions now: a test below replaces one of them
from sharding import one_rank
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

from rollback.train.updates import clipping, gradients
from rollback.train.updates.gradients import norm_of_each
from rollback.train.updates.optimizer import Updates


def trained(groups: Callable[[nn.Module], Any], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 1)).to(dtype)
    return model, torch.optim.SGD(groups(model), lr=0.1)


def in_order(model: nn.Module) -> Any:
    return model.parameters()


def weights_last(model: nn.Module) -> Any:
    by_size = sorted(model.parameters(), key=lambda p: p.dim())
    return [{"params": by_size[:3]}, {"params": by_size[3:]}]


def backward(model: nn.Module, factor: float = 50.0) -> None:
    torch.manual_seed(1)
    dtype = next(model.parameters()).real.dtype
    (model(torch.randn(8, 64, dtype=dtype)).square().sum() * factor).backward()


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """device: the host's memory is taken for that of a device, in which nothing may be looked at."""
    if request.param == "device":
        monkeypatch.setattr(gradients, "_HOST", torch.device("meta"))
    return str(request.param)


@pytest.fixture
def passes(where: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients each pass over them has read."""
    found, norm = [], torch._foreach_norm

    def counted(tensors: Any, *more: Any) -> Any:
        found.append(len(tensors))
        return norm(tensors, *more)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    monkeypatch.setattr(clipping._Lent, "same_as_torch", None)
    return found


@pytest.mark.parametrize("groups", [in_order, weights_last])
def test_an_update_that_is_clipped_reads_its_gradients_once(
    groups: Callable[[nn.Module], Any], where: str, passes: list[int]
) -> None:
    model, optimizer = trained(groups)
    updates = Updates(optimizer, None, model)
    compared_at = 3 if where == "device" else 0
    for update in range(6):
        optimizer.zero_grad()
        del passes[:]
        backward(model)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert passes == ([6, 6] if update <= compared_at else [6]), "the first time, torch computes it, to be compared"
        optimizer.step()
        assert clipping._Lent.same_as_torch is (True if update >= compared_at else None)
        assert updates.gradients is not None
        assert float(updates.gradients.clip_factor) == pytest.approx(1 / float(norm), rel=1e-4)  # type: ignore[arg-type]
        del passes[:]
        assert torch.equal(norm, nn.utils.get_total_norm(before)), "of tensors that nobody has measured"
        assert passes == [6]
        updates.forget()


def test_gradients_are_measured_in_the_order_of_the_model_in_which_most_clip(passes: list[int]) -> None:
    model, optimizer = trained(weights_last)
    updates = Updates(optimizer, None, model)
    backward(model)
    optimizer.step()
    assert updates.gradients is not None
    assert [*map(id, updates.gradients.parameters)] == [*map(id, model.parameters())]


def test_parameters_that_an_optimizer_gets_later_or_in_place_of_others_count_from_then_on(passes: list[int]) -> None:
    model, optimizer = trained(weights_last)
    updates = Updates(optimizer, None, model)
    more, instead = nn.Linear(1, 1), nn.Linear(1, 1)

    def norms_of_an_update() -> set[int]:
        optimizer.zero_grad()
        backward(nn.Sequential(model, more, instead))
        optimizer.step()
        assert updates.gradients is not None
        found = {*map(id, updates.gradients.parameters)}
        updates.forget()
        return found

    assert norms_of_an_update() == {*map(id, model.parameters())}
    optimizer.add_param_group({"params": more.parameters()})
    assert norms_of_an_update() == {*map(id, (*model.parameters(), *more.parameters()))}
    optimizer.param_groups[-1]["params"] = [*instead.parameters()]
    assert norms_of_an_update() == {*map(id, (*model.parameters(), *instead.parameters()))}


def write(model: nn.Module) -> None:
    next(iter(model.parameters())).grad.mul_(3)  # type: ignore[union-attr]


def replace(model: nn.Module) -> None:
    parameter = next(iter(model.parameters()))
    parameter.grad = parameter.grad * 3  # type: ignore[operator]


def write_uncounted(model: nn.Module) -> None:
    next(iter(model.parameters())).grad.data.mul_(4)  # type: ignore[union-attr]


def write_by_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.numpy()[...] *= 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [write, replace, write_uncounted, write_by_numpy])
@pytest.mark.parametrize("measured", ["behind backward", "at clipping"])
def test_gradients_that_the_script_has_changed_are_read_again(
    change: Callable[[nn.Module], None], measured: str, passes: list[int]
) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # the first time, torch computes it in any case
    if measured == "at clipping":
        clip_some_updates(model, optimizer, updates)
    updates.forget()
    optimizer.zero_grad()
    backward(model)
    change(model)
    del passes[:]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert passes == [6]
    assert torch.equal(norm, nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()]))  # type: ignore[union-attr]


def clip_some_updates(model: nn.Module, optimizer: Any, updates: Updates) -> None:
    """Behind them updates are measured where they are clipped. torch computes the norm of the first one itself."""
    for _ in range(5):
        optimizer.zero_grad()
        backward(model)
        clip(model)
        optimizer.step()
        updates.forget()


def clip(model: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def do_nothing(model: nn.Module) -> float:
    return norm_of_gradients(model)


def clip_and_write(model: nn.Module) -> float:
    clip(model)
    write(model)
    return norm_of_gradients(model)


def clip_a_part(model: nn.Module) -> float:
    nn.utils.clip_grad_norm_([*model.parameters()][:2], 1.0)
    return norm_of_gradients(model)


def clip_by_hand(model: nn.Module) -> float:
    norm = norm_of_gradients(model)
    for parameter in model.parameters():
        parameter.grad.mul_(1 / norm)  # type: ignore[union-attr]
    return norm


def clip_before_another_backward(model: nn.Module) -> float:
    clip(model)
    model.zero_grad(set_to_none=False)  # so the gradients lie where they lay
    backward(model, 7.0)
    return norm_of_gradients(model)


def norm_of_gradients(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()]))  # type: ignore[union-attr]


@pytest.mark.parametrize("first", [do_nothing, clip, clip_a_part])
@pytest.mark.parametrize("second", [do_nothing, clip, clip_and_write, clip_a_part, clip_before_another_backward])
@pytest.mark.parametrize("third", [do_nothing, clip])
def test_whatever_is_clipped_in_each_update_its_norm_is_that_of_what_was_clipped_or_applied(
    first: Callable[[nn.Module], float],
    second: Callable[[nn.Module], float],
    third: Callable[[nn.Module], float],
    passes: list[int],
) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    clip_some_updates(model, optimizer, updates)
    for handled in (first, second, third):
        optimizer.zero_grad()
        backward(model)
        norm = handled(model)
        optimizer.step()
        assert float(updates.grad_norm) == pytest.approx(norm, rel=1e-5)  # type: ignore[arg-type]
        if handled is clip:
            assert float(updates.gradients.clip_factor) == pytest.approx(1 / norm, rel=1e-5)  # type: ignore[union-attr, arg-type]
        updates.forget()


def test_a_script_that_clips_in_two_ways_by_turns_is_measured_before_either(passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    for handled in (clip, clip_by_hand) * 3:
        optimizer.zero_grad()
        backward(model)
        norm = handled(model)
        optimizer.step()
        assert float(updates.grad_norm) == pytest.approx(norm, rel=1e-5)  # type: ignore[arg-type]
        updates.forget()


def test_gradients_that_are_scaled_once_more_behind_clipping_are_smaller_by_both_factors(passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    clip_some_updates(model, optimizer, updates)
    optimizer.zero_grad()
    backward(model)
    norm = clip(model)
    for parameter in model.parameters():
        parameter.grad.mul_(0.25)  # type: ignore[union-attr]
    optimizer.step()
    assert float(updates.gradients.clip_factor) == pytest.approx(0.25 / norm, rel=1e-5)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("once_more", [0.5, math.inf])  # Inf: to log what is left
def test_an_update_that_is_clipped_twice_is_told_as_before_the_first(once_more: float, passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    for _ in range(6):
        optimizer.zero_grad()
        backward(model)
        norm = clip(model)
        nn.utils.clip_grad_norm_(model.parameters(), once_more)
        optimizer.step()
        assert float(updates.grad_norm) == pytest.approx(norm, rel=1e-5)  # type: ignore[arg-type]
        kept = min(once_more, 1.0) / norm
        assert float(updates.gradients.clip_factor) == pytest.approx(kept, rel=1e-5)  # type: ignore[union-attr, arg-type]
        updates.forget()


def test_the_tensor_with_a_nan_is_named_though_clipping_spreads_it_twice(passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    clip_some_updates(model, optimizer, updates)
    optimizer.zero_grad()
    backward(model)
    model[4].bias.grad.fill_(math.nan)  # type: ignore[index, union-attr, operator]
    clip(model)
    clip(model)
    optimizer.step()
    assert updates.gradients is not None
    ill = updates.gradients.each.isnan().tolist()
    assert [p is model[4].bias for p in updates.gradients.parameters] == ill  # type: ignore[index, union-attr]


@pytest.mark.parametrize("once_more", [False, True])
def test_an_update_that_comes_before_it_is_expected_is_told_as_before_clipping(
    once_more: bool, passes: list[int]
) -> None:
    """As of a script whose updates have as many batches as their tokens fill. once_more: it also clips before that."""
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    updates.expect_backward(False)
    backward(model)
    if once_more:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        backward(model)
    before = norm_of_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert updates.grad_norm == pytest.approx(before)
    assert before > 10


def test_a_backward_behind_clipping_makes_gradients_that_are_measured_anew(passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    clip_some_updates(model, optimizer, updates)
    for awaited in (True, False):
        optimizer.zero_grad()
        updates.expect_backward(last=True)
        backward(model)
        clip(model)
        updates.expect_backward(last=awaited)
        backward(model)
        norm = clip(model)
        optimizer.step()
        assert float(updates.grad_norm) == pytest.approx(norm, rel=1e-5)  # type: ignore[arg-type]
        updates.forget()


def test_another_model_is_clipped_by_itself_and_together_with_this_one(passes: list[int]) -> None:
    (model, optimizer), (other, _) = trained(in_order), trained(in_order)
    updates = Updates(optimizer, None, model)
    clip_some_updates(model, optimizer, updates)
    optimizer.zero_grad()
    backward(model)
    backward(other, 3.0)
    norm, of_other = clip(model), norm_of_gradients(other)
    assert clip(other) == of_other
    optimizer.step()
    assert float(updates.gradients.clip_factor) == pytest.approx(1 / norm, rel=1e-5)  # type: ignore[union-attr, arg-type]
    updates.forget()
    optimizer.zero_grad()
    backward(model)
    both = nn.ModuleList([model, other])
    expected = norm_of_gradients(both)
    assert clip(both) == expected


def test_behind_backward_too_gradients_of_another_model_are_not_among_those_that_were_measured(
    passes: list[int],
) -> None:
    (model, optimizer), (other, _) = trained(in_order), trained(in_order)
    _kept = Updates(optimizer, None, model)
    backward(model)
    clip(model)  # the first time, torch computes it in any case
    optimizer.zero_grad()
    backward(model)
    backward(other, 3.0)
    both = nn.ModuleList([model, other])
    expected = norm_of_gradients(both)
    assert clip(both) == expected


class Scaler:
    _scale: Tensor | None = None


def test_a_scaler_that_comes_later_is_heeded_from_its_second_update_on(passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    scaler = Scaler()
    updates = Updates(optimizer, scaler, model)
    clip_some_updates(model, optimizer, updates)
    scaler._scale = torch.tensor(8.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        norm = clip(model)
        optimizer.step()
        found = float(updates.grad_norm)  # type: ignore[arg-type]
        updates.forget()
    assert found == pytest.approx(norm / 8, rel=1e-5)


class NormOfShards(Tensor):
    """To ask for its value is a collective."""

    def item(self) -> Any:
        raise AssertionError("nobody has lent this norm")


def test_a_norm_that_was_not_lent_is_not_asked_for_its_value(passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    clip_some_updates(model, optimizer, updates)
    backward(model)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(4.0).as_subclass(NormOfShards))


def test_a_nan_is_seen_before_clipping_has_spread_it(passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    clip_some_updates(model, optimizer, updates)
    optimizer.zero_grad()
    backward(model)
    model[2].bias.grad[0] = float("nan")  # type: ignore[union-attr, index]
    clip(model)
    optimizer.step()
    assert updates.gradients is not None
    assert [bool(finite) for finite in torch.isfinite(updates.gradients.each)] == [True] * 3 + [False] + [True] * 2


@pytest.fixture
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("by", ["torch", "hand"])
def test_gradients_that_are_views_of_buckets_are_told_as_before_clipping(
    by: str, group: None, passes: list[int]
) -> None:
    inner, optimizer = trained(in_order)
    model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True, bucket_cap_mb=0.01)  # type: ignore[no-untyped-call]
    updates = Updates(optimizer, None, model)
    for _ in range(6):
        optimizer.zero_grad()
        updates.expect_backward(last=True)
        backward(model)
        norm = clip(model) if by == "torch" else clip_by_hand(model)
        optimizer.step()
        assert float(updates.grad_norm) == pytest.approx(norm, rel=1e-5)  # type: ignore[arg-type]
        assert float(updates.gradients.clip_factor) == pytest.approx(1 / norm, rel=1e-4)  # type: ignore[union-attr, arg-type]
        updates.forget()


def test_where_ddp_averages_too_nothing_is_measured_behind_backward_once_each_update_is_clipped(
    group: None, passes: list[int]
) -> None:
    inner, optimizer = trained(in_order)
    model = nn.parallel.DistributedDataParallel(inner)
    updates = Updates(optimizer, None, model)
    behind_backward = []
    for _ in range(6):
        optimizer.zero_grad()
        updates.expect_backward(last=True)
        del passes[:]
        backward(model)
        behind_backward.append([*passes])
        clip(model)
        optimizer.step()
        updates.forget()
    assert behind_backward == [[6]] * 3 + [[]] * 3


def test_views_of_a_bucket_that_were_not_written_to_alike_are_measured_as_they_are_applied(
    group: None, passes: list[int]
) -> None:
    inner, optimizer = trained(in_order)
    model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=True)  # type: ignore[no-untyped-call]
    updates = Updates(optimizer, None, model)
    backward(model)
    clip_a_part(model)
    optimizer.step()
    assert updates.gradients is not None
    assert updates.gradients.clip_factor is None
    assert float(updates.gradients.total) == pytest.approx(norm_of_gradients(model))


class Recomputed(nn.Module):
    """An embedding too large for a telltale, and behind it what a checkpoint computes once more in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2048, 64)
        self.block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh())
        self.out = nn.Linear(64, 1)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = checkpoint(self.block, self.embedding(tokens), use_reentrant=self.use_reentrant)
        made: Tensor = self.out(hidden)
        return made


@pytest.mark.parametrize("by", ["torch", "hand"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_end_of_a_backward_within_a_backward_is_not_taken_for_that_of_the_whole(
    use_reentrant: bool, set_to_none: bool, by: str, passes: list[int]
) -> None:
    torch.manual_seed(0)
    model = Recomputed(use_reentrant=use_reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    updates = Updates(optimizer, None, model)
    assert updates.telltale is model.block[0].weight
    for _ in range(6):
        optimizer.zero_grad(set_to_none)
        updates.expect_backward(last=True)
        (model(torch.randint(2048, (8, 4))).square().sum() * 50).backward()
        norm = clip(model) if by == "torch" else clip_by_hand(model)
        optimizer.step()
        assert float(updates.grad_norm) == pytest.approx(norm, rel=1e-5)  # type: ignore[arg-type]
        assert float(updates.gradients.clip_factor) == pytest.approx(1 / norm, rel=1e-4)  # type: ignore[union-attr, arg-type]
        updates.forget()


@pytest.mark.parametrize("by", ["torch", "hand"])
def test_a_script_that_freezes_its_first_layers_later_is_still_measured_before_clipping(
    by: str, passes: list[int]
) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    for update in range(12):
        model[0].requires_grad_(update < 5)  # type: ignore[index]
        optimizer.zero_grad()
        updates.expect_backward(last=True)
        backward(model)
        model_now = model if update < 5 else model[1:]  # type: ignore[index]
        norm = clip(model_now) if by == "torch" else clip_by_hand(model_now)
        optimizer.step()
        assert float(updates.grad_norm) == pytest.approx(norm, rel=1e-5)  # type: ignore[arg-type]
        assert float(updates.gradients.clip_factor) == pytest.approx(1 / norm, rel=1e-4)  # type: ignore[union-attr, arg-type]
        updates.forget()


def test_where_all_is_frozen_another_model_is_clipped_as_without_a_guard(passes: list[int]) -> None:
    (model, optimizer), (other, _) = trained(in_order), trained(in_order)
    updates = Updates(optimizer, None, model)
    clip_some_updates(model, optimizer, updates)
    optimizer.zero_grad()
    model.requires_grad_(False)
    updates.expect_backward(last=True)
    backward(other)
    expected = norm_of_gradients(other)
    assert clip(other) == expected


class Spectral(nn.Module):
    """A filter in the frequencies, as Fourier neural operators have it."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(33, dtype=kind))
        self.out = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=64).float())
        return made


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("factor", [50.0, math.nan])
def test_complex_gradients_have_the_norm_that_clipping_takes(
    kind: torch.dtype, factor: float, passes: list[int]
) -> None:
    torch.manual_seed(0)
    model = Spectral(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    updates = Updates(optimizer, None, model)
    assert updates.telltale is model.filter
    backward(model, factor)
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    found = updates.gradients
    assert found is not None
    assert found.clip_factor is not None
    assert float(found.total) == pytest.approx(norm, nan_ok=True)
    assert float(found.clip_factor) == pytest.approx(1 / norm, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("dtype", "asked"), [(torch.float64, {}), (torch.float32, {"norm_type": 1.0}), (torch.float32, {"foreach": False})]
)
def test_where_torch_computes_in_another_way_it_does_so_itself(
    dtype: torch.dtype, asked: dict[str, Any], passes: list[int]
) -> None:
    model, optimizer = trained(in_order, dtype)
    _kept = Updates(optimizer, None, model)
    backward(model)
    expected = nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()], **asked)  # type: ignore[union-attr]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, **asked)
    assert norm.dtype == dtype
    assert torch.equal(norm, expected)
    assert clipping._Lent.same_as_torch is None


def test_what_the_script_does_to_the_norm_that_it_got_stays_its_own(passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9).zero_()
        optimizer.step()
        assert updates.grad_norm is not None
        assert updates.grad_norm > 0
        updates.forget()


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), 1e30])
def test_norms_of_tensors_are_told_apart_where_one_is_not_finite(spoilt: float) -> None:
    tensors = [torch.ones(4), torch.tensor([1.0, spoilt]), torch.full((4,), 1e25)]
    each = norm_of_each(tensors)
    assert each[0] == 2
    assert torch.equal(each[1].float(), torch.tensor(spoilt).float()) or spoilt != spoilt
    assert each[2] == pytest.approx(2e25)


def test_a_part_of_the_gradients_may_be_clipped_alone(where: str, passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    _kept = Updates(optimizer, None, model)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        some = list(model.parameters())[3:1:-1]
        expected = nn.utils.get_total_norm([p.grad.clone() for p in some])  # type: ignore[union-attr]
        assert torch.equal(nn.utils.clip_grad_norm_(some, 1.0), expected)
    assert clipping._Lent.same_as_torch is (True if where == "host" else None)


def test_a_norm_that_is_not_finite_raises_as_in_torch_and_the_tensor_is_still_named(passes: list[int]) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)
    backward(model, float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert updates.gradients is not None
    assert not torch.isfinite(updates.gradients.each).all()


def test_nothing_is_lent_once_torch_has_computed_another_norm(
    passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(in_order)
    updates = Updates(optimizer, None, model)

    def wrong(gradients: Any) -> Tensor:
        return torch.ones(())

    monkeypatch.setattr(
        clipping, "_lent", lambda gradients: None if clipping._Lent.same_as_torch is False else wrong(gradients)
    )
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        expected = nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()], foreach=False)  # type: ignore[union-attr]
        assert torch.equal(nn.utils.clip_grad_norm_(model.parameters(), 1.0), expected)
        updates.forget()
    assert clipping._Lent.same_as_torch is False


def compiled_clipping(model: nn.Module) -> Any:
    return torch.compile(
        lambda: nn.utils.clip_grad_norm_(list(model.parameters()), 1.0), fullgraph=True, backend="eager"
    )


def test_a_compiled_clipping_has_no_break_in_its_graph() -> None:
    model, optimizer = trained(in_order)
    backward(model)
    try:
        compiled_clipping(model)()
    except Unsupported:
        pytest.skip("this torch cannot compile a clipping, with a guard or without")
    torch._dynamo.reset()
    _kept = Updates(optimizer, None, model)
    backward(model)
    expected = nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    assert torch.allclose(compiled_clipping(model)(), expected)
