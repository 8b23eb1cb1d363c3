"""Taking a training state apart and putting it back; who stores what; which job it is."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rollback.errors import CheckpointDamaged, RunDoesNotFit, StateRefused, UsageError
from rollback.sentinel import Hint, Sentinel
from rollback.train.data.cursor import cursor_for
from rollback.train.snapshots.capture import owners
from rollback.train.state import tree
from rollback.train.state.image import Image
from rollback.train.state.state import TrainingState
from rollback.train.state.state_copy import StateCopy


def state_of(seed: int, **objects: Any) -> TrainingState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return TrainingState(model, optimizer, objects, cursor_for([1, 2, 3]), Sentinel("normal"))


def through_disk(image: Image) -> tuple[Any, Any]:
    in_order = torch.contiguous_format
    shared = {name: tensor.clone(memory_format=in_order) for name, tensor in image.shared_tensors.items()}
    local = {name: tensor.clone(memory_format=in_order) for name, tensor in image.local_tensors.items()}
    texts = json.loads(json.dumps([image.shared, image.local]))
    return tree.decode(texts[0], shared.__getitem__), tree.decode(texts[1], local.__getitem__)


def test_a_state_goes_into_other_objects_and_their_gradients_are_zero() -> None:
    one, other = state_of(1), state_of(2)
    one.counters.step = 7
    image = one.image()
    expected, drawn = copy.deepcopy(one.model.state_dict()), torch.random.get_rng_state()
    torch.manual_seed(99)
    other.load(*through_disk(image))
    for name, value in other.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert other.optimizer.state_dict()["state"][0]["step"] == 1
    assert other.counters.step == 7
    assert not any(parameter.grad.any() for parameter in other.model.parameters() if parameter.grad is not None)
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_another_network_goes_by_its_own_names_whatever_is_around_it() -> None:
    """A second network in DDP or torch.compile, as those of a GAN are: each begins all names with a word of its own."""
    one, other = (state_of(seed, critic=torch.compile(nn.BatchNorm1d(2))) for seed in (1, 2))
    nn.init.constant_(one.modules["critic"].weight, 3.0)
    shared, local = through_disk(one.image(data=True))
    other.load(shared, local)
    assert torch.equal(other.modules["critic"].weight, one.modules["critic"].weight)
    bare = state_of(3, critic=nn.BatchNorm1d(2))
    bare.load(shared, local)
    assert torch.equal(bare.modules["critic"].weight, one.modules["critic"].weight)


def test_loading_leaves_parameters_where_they_are() -> None:
    """DDP, torch.compile and the optimizer hold on to them."""
    one, other = state_of(1), state_of(2)
    before = [parameter.data_ptr() for parameter in other.model.parameters()]
    other.load(*through_disk(one.image()))
    assert [parameter.data_ptr() for parameter in other.model.parameters()] == before


class OfOtherTypes(torch.optim.Optimizer):
    """Keeps what has another type than its parameters, as those do that hold moments and weights in float32."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                weights = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
                counted, mask = torch.tensor(1 << 40), torch.ones(2, dtype=torch.bool)
                self.state[parameter] |= {"weights": weights, "more": [{"counted": counted}, (mask,)], "step": 3}


def test_the_optimizers_state_comes_back_in_its_types() -> None:
    def of(seed: int) -> TrainingState:
        torch.manual_seed(seed)
        model, critic = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).bfloat16()
        optimizers = [OfOtherTypes(module.parameters(), {}) for module in (model, critic)]
        objects = {"critic": critic, "its_optimizer": optimizers[1]}
        return TrainingState(model, optimizers[0], objects, cursor_for([1]), Sentinel("normal"))

    one, other = of(1), of(2)
    for optimizer in (one.optimizer, one.objects["its_optimizer"]):
        optimizer.step()  # type: ignore[attr-defined]
    other.load(*through_disk(one.image()))
    for optimizer in (other.optimizer, other.objects["its_optimizer"]):
        state = optimizer.state_dict()["state"][0]
        assert (state["weights"].dtype, state["weights"][0, 0].item()) == (torch.float32, torch.tensor(1 / 3).item())
        assert (state["more"][0]["counted"].dtype, state["more"][1][0].dtype) == (torch.int64, torch.bool)


