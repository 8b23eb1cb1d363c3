"""What a script's loops carry from iteration to iteration is, behind a load, what it was there."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from rollback.source.loop_variables import LoopVariable
from rollback.train.state.kept_values import ToldAtEnd
from rollback.trainers.adopt.enumeration import ScriptProgress
from rollback.trainers.adopt.script_variables import (
    BatchVariable,
    EpochVariable,
    LoggedVariable,
    RestoredVariable,
    ScriptVariables,
)
from rollback.trainers.variable_values import MISSES


def telling(**found: list[str]) -> Any:
    """Notices: the names of the variables that each is told of."""
    return SimpleNamespace(**{
        told: lambda variable, *_, names=names: names.append(variable.name) for told, names in found.items()
    })  # fmt: skip


class Training:
    """A script that adds 1 to a variable for each batch, in one process."""

    def __init__(self, start: int = 0) -> None:
        self.progress, self.has = ScriptProgress(), start
        self.restored = BatchVariable(self.progress)

    def ask(self) -> int:
        given = self.restored.restored_value(lambda: self.has)
        self.has = given[0] if given else self.has
        return self.has

    def train(self, batches: int) -> int:
        for _ in range(batches):
            self.progress.draws += 1
            self.ask()
            self.has += 1
        return self.has


def test_a_variable_is_the_scripts_until_something_is_loaded() -> None:
    script = Training(5)
    assert script.train(3) == 8
    script.has = 20
    assert script.train(1) == 21, "the script has set it by itself"
    kept = script.restored.state_dict()
    assert kept == {"value": 21}, "as it is, and not as it was when it was asked for"
    script.train(4)
    script.restored.load_state_dict(kept)
    assert script.restored.state_dict() == kept, "before the script has it"
    assert script.train(1) == 22


def test_a_new_process_goes_on_with_what_it_was_and_goes_back_to_what_its_script_begins_with() -> None:
    script, again = Training(), Training(5)
    before = script.restored.state_dict()
    script.train(7)
    again.restored.load_state_dict(script.restored.state_dict())
    assert again.train(1) == 8
    again.restored.load_state_dict(before)
    assert again.train(1) == 6
    again.restored.begin_anew()
    assert again.train(2) == 7


def test_a_loop_over_other_batches_takes_no_load_and_one_that_has_no_batch_left_does() -> None:
    """As where one function trains, and evaluates."""
    script = Training()
    script.train(7)
    script.restored.load_state_dict({"value": 3})
    assert script.ask() == 7
    script.progress.draws += 1  # which has told of the pass's end
    assert script.ask() == 3


def test_at_the_top_of_an_epoch_it_is_what_it_was_at_the_top_of_that_one() -> None:
    restored, script = EpochVariable(ScriptProgress()), SimpleNamespace(has=0)

    def epoch(place: int) -> int:
        given = restored.restored_value(lambda: script.has, place)
        script.has = given[0] if given else script.has
        return int(script.has)

    assert epoch(0) == 0
    script.has = 5
    assert epoch(1) == 5
    kept = copy.deepcopy(restored.state_dict())
    script.has = 6
    assert epoch(2) == 6
    restored.load_state_dict(kept)  # back in epoch 1
    assert restored.state_dict() == kept
    assert epoch(1) == 5
    restored.load_state_dict(kept)  # within epoch 1, which ends
    script.has = 7
    assert epoch(2) == 7
    kept = copy.deepcopy(restored.state_dict())
    restored.load_state_dict(kept)
    assert restored.restored_value(lambda: script.has, 2) == (), "the script has it"


def test_of_a_function_that_is_called_again_the_new_variable_counts() -> None:
    """A checkpoint with the first batch of an epoch, whose call has made its variables anew."""
    restored = BatchVariable(ScriptProgress())
    restored.restored_value(lambda: 0.3)
    restored.restored_value(lambda: 1.0)  # in front of the loop
    assert restored.state_dict() == {"value": 1.0}


def test_it_is_the_attribute_of_its_name_once_the_script_has_asked_for_it() -> None:
    model = SimpleNamespace(tau=0.5)
    restored = BatchVariable(ScriptProgress(), attribute="tau")
    assert not restored.is_attribute("tau", 0.5)
    restored.restored_value(lambda: model.tau)
    assert restored.is_attribute("tau", 0.5)
    assert not restored.is_attribute("tau", 0.4), "that is another object's"
    assert not restored.is_attribute("steps", 0.5)


def test_a_text_that_grows_is_too_much_at_some_time() -> None:
    restored = BatchVariable(ScriptProgress())
    restored.restored_value(lambda: "a line\n" * 2000)
    assert restored.state_dict()
    restored.restored_value(lambda: "a line\n" * 3000)
    assert not restored.state_dict()


LIST: list[Any] = [1, [2.5, None], {"a": float("inf")}, (True, "x")]
VALUES: list[Any] = [
    {("a", 1): 0.5, None: [2]},
    None, 3, 0.1, float("-inf"), "text", LIST, {3}, set(), Counter("aab"), OrderedDict(a=1), defaultdict(list, a=[3]),
    {"window": deque([1], maxlen=2), "seen": defaultdict(int)}, {"best": 2, 3: []}, deque([1, 2], maxlen=3),
    torch.tensor(0.1), torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), [torch.zeros(0, 3)],
    np.float32(0.1), np.arange(4.0).reshape(2, 2), (np.int64(3), [np.zeros((2, 0))]),
]  # fmt: skip


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_comes_back_as_it_was(value: Any, in_place: bool) -> None:
    progress = ScriptProgress()
    restored = BatchVariable(progress, in_place=in_place)
    assert restored.restored_value(lambda: value) == ()
    kept = copy.deepcopy(restored.state_dict())
    restored.load_state_dict(kept)
    progress.draws += 1
    assert restored.restored_value(lambda: value) == (), "the script has it"
    present: Any = copy.deepcopy(value)
    match present:
        case list() | deque():
            present.append(9)
        case set():
            present.add(9)
        case dict():
            present["more"] = 1
        case torch.Tensor() | np.ndarray():
            present += 1
        case _:
            present = "another"
    restored.load_state_dict(kept)
    progress.draws += 1
    given = restored.restored_value(lambda: present)
    filled = in_place and isinstance(value, (list, deque, dict, set, torch.Tensor, np.ndarray))
    found = present if filled else given[0]
    assert bool(given) is not filled, "the script may have such an object elsewhere, too"
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_two_variables_that_have_one_object_now_are_two_again() -> None:
    """`best = last`: each is set, and the object is filled for none of them."""
    progress, shared = ScriptProgress(), {"loss": 9.0}
    for content in ({"loss": 1.0}, {"loss": 2.0}):
        restored = BatchVariable(progress)
        restored.load_state_dict({"value": content})
        progress.draws += 1
        assert restored.restored_value(lambda: shared) == (content,)
    assert shared == {"loss": 9.0}


class Thing:
    """Keeps its state by itself, or not at all."""


class Meter(Thing):
    avg = 0.5

    def update(self, value: float) -> None:
        """Of no interest."""


class MeterWithState(Meter):
    def load_state_dict(self, state: dict[str, float]) -> None:
        """Of no interest."""


class Logger(Thing):
    """As torchvision's references have it: its meters have the means."""

    def update(self, **values: float) -> None:
        """Of no interest."""

    def log_every(self, iterable: list[int]) -> list[int]:
        return iterable


