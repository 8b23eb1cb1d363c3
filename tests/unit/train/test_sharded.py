"""Which part of a sharded tensor a rank has, and which ranks have the same: against torch's own sharding.

A process for each rank has a process group in which nothing is sent, so it shards as that rank of any mesh would.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding import fully_sharded, one_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from rollback.checkpoints.format.layout import header_space_for, lay_out
from rollback.checkpoints.format.parts import Box, Part, cover, whole
from rollback.errors import UsageError
from rollback.sentinel import Sentinel
from rollback.system.region import Region
from rollback.train.comm.ranks import Ranks
from rollback.train.data.cursor import cursor_for
from rollback.train.sharded import copies_of, holders_of, is_sharded, like_of, local_of, part_of
from rollback.train.snapshots.capture import Capture, share_of
from rollback.train.state.image import Image
from rollback.train.state.state import TrainingState
from rollback.train.state.state_copy import GradientCopy, StateCopy
from rollback.train.updates.gradients import Gradients
from rollback.trainers.adopt.made_objects import MadeObjects

MOST = 8


@dataclass(frozen=True)
class Held:
    """What one rank has of a tensor."""

    part: Part
    holders: tuple[int, ...]
    copies: int
    local: np.ndarray[Any, Any]
    stored: bool


def of_rank(rank: int, pipe: Connection) -> None:
    """Answer what the rank of this number has, each time in a process of its own: torch remembers meshes."""
    torch.set_num_threads(1)
    while True:
        world, make, *given = pipe.recv()
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            pipe.send(answer(rank, world, make, *given))
        except Exception as error:  # noqa: BLE001 - for the test to see
            pipe.send(error)
        os._exit(0)


def answer(rank: int, world: int, make: Callable[..., dict[str, Tensor]], *given: Any) -> dict[str, Held]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        return held(make(*given))
    finally:
        dist.destroy_process_group()


def held(tensors: dict[str, Tensor]) -> dict[str, Held]:
    parts = {name: part_of(item, name) for name, item in tensors.items()}
    local = {name: local_of(item).detach().clone() for name, item in tensors.items()}
    stored = share_of(Image({}, {}, {}, local, parts, tensors), Ranks()).tensors
    return {
        name: Held(
            parts[name], holders_of(item), copies_of(item, dist.get_world_size()), local[name].numpy(), name in stored
        )
        for name, item in tensors.items()
    }


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., list[dict[str, Held]]]]:
    answer(0, 1, distributed, (2,), (1,), (0,))  # torch imports a lot when it shards for the first time
    answer(0, 1, of_fsdp, 2, 2, {"shards": 1, "tensors": 1}, "columns")
    forked = multiprocessing.get_context("fork")
    ends = [forked.Pipe() for _ in range(MOST)]
    ranks = [forked.Process(target=of_rank, args=(rank, ends[rank][1]), daemon=True) for rank in range(MOST)]
    for rank in ranks:
        rank.start()

    def ask(world: int, make: Callable[..., dict[str, Tensor]], *given: Any) -> list[dict[str, Held]]:
        for pipe, _ in ends[:world]:
            pipe.send((world, make, *given))
        answers = [pipe.recv() for pipe, _ in ends[:world]]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    yield ask
    for rank in ranks:
        rank.terminate()
        rank.join()


def require_whole(whole: Tensor, found: list[Held]) -> None:
    """Each rank has what its part says; the parts are the whole; each is stored by one of the ranks that have it."""
    everything = Box((0,) * whole.dim(), tuple(whole.shape))
    for rank, one in enumerate(found):
        assert one.part.shape == tuple(whole.shape)
        np.testing.assert_array_equal(one.local, whole[one.part.box.inside(everything)].numpy(), strict=True)
        alike = [other for other, held in enumerate(found) if held.holders == one.holders]
        assert tuple(alike) == one.holders
        assert rank in alike
        assert {found[other].part for other in alike} == {one.part}
        assert sum(found[other].stored for other in alike) == 1
        assert one.copies == len(alike)
    stored = [one.part for one in found if one.stored]
    assert sum(stored[number].box.size for number in cover("w", stored)) == whole.numel()


def counted(*shape: int) -> Tensor:
    """No two elements are alike."""
    return torch.arange(1.0, prod(shape) + 1).reshape(shape)


def distributed(shape: tuple[int, ...], sides: tuple[int, ...], dims: tuple[int | None, ...]) -> dict[str, Tensor]:
    """sides: of the mesh. dims: the dimension that each side of the mesh shards; None: it replicates."""
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return {"w": distribute_tensor(counted(*shape), init_device_mesh("cpu", sides), placements, src_data_rank=None)}


@st.composite
def distributions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    meshes = [(n,) for n in range(1, 7)] + [(2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2), (1, 3, 2)]
    sides = draw(st.sampled_from(meshes))
    dims = st.sampled_from([None, *range(len(shape))])
    return shape, sides, tuple(draw(dims) for _ in sides)


@settings(max_examples=15, deadline=None)
@given(distributions())
def test_a_rank_has_the_part_that_torch_gave_it_and_one_of_its_holders_stores_it(ask: Any, given: Any) -> None:
    """Uneven parts, ranks without a row, tensors without a dimension, replicas along any side of the mesh."""
    shape, sides, _ = given
    require_whole(counted(*shape), [found["w"] for found in ask(prod(sides), distributed, *given)])


def layer(rows: int, columns: int) -> nn.Linear:
    made = nn.Linear(columns, rows)
    with torch.no_grad():
        made.weight.copy_(counted(rows, columns))
        made.bias.copy_(-counted(rows))
    return made


def of_fsdp(rows: int, columns: int, sides: dict[str, int], plan: str) -> dict[str, Tensor]:
    """FSDP2 over `shards`, with replicas over `replicas`, of what is parallel over `tensors`."""
    made, mesh = layer(rows, columns), init_device_mesh("cpu", tuple(sides.values()), mesh_dim_names=tuple(sides))
    if plan:
        style = {"columns": ColwiseParallel, "rows": RowwiseParallel}[plan]
        parallelize_module(made, mesh["tensors"], style(), src_data_rank=None)
    names = tuple(name for name in sides if name != "tensors")
    fully_shard(made, mesh=mesh[names] if len(names) > 1 else mesh[names[0]])
    return dict(made.named_parameters())


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 5), st.sampled_from([(1, 2), (1, 3), (2, 2), (1, 4), (2, 1)]),
    st.sampled_from([("", 1), ("columns", 2), ("rows", 2)]),
)  # fmt: skip
def test_so_it_is_with_what_fully_shard_has_made(
    ask: Any, rows: int, columns: int, data: tuple[int, int], tensors: tuple[str, int]
) -> None:
    """Also where it has sharded the dimension that tensor parallelism has, which interleaves (`_StridedShard`)."""
    plan, parallel = tensors
    sides = {"replicas": data[0], "shards": data[1], "tensors": parallel}
    if data[0] == 1:
        del sides["replicas"]
    if not plan:
        del sides["tensors"]
    found = ask(prod(sides.values()), of_fsdp, rows, columns, sides, plan)
    require_whole(counted(rows, columns), [one["weight"] for one in found])
    require_whole(-counted(rows), [one["bias"] for one in found])


def tied() -> dict[str, Tensor]:
    """In one unit; a weight that two units share becomes two weights in FSDP2."""
    model = nn.Sequential(layer(5, 3), layer(5, 3))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert model[0].weight is model[1].weight
    return {name: item for name, item in model.state_dict().items() if "weight" in name}


def test_a_weight_with_two_names_has_one_part(ask: Any) -> None:
    found = ask(2, tied)
    for name in ("0.weight", "1.weight"):
        require_whole(counted(5, 3), [one[name] for one in found])


def partly_sharded() -> dict[str, Tensor]:
    model = nn.Sequential(layer(5, 3), layer(2, 5))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (3,)))
    state = TrainingState(model, torch.optim.SGD(model.parameters()), {}, cursor_for([1]), Sentinel("normal"))
    image = state.image()
    assert set(image.parts) == {"shared/model/0.weight", "shared/model/0.bias"}
    assert {"shared/model/1.weight", "shared/model/1.bias"} <= set(image.shared_tensors)
    return {name: item for name, item in model.named_parameters() if is_sharded(item)}


def test_of_a_module_that_is_sharded_in_part_the_rest_is_stored_as_ever(ask: Any) -> None:
    require_whole(counted(5, 3), [one["0.weight"] for one in ask(3, partly_sharded)])


def beside(sides: dict[str, int], plan: str) -> dict[str, Tensor]:
    """Shaped like what an optimizer may keep beside a weight: for each row, for each column, for all of it."""
    weight = of_fsdp(6, 4, sides, plan)["weight"]
    likes = {str(shape): like_of(weight, shape) for shape in ((6, 4), (6, 1), (6,), (1, 4), (4,), ())}
    assert likes["(6, 4)"] is weight
    for like in likes.values():
        if like is not weight:
            part = part_of(like, "like")
            local_of(like).set_(counted(*part.shape)[part.box.inside(whole(part.shape).box)].contiguous())
    return {name: like for name, like in likes.items() if like is not weight}


@pytest.mark.parametrize(
    ("sides", "plan", "rows"),
    [({"shards": 4}, "", 2), ({"replicas": 2, "shards": 2}, "", 3), ({"shards": 2, "tensors": 2}, "rows", 3)],
)
def test_what_is_kept_beside_a_weight_is_sharded_along_the_sides_that_it_has(
    ask: Any, sides: dict[str, int], plan: str, rows: int
) -> None:
    found = ask(4, beside, sides, plan)
    for shape in ((6, 1), (6,), (1, 4), (4,), ()):
        require_whole(counted(*shape), [one[str(shape)] for one in found])
    assert found[0]["(6, 1)"].part.box.shape == (rows, 1)
    assert found[0]["(1, 4)"].part.box.shape == ((1, 2) if plan else (1, 4))


def of_several_sizes() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (4, 2))
    return {
        str(size): distribute_tensor(counted(size), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        for size in range(100, 200)
    }


def test_replicas_store_about_as_many_bytes_as_each_other(ask: Any) -> None:
    found = ask(8, of_several_sizes)
    load = [sum(held.local.nbytes for held in one.values() if held.stored) for one in found]
    assert max(load) - min(load) <= 400
    assert sum(load) == 4 * sum(range(100, 200))


@pytest.mark.parametrize("write", ["by the optimizer", "by the script", "not"])
def test_a_write_to_a_sharded_parameter_while_it_is_copied_is_noticed(write: str) -> None:
    """torch does not count the writes to a DTensor on the part that is copied."""
    with one_rank():
        model = fully_sharded(nn.Sequential(layer(5, 3)))
        optimizer = torch.optim.AdamW(model.parameters())
        image = TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal")).image()
        share = share_of(image, Ranks())
        layout = lay_out(share.kinds(), header_space_for(share.kinds(), share.metadata, 4096))
        capture = Capture(share, layout, Region(layout.size), "overlapped")
        capture.start()
        weight = next(model.parameters())
        match write:
            case "by the optimizer":
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            case "by the script":
                with torch.no_grad():
                    weight.clamp_(max=3.0)
        assert bool(capture.moved()) == (write != "not")


def test_of_a_gradient_in_summands_each_counts_by_itself() -> None:
    """As sequence parallelism leaves those of norm layers. Each rank has another one, so they are no replicas."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(2, 1, bias=False)
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(1, 2), mesh, [Replicate()], run_check=False))
        gradients = Gradients(torch.optim.SGD(model.parameters()), None, model)
        found = []
        for kind in (Replicate(), Partial()):
            model.weight.grad = DTensor.from_local(torch.tensor([[3.0, 4.0]]), mesh, [kind], run_check=False)
            norms = gradients.before_step()
            assert norms is not None
            assert norms.squares is not None
            found.append(norms.squares.item())
        assert found == [25.0, 50.0], "of which the mean over the ranks is taken"
    finally:
        dist.destroy_process_group()