class CountsForAll(torch.optim.Optimizer):
    """Keeps a count of its own beside what it keeps of each parameter, as torch's `state_dict` allows."""

    def step(self, closure: Any = None) -> None:
        self.state["updates"] = self.state.get("updates", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"moment": torch.full_like(parameter, float(self.state["updates"]))}


def test_what_an_optimizer_keeps_of_no_parameter_comes_back() -> None:
    def of(seed: int) -> TrainingState:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        return TrainingState(model, CountsForAll(model.parameters(), {}), {}, cursor_for([1]), Sentinel("normal"))

    one, fresh = of(1), of(2)
    one.optimizer.step()
    held = StateCopy(one)
    fresh.load(*through_disk(one.image()))
    for _ in range(2):
        one.optimizer.step()
    held.put_back(one)
    for state in (one, fresh):
        state.optimizer.step()
        assert state.optimizer.state["updates"] == 2
        assert state.optimizer.state[state.trained[0]]["moment"].unique().tolist() == [2.0]
        assert "shared/optimizer/state/0/moment" in state.live_tensors()


def test_a_fused_optimizer_goes_on_with_parameters_in_another_order_in_memory() -> None:
    """It goes through the memory of parameter and state side by side. A critic's is loaded into new tensors."""

    def update(state: TrainingState) -> list[Tensor]:
        torch.manual_seed(5)
        for module, optimizer in ((state.model, state.optimizer), (state.modules["critic"], state.objects["its"])):
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()  # type: ignore[attr-defined]
        return [parameter.detach().clone() for parameter in state.parameters]

    def of(seed: int) -> TrainingState:
        torch.manual_seed(seed)
        model, critic = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))  # type: ignore[call-overload]
        optimizers = [torch.optim.AdamW(module.parameters(), fused=True) for module in (model, critic)]
        return TrainingState(
            model, optimizers[0], {"critic": critic, "its": optimizers[1]}, cursor_for([1]), Sentinel("normal")
        )

    one, fresh, used = of(1), of(2), of(3)
    update(one), update(used)
    kept = [through_disk(one.image()) for _ in range(2)]
    expected = update(one)
    for other, (shared, local) in zip((fresh, used), kept, strict=True):
        other.load(shared, local)
        assert all(map(torch.equal, update(other), expected))


def test_buffers_are_each_rank_s_own() -> None:
    image = state_of(1).image()
    assert {name for name in image.local_tensors if "buffers" in name} == {
        f"local/buffers/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert not [name for name in image.shared_tensors if "running" in name]


def test_other_objects_than_the_checkpoint_s_are_refused_before_anything_is_touched() -> None:
    one, other = state_of(1), state_of(2, ema=nn.Linear(1, 1))
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(CheckpointDamaged, match=r"\[\]"):
        other.load(*through_disk(one.image()))
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())


def test_an_optimizer_that_got_a_group_since_is_refused_before_anything_is_touched() -> None:
    one, other = state_of(1), state_of(2)
    other.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(RunDoesNotFit, match=r"has \[6\] parameters in its groups, this job's has \[6, 1\]"):
        other.load(*through_disk(one.image()))
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())


def test_a_run_goes_on_where_a_group_that_it_got_in_mid_run_is_made_before_the_guard() -> None:
    """As the refusal says."""

    def state_with(groups: int, lr: float) -> TrainingState:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in [*model][:groups]], lr=lr)
        return TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal"))

    got = through_disk(state_with(2, lr=0.1).image())
    with pytest.raises(RunDoesNotFit, match=r"has \[1, 1\] parameters in its groups, this job's has \[1\]") as refused:
        state_with(1, lr=0.0).load(*got)
    assert "(lr=0 for one whose time comes later); then the same command goes on" in str(refused.value.hint)
    early = state_with(2, lr=0.0)
    early.load(*got)
    assert [group["lr"] for group in early.optimizer.param_groups] == [0.1, 0.1]


