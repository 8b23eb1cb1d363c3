"""What the last snapshot takes of a state: nothing is copied that a file can be written from where it lies."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.sentinel import Sentinel
from rollback.train.data import rng
from rollback.train.data.cursor import cursor_for
from rollback.train.last_snapshot.proof import NotProved
from rollback.train.last_snapshot.small_state import (
    LocalState,
    SharedState,
    SmallState,
    SmallStateReader,
    same_but_for_next,
    split,
)
from rollback.train.last_snapshot.survivor import told_at_end
from rollback.train.last_snapshot.writers import SLOTS, MarksWriter, large_state, shared_tree
from rollback.train.snapshots.capture import piece_of
from rollback.train.state import tree
from rollback.train.state.kept_values import SharedText, ToldAtEnd
from rollback.train.state.state import TrainingState


def test_a_tensor_s_bytes_are_written_from_where_they_lie() -> None:
    tensor = torch.zeros(8)
    data = piece_of("weight", tensor).data
    assert callable(data)
    (block,) = data()
    tensor[0] = 1.0
    assert bytes(block) == tensor.numpy().tobytes()


def test_a_tensor_that_lies_in_another_order_is_written_in_its_own() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    data = piece_of("weight", tensor).data
    assert callable(data)
    assert b"".join(map(bytes, data())) == torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]).numpy().tobytes()


@pytest.mark.parametrize(
    "state",
    [
        {"last_epoch": 3, "rates": [0.5, 0.25], "pair": (1, 2.0), "name": "cosine", "best": None},
        {"rate": np.float64(0.5), "count": np.int64(3)},
        {"rates": np.linspace(0, 1, 5)},
        {"average": torch.arange(4.0), "best": float("nan")},
    ],
    ids=["plain", "numbers of NumPy", "an array", "a tensor"],
)
def test_what_is_shared_is_told_as_a_checkpoint_would_and_as_it_was(state: dict[str, Any]) -> None:
    told = {"objects": {"scheduler": state}, "counters": {"step": 7}, "groups": [{"lr": np.float64(0.1)}]}
    expected: dict[str, torch.Tensor] = {}
    trees = {
        "objects": tree.encode(told["objects"], "shared/objects", expected),
        "counters": {"step": 7}, "groups": tree.encode(told["groups"], "shared/optimizer/param_groups", expected),
    }  # fmt: skip
    expected = {name: item.clone() for name, item in expected.items()}
    shared = SharedState(told, {}, {})
    for value in state.values():
        if isinstance(value, (list, torch.Tensor, np.ndarray)):
            value[0] = 99.0
    state["later"] = 1
    found, tensors = shared.encoded()
    assert found == trees
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], item) for name, item in expected.items())


def small_training(data: Any = (1, 2, 3)) -> TrainingState:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingState(model, optimizer, {}, cursor_for(data), Sentinel("normal"))


def of_rank(local: LocalState, at_end: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """What only the rank knows, as a mark's content has it."""
    sent, told = split(local.body(at_end, b"sent") + local.unchanging)
    assert sent == b"sent"
    return told


class Log(SharedText):
    text = "a line\n" * 100_000

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def state_dict(self) -> str:
        return self.text

    def load_state_dict(self, text: str) -> None:
        self.text = text


def test_a_text_that_is_the_same_on_all_ranks_is_in_no_mark_and_in_each_shard_as_it_was() -> None:
    state = small_training()
    log = Log()
    state.kept.add({"log": log, "best": 0.5})
    reader = SmallStateReader(state)
    local, shared = reader.local(), reader.shared()
    log.text += "a later one\n"
    body = of_rank(local)
    assert len(body) < len(Log.text) / 20
    kept, _ = SmallState.of(body).local(shared.common_local, shared.texts)
    assert kept["kept"] == {"best": 0.5, "log": Log.text}
    state.kept.load_state_dict(kept["kept"])
    assert log.text == Log.text
    assert state.kept.state_dict() == kept["kept"]


def test_a_last_checkpoint_has_what_an_ordinary_one_has() -> None:
    state = small_training()
    reader, image = SmallStateReader(state), state.image()
    local, shared = reader.local(), reader.shared()
    assert shared_tree(large_state(state)[0], shared, {}).keys() == image.shared.keys()
    kept, _ = SmallState.of(of_rank(local)).local(shared.common_local, shared.texts)
    assert image.local.keys() - kept.keys() == {"object_buffers"}, "where there are such, no last snapshot is made"


class Sum(ToldAtEnd):
    value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": (self.value, {3: self.value})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"][0]