def test_a_held_state_has_what_an_optimizer_keeps_for_each_row_of_a_weight() -> None:
    with one_rank():
        model = fully_sharded(nn.Sequential(layer(5, 3)))
        optimizer = torch.optim.SGD(model.parameters())
        weight: Any = next(model.parameters())
        optimizer.state[weight]["size"] = size = weight.detach().mean(-1, keepdim=True)
        state = TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal"))
        held, was = StateCopy(state), size.full_tensor().clone()
        size.zero_()
        held.put_back(state)
        back = optimizer.state[weight]["size"]
        assert (back.shape, back.placements) == ((5, 1), weight.placements)
        assert torch.equal(back.full_tensor(), was)


@pytest.mark.parametrize("way", ["whole", "in another type", "not over replicas"])
def test_gradients_that_fsdp_has_not_summed_yet_go_with_the_state_that_is_left(way: str) -> None:
    """And come back where an update goes on. No parameter of the optimizer has them."""
    with one_rank():
        model: Any = nn.Linear(3, 2)
        sides = ("replicas", "shards") if way == "not over replicas" else ("shards",)
        mesh = init_device_mesh("cpu", (1,) * len(sides), mesh_dim_names=sides)
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float64 if way == "in another type" else None)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        put_off = model.set_requires_all_reduce if way == "not over replicas" else model.set_requires_gradient_sync
        optimizer = torch.optim.SGD(model.parameters())
        state = TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal"))
        held = StateCopy(state)

        def backward(*, sums: bool) -> list[list[float]]:
            put_off(sums)
            model(torch.ones(1, 3)).sum().backward()
            gradient, model.weight.grad = model.weight.grad, None
            return [] if gradient is None else gradient.full_tensor().tolist()

        assert backward(sums=False) == []
        gradients = GradientCopy(state.trained, state.fsdp)
        held.put_back(state)
        assert backward(sums=True) == [[1.0] * 3] * 2, "the batch before is undone"
        gradients.put_back(lambda: held.put_back(state))
        assert backward(sums=True) == [[2.0] * 3] * 2, "the update goes on"