def test_an_optimizer_whose_parameters_are_in_another_order_since_is_refused_before_anything_is_touched() -> None:
    """Of the same shapes the moments of each would be another one's, and nothing would show it."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.Adam([{"params": layer.parameters()} for layer in model])
    state = TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal"))
    got = through_disk(state.image())
    optimizer.param_groups.reverse()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RunDoesNotFit, match=r"another order .*: '1\.weight' in the place of '0\.weight'"):
        state.load(*got)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    state.load(*through_disk(state.image()))


def test_a_model_that_got_or_lost_a_module_since_is_refused_before_anything_is_touched() -> None:
    one, other = state_of(1), state_of(2)
    got = through_disk(one.image())
    before = copy.deepcopy(other.model.state_dict())
    other.model.add_module("norm", nn.BatchNorm1d(2))
    lost = through_disk(other.image())
    with pytest.raises(RunDoesNotFit, match=r"model lacks parameters of this one: norm.bias, norm.weight"):
        other.load(*got)
    assert "norm.running_mean" in other.model.state_dict(), "a layer without its buffers could not even run"
    assert all(torch.equal(value, other.model.state_dict()[name]) for name, value in before.items())
    lost[1]["buffers"] = {name: item for name, item in lost[1]["buffers"].items() if "norm" not in name}
    with pytest.raises(StateRefused, match=r"Unexpected key\(s\) in state_dict: \"norm.weight\""):
        one.load(*lost)


def test_a_parameter_whose_elements_are_one_in_memory_is_refused() -> None:
    state = state_of(1)
    state.model.register_parameter("one", nn.Parameter(torch.ones(1).expand(3), requires_grad=False))
    with pytest.raises(UsageError, match="the elements of the parameter 'one' are one in memory"):
        state.check()


def test_a_job_is_known_by_its_tensors_optimizer_objects_and_data() -> None:
    job = state_of(1, ema=nn.Linear(1, 1)).job(4)
    assert job.world_size == 4
    assert ("0.weight", "float32", [4, 3]) in job.model
    assert ("1.num_batches_tracked", "int64", []) in job.model
    assert job.optimizer["class"] == "AdamW"
    assert job.optimizer["groups"] == [6]
    assert job.objects == ["ema"]
    assert job.data["kind"] == "re-iterated"


def test_an_optimizer_without_a_learning_rate_gives_no_hint() -> None:
    state = state_of(1)
    for group in state.optimizer.param_groups:
        del group["lr"]
    assert state.note_learning_rate() is Hint.NONE
    assert state.counters.highest_rate is None


def test_a_learning_rate_of_a_device_is_read_where_it_was_written_to_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `Adam(lr=torch.tensor(...), capturable=True)`: whoever reads it waits for the device."""
    rates = iter((1e-3, 2e-3, 3e-3))
    monkeypatch.setattr(Tensor, "__float__", lambda _: next(rates))
    state = state_of(1)
    rate = state.optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    seen = []
    for write in (None, None, lambda: rate.add_(1), None):
        if write is not None:
            write()
        state.note_learning_rate()
        seen.append(state.counters.learning_rate)
    state.optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    state.note_learning_rate()
    assert [*seen, state.counters.learning_rate] == [1e-3, 1e-3, 2e-3, 2e-3, 3e-3]


@given(st.dictionaries(st.text(max_size=4), st.integers(0, 1000), max_size=20), st.integers(1, 8))
def test_each_rank_stores_about_as_much_as_the_others(sizes: dict[str, int], ranks: int) -> None:
    tensors: dict[str, Tensor] = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    owner = owners(tensors, range(ranks))
    assert owner == owners(dict(reversed(tensors.items())), range(ranks)), "the same on all ranks"
    load = [sum(sizes[name] for name in sizes if owner[name] == rank) for rank in range(ranks)]
    assert max(load) - min(load) <= max(sizes.values(), default=0)


def test_among_ten_thousand_ranks_no_tensor_is_compared_with_all_of_them() -> None:
    class Ranks(tuple[int, ...]):
        gone_through = 0

        def __iter__(self) -> Iterator[int]:
            self.gone_through += 1
            return super().__iter__()

    ranks = Ranks(range(0, 20_000, 2))
    owner = owners({f"{number:03}": torch.empty(1) for number in range(100)}, ranks)
    assert [*owner.values()] == [*range(0, 200, 2)]
    assert ranks.gone_through < 5


@pytest.mark.parametrize("lazy", [nn.LazyLinear(4), nn.LazyBatchNorm1d()], ids=["parameters", "buffers"])
def test_a_module_without_values_is_refused_by_name(lazy: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 4), lazy)
    state = TrainingState(model, torch.optim.SGD(model[0].parameters(), 0.1), {}, cursor_for([1]), Sentinel())
    with pytest.raises(UsageError, match=r"has no values yet \(it has no shape\)"):
        state.check()