class Rates(NamedTuple):
    tau: float


@dataclass(frozen=True)
class Config:
    tau: float


class Phase(Enum):
    WARM = 1


class Lookup:
    """Raises a KeyError for a name that it does not have."""

    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):  # pytest asks for one
            raise AttributeError(name)
        return {"loss": 0.5}[name]


def within_itself() -> dict[str, Any]:
    found = dict[str, Any]()
    found["whole"] = found
    return found


@pytest.mark.parametrize(
    ("value", "affects_training", "told"),
    [
        (torch.zeros(2000), True, True),
        ([torch.zeros(600), torch.zeros(600)], True, True),
        ([*range(2000)], True, True),
        (torch.zeros(3, requires_grad=True), True, True),
        ({"weight": torch.zeros(2000)}, False, True),
        (torch.nn.Linear(40, 40).state_dict(), False, True),
        ([*range(2000)], False, False),
        ({"a": [*range(2000)]}, False, False),
        ({"weight": torch.zeros(20)}, True, False),
        (Thing(), True, False),
        (Meter(), True, True),
        (MeterWithState(), True, False),
        (torch.Size([3]), True, False),
        (Rates(0.5), True, True),
        ({"loss": Thing()}, True, False),
        ([Thing(), *range(2000)], True, True),
        (Config(0.5), True, True),
        (Config, True, False),
        ({"weight": torch.zeros(20), "config": Config}, False, False),
        (Phase.WARM, True, True),
        (1 + 2j, True, True),
        (torch.zeros(2, dtype=torch.complex64), True, True),
        (np.longdouble(0.5), True, True),
        (within_itself(), True, True),
        (within_itself(), False, True),
        (Lookup(), True, False),
        (3, True, False),
    ],
)
def test_of_what_cannot_be_kept_that_is_told_which_the_script_needs(
    value: Any, affects_training: bool, told: bool
) -> None:
    found: list[str] = []
    progress = ScriptProgress(guard=SimpleNamespace())  # type: ignore[arg-type]
    epochs: Any = {("script.py", 1): SimpleNamespace(place=1)}
    variables = ScriptVariables(progress, epochs, telling(tell_unkept=found))
    variables.add("a", "script.py", LoopVariable("a", 1, affects_training, affects_training, False, loop=None))  # type: ignore[arg-type]
    for _ in range(2):
        ask = variables.by_batch if affects_training else partial(variables.by_epoch, line=1)
        assert ask(lambda: value, "a", "script.py") == ()
    assert found == ["a"] * told, "once"