def test_gradients_not_summed_over_replicas_come_back_behind_a_batch_that_reached_other_weights() -> None:
    """Since torch 2.15 FSDP2 has them in one tensor for the weights that a backward has reached."""

    class OneOfTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(2))

        def forward(self, rows: Tensor, which: int) -> Tensor:
            return self.layers[which](rows)  # type: ignore[no-any-return]

    with one_rank():
        model: Any = OneOfTwo()
        fully_shard(model, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards")))
        optimizer = torch.optim.SGD(model.parameters())
        state = TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal"))
        held = StateCopy(state)

        def backward(which: int, *, sums: bool) -> None:
            model.set_requires_all_reduce(sums)
            model(torch.ones(1, 3), which).sum().backward()

        backward(0, sums=False)
        gradients = GradientCopy(state.trained, state.fsdp)
        held.put_back(state)
        backward(1, sums=False)
        gradients.put_back(lambda: held.put_back(state))
        backward(0, sums=True)
        assert model.layers[0].weight.grad.full_tensor().tolist() == [[2.0] * 3] * 2, "the update goes on"
        assert model.layers[1].weight.grad is None


def test_an_evaluation_behind_which_parameters_are_whole_does_not_change_which_ones_a_state_knows() -> None:
    with one_rank():
        model: Any = nn.Linear(3, 2)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters())
        objects = MadeObjects()
        objects.note(model)
        objects.note(optimizer)
        with torch.no_grad():
            model(torch.ones(1, 3))
        assert not is_sharded(model.weight)
        assert objects.are_trained()
        with torch.no_grad():
            model(torch.ones(1, 3))
        state = TrainingState(model, optimizer, {}, cursor_for([1]), Sentinel("normal"))
        model.weight.grad = torch.zeros_like(model.weight)
        assert state.switches.state_dict()["without"] == ["bias"]


@pytest.mark.parametrize("by", ["optimizer", "object"])
def test_what_an_optimizer_keeps_in_a_parameter_s_shape_is_sharded_as_that_is_or_refused(by: str) -> None:
    """A resume would shard it as the parameter is, and whoever asked for this rank's part would get another one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Linear(4, 2, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        first, second = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
        state = TrainingState(model, first, {"second": second}, cursor_for([1]), Sentinel("normal"))
        weight: Any = model.weight
        kept = (first if by == "optimizer" else second).state[weight]
        kept["momentum"] = torch.zeros_like(weight)
        assert len(state.image().parts) == 2
        kept["momentum"] = DTensor.from_local(torch.zeros(2, 4), weight.device_mesh, [Replicate()], run_check=False)
        with pytest.raises(UsageError, match="has the shape of its parameter and is sharded otherwise"):
            state.image()
    finally:
        dist.destroy_process_group()