def test_a_sum_is_told_at_a_steps_end_and_not_in_its_backward() -> None:
    """So what is added up behind the backward does not make the early mark another one."""
    state = small_training()
    total = Sum()
    state.kept.add({"total": total, "best": 0.5})
    reader = SmallStateReader(state)
    early = reader.local()
    total.value = float("inf")
    at_end = reader.local()
    assert at_end == early
    bodies = [of_rank(early), of_rank(at_end, told_at_end(state))]
    assert same_but_for_next(*bodies)
    kept = [SmallState.of(body).local(reader.shared().common_local, {})[0]["kept"] for body in bodies]
    assert kept[0] == {"best": 0.5}
    state.kept.load_state_dict(state.kept.state_dict())  # as a checkpoint has it
    assert kept[1] == tree.encode(state.kept.state_dict(), "local/kept", {})
    total.value = 1.0
    state.kept.load_state_dict(tree.decode(kept[1], lambda name: torch.zeros(0)))
    assert total.value == float("inf")
    assert SmallState.of(of_rank(reader.local())).trees["kept"] == {"best": 0.5}, "not what was restored"


def test_a_position_that_moves_behind_the_backward_is_told_as_it_is_at_the_steps_end() -> None:
    """As where a script leaves an epoch early."""
    state = small_training(DataLoader(range(4)))  # type: ignore[arg-type]
    reader, cursor = SmallStateReader(state), state.cursor
    cursor.open_epoch()
    cursor.next()
    early = reader.coming()
    assert early is not None
    cursor.end_epoch()
    at_end = reader.local()
    told = [SmallState.of(of_rank(local)).trees["cursor"] for local in (early, at_end)]
    assert [(each["epoch"], each["offset"], each["opened"]) for each in told] == [(0, 1, True), (1, 0, False)]
    assert [each["opening"] is None for each in told] == [False, True]


def test_what_a_rank_alone_has_written_is_not_kept_without_it(memory: Path) -> None:
    """As the first rank of a Trainer that logs evaluations there alone: the text of another one lacks them."""
    state = small_training()
    log = Log()
    state.kept.add({"log": log})
    reader = SmallStateReader(state)
    local = reader.local()

    def write(text: str) -> object:
        bodies = {1: of_rank(local)}
        return MarksWriter(SlotPaths(memory), bodies, reader.shared().common_local, {"log": text}).write_part(
            SLOTS[0], ()
        )

    assert write(log.text)
    assert write(f"another one's line\n{log.text}")
    with pytest.raises(NotProved, match="rank 1 had lines of 'log'"):
        write(log.text.removeprefix("a line\n"))


def test_behind_a_rollback_a_number_that_numpy_had_drawn_and_not_given_out_is_in_the_mark() -> None:
    """NumPy draws normal numbers in pairs, so its state is the same words with the second one and without it."""
    state = small_training()
    reader = SmallStateReader(state)

    def marked() -> Any:
        local = reader.local()
        return SmallState.of(of_rank(local)).random["numpy"]

    with rng.preserved():
        np.random.seed(0)  # else the number may be one that an earlier test has held back
        np.random.normal()
        before = rng.capture(cuda=False)
        assert marked()["has_gauss"] == 1
        np.random.normal()
        assert marked()["has_gauss"] == 0
        rng.restore(before)
        reader.forget()
        assert (marked()["has_gauss"], marked()["gauss"]) == (1, before["numpy"]["gauss"])


def test_why_nothing_is_copied_at_every_step_is_told_by_what_the_other_module_is() -> None:
    model = torch.nn.Linear(1, 1)

    def why(**objects: Any) -> str | None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainingState(model, optimizer, objects, cursor_for([1, 2, 3]), Sentinel("normal"))
        return SmallStateReader(state).why_not_copied()

    told = why(module=torch.optim.swa_utils.AveragedModel(model))
    assert told is not None
    assert told.startswith("beside the model the guard keeps another module, the AveragedModel 'module'")
    assert "too large" not in told
    assert why() is None
    assert why(scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)) is None
    average = SimpleNamespace(state_dict=lambda: {"shadow": [torch.zeros(1 << 19)]}, load_state_dict=lambda state: None)
    assert (
        why(average=average)
        == "beside the model the guard keeps 2 MiB of 'average': all of it would have to be copied at every step"
    )


class Counting(torch.nn.Linear):
    """Counts its forwards, in no tensor."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) * self.count

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_model_that_has_more_than_parameters_and_buffers_gets_no_last_snapshot() -> None:
    """Its forward of the next step may have changed that when a rank dies."""

    def why(model: torch.nn.Module) -> str | None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return SmallStateReader(
            TrainingState(model, optimizer, {}, cursor_for([1, 2, 3]), Sentinel("normal"))
        ).why_not_copied()

    assert "'0._extra_state'" in str(why(torch.nn.Sequential(Counting(1, 1))))
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    tied[1].weight = tied[0].weight
    tied.register_buffer("mask", torch.zeros(2).to_sparse(), persistent=False)
    assert why(tied) is None