def test_what_is_filled_in_place_keeps_its_parts() -> None:
    """`stats["mean"]` may be a buffer of the model, and `parts[0]` a list that the script has elsewhere."""
    progress, mean, inner = ScriptProgress(), torch.zeros(2), [1.0]
    value = {"mean": mean, "parts": [inner, 3]}
    restored = BatchVariable(progress, in_place=True)
    restored.restored_value(lambda: value)
    kept = copy.deepcopy(restored.state_dict())
    mean += 1
    inner.append(2.0)
    value["more"] = 5
    restored.load_state_dict(kept)
    progress.draws += 1
    assert restored.restored_value(lambda: value) == ()
    assert value == {"mean": mean, "parts": [inner, 3]}
    assert value["mean"] is mean
    assert mean.tolist() == [0, 0]
    assert value["parts"][0] is inner
    assert inner == [1.0]


@pytest.mark.parametrize("make", [list, lambda parts: dict(enumerate(parts))])
def test_places_that_share_one_part_now_are_filled_each_with_its_own(make: Any) -> None:
    """`hidden = [zeros] * 2`, of which the loop sets each place: a process that resumes has the zeros twice."""
    progress, zeros = ScriptProgress(), torch.zeros(2)
    restored = BatchVariable(progress, in_place=True)
    hidden = make([torch.ones(2), torch.full((2,), 2.0)])
    restored.restored_value(lambda: hidden)
    restored.load_state_dict(copy.deepcopy(restored.state_dict()))
    hidden = make([zeros, zeros])
    progress.draws += 1
    assert restored.restored_value(lambda: hidden) == ()
    assert [hidden[place].tolist() for place in (0, 1)] == [[1, 1], [2, 2]]
    assert zeros.tolist() == [0, 0], "the script may begin the next epoch with them"


def test_places_that_share_one_part_and_have_had_one_content_share_it_still() -> None:
    progress, row = ScriptProgress(), [1.0]
    table = [row, row]
    restored = BatchVariable(progress, in_place=True)
    restored.restored_value(lambda: table)
    restored.load_state_dict(copy.deepcopy(restored.state_dict()))
    row.append(2.0)
    progress.draws += 1
    assert restored.restored_value(lambda: table) == ()
    assert table == [[1.0], [1.0]]
    assert table[0] is table[1] is row


@pytest.mark.parametrize("present", [torch.zeros(1).expand(3), np.broadcast_to(np.zeros(1), 3)])
def test_a_part_that_cannot_be_written_to_is_another_one(present: Any) -> None:
    progress, kept = ScriptProgress(), [torch.arange(3.0) if isinstance(present, torch.Tensor) else np.arange(3.0)]
    restored = BatchVariable(progress, in_place=True)
    restored.restored_value(lambda: kept)
    restored.load_state_dict(copy.deepcopy(restored.state_dict()))
    hidden = [present]
    progress.draws += 1
    assert restored.restored_value(lambda: hidden) == ()
    assert hidden[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [{place: Thing() for place in range(5000)}, [Thing() for _ in range(5000)]])
def test_at_each_step_only_the_first_ones_of_many_objects_are_looked_at(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    monkeypatch.setattr(Thing, "__dir__", lambda self: looked.append(self) or [])
    restored = LoggedVariable(ScriptProgress())
    restored.restored_value(lambda: value)
    assert restored.state_dict() == {}
    assert 0 < len(looked) < 500


def test_an_attribute_of_an_object_that_is_not_there_is_missed_and_one_that_an_object_lacks_is_set() -> None:
    for thing, given in ((None, ()), (SimpleNamespace(), (3,))):
        progress = ScriptProgress()
        restored = BatchVariable(progress, attribute="total")
        restored.load_state_dict({"value": 3})
        progress.draws += 1
        assert restored.restored_value(lambda of=thing: of.total) == given
        assert restored.missed is not bool(given)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_tensor_of_the_model_is_kept_by_the_guard_and_not_lost(keeps: bool) -> None:
    found: list[str] = []
    model = torch.nn.Module()
    model.register_buffer("queue", torch.zeros(2000))
    progress = ScriptProgress(guard=SimpleNamespace())  # type: ignore[arg-type]
    variables = ScriptVariables(progress, {}, telling(tell_unkept=found))
    variables.add("a", "script.py", LoopVariable("m.queue", 1, True, True, True, loop=None))  # type: ignore[arg-type]
    variables.keep(cast(Any, SimpleNamespace(keep=lambda **_: None)), model if keeps else torch.nn.Module(), [])
    variables.by_batch(lambda: model.queue, "a", "script.py")
    assert found == ["m.queue"] * (not keeps)


@pytest.mark.parametrize(
    ("average", "in_place", "told"),
    [
        (lambda model: {name: 0.9 * value for name, value in model.state_dict().items()}, False, True),
        (lambda model: [p.detach().clone() for p in model.parameters()], False, True),
        (lambda model: [p.detach().clone() for p in model.parameters()], True, False),
        (lambda model: model.state_dict(), False, False),
        (lambda model: {"loss": torch.zeros(3), "accuracy": torch.zeros(3)}, False, False),
        (lambda model: 0.5, False, False),
    ],
)
def test_an_average_of_the_weights_that_is_made_anew_in_each_step_is_told_once(
    average: Any, in_place: bool, told: bool
) -> None:
    found: list[str] = []
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(8)))
    progress = ScriptProgress(guard=SimpleNamespace())  # type: ignore[arg-type]
    variables = ScriptVariables(progress, {}, telling(tell_copied=found))
    variables.add("a", "script.py", LoopVariable("a", 1, False, True, in_place, loop=None))  # type: ignore[arg-type]
    variables.keep(cast(Any, SimpleNamespace(keep=lambda **_: None)), model, [])
    for _ in range(2):
        assert variables.by_batch(lambda: average(model), "a", "script.py") == ()
    assert found == ["a"] * told


def test_a_sum_is_the_scripts_behind_its_loop_and_where_no_checkpoint_has_it() -> None:
    progress = ScriptProgress()
    restored = LoggedVariable(progress)
    restored.load_state_dict({"value": 3.0})
    assert restored.restored_value(lambda: 1.0, behind=True) == (), "of an evaluation"
    assert restored.state_dict() == {"value": 3.0}
    progress.draws += 1
    assert restored.restored_value(lambda: 1.0, behind=True) == (), "a body may have run for its names alone"
    assert restored.missed, "it is not what it was there, and has what is undone"
    assert restored.restored_value(lambda: 2.0) == ()
    restored.load_state_dict({"value": 3.0})
    restored.begin_anew()
    progress.draws += 1
    assert restored.restored_value(lambda: 1.0) == ()
    restored.load_state_dict({"value": 3.0})
    progress.draws += 1
    assert restored.restored_value(lambda: 1.0) == (3.0,)


@pytest.mark.parametrize(("in_place", "behind"), [(True, []), (False, [0.5])])
def test_a_history_that_was_empty_is_so_behind_a_rollback(in_place: bool, behind: list[float]) -> None:
    """Of the same object all the time: another one may be a list that the script has elsewhere."""
    progress, history = ScriptProgress(), list[float]()
    restored = LoggedVariable(progress, in_place=in_place)
    restored.restored_value(lambda: history)
    kept = copy.deepcopy(restored.state_dict())
    history.append(0.5)
    restored.load_state_dict(kept)
    progress.draws += 1
    assert restored.restored_value(lambda: history) == ()
    assert history == behind
    history.append(1.5)
    assert restored.state_dict() == {MISSES: True}


@pytest.mark.parametrize(
    ("value", "missed"),
    [([0.5], True), (torch.zeros(2), True), (torch.zeros((), requires_grad=True), True), (torch.zeros(1), False),
     ([], False), (["text"], False), ({"loss": torch.zeros(99)}, False), (Thing(), False), (2.5, False),
     ([(5, 0.5)], True), ([{"loss": 0.5}], True), ([torch.zeros(2)], True), ({"loss": [0.5]}, True),
     ([("a", "b")], False),
     (Meter(), True), ({"loss": Meter()}, True), ({"train": {"loss": Meter()}}, True), (Logger(), True),
     (Lookup(), False), (within_itself(), False)],
)  # fmt: skip
def test_a_sum_that_was_too_much_is_told_where_it_is_missed(value: Any, missed: bool) -> None:
    found: list[str] = []
    progress, kept = ScriptProgress(), dict[str, Any]()
    variables = ScriptVariables(progress, {}, telling(tell_missed=found))
    variables.add("a", "script.py", LoopVariable("a", 1, False, True, True, loop=None))  # type: ignore[arg-type]
    guard = cast(Any, SimpleNamespace(keep=lambda **named: kept.update(named)))
    variables.keep(guard, torch.nn.Linear(1, 1), [])
    (restored,) = kept.values()
    assert isinstance(restored, ToldAtEnd)
    variables.by_batch(lambda: value, "a", "script.py")
    restored.load_state_dict(restored.state_dict())
    for _ in range(2):
        progress.draws += 1
        variables.by_batch(lambda: value, "a", "script.py")
    assert found == ["a"] * missed


def test_they_are_kept_by_their_names_and_files() -> None:
    variables, kept = ScriptVariables(ScriptProgress(), {}, telling()), dict[str, RestoredVariable]()
    for file in ("/at/script.py", "/another/script.py"):
        variables.add("a of loop 1", file, LoopVariable("a", 1, True, True, False, loop=None))  # type: ignore[arg-type]
    guard: Any = SimpleNamespace(keep=lambda **named: kept.update(named))
    assert variables.count_of("turns of loop 1", "/at/script.py") is None
    variables.keep(guard, torch.nn.Linear(1, 1), [("/at/script.py", "turns of loop 1")])
    assert [*kept] == ["a of loop 1 of script.py", "a of loop 1 of script.py 1", "turns of loop 1 of script.py"]
    assert variables.count_of("turns of loop 1", "/at/script.py") is kept["turns of loop 1 of script.py"]


def test_what_is_not_there_stays_so() -> None:
    restored = BatchVariable(ScriptProgress())

    def read() -> Any:
        raise NameError("beta")

    assert restored.restored_value(read) == ()
    assert restored.state_dict() == {}
    restored.load_state_dict({})


def test_a_sum_of_losses_is_not_told_in_the_midst_of_an_update() -> None:
    found: list[str] = []
    progress = ScriptProgress(guard=SimpleNamespace(), batches=2)  # type: ignore[arg-type]
    variables = ScriptVariables(progress, {}, telling(tell_unkept=found))
    variables.add("a", "script.py", LoopVariable("a", 1, True, True, False, loop=None))  # type: ignore[arg-type]
    total = torch.zeros(3, requires_grad=True)
    variables.by_batch(lambda: total, "a", "script.py")
    assert not found
    progress.note_update()
    variables.by_batch(lambda: total, "a", "script.py")
    assert found == ["a"]
