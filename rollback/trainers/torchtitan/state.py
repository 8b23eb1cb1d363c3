"""What a Trainer of torchtitan has that a guard keeps: its counters, its optimizers, its place in the data.

torchtitan has forms of its own for most of it, made for its checkpoints: an optimizer's state by the names of
parameters, a loader's as pickled bytes, layers that are gathered and split. Here all is kept as it lies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader


class TrainState:
    """Kept by the guard on each rank. drawn: batches that a rollback makes void."""

    def __init__(self, trainer: Any, drawn: list[Any]) -> None:
        self._trainer = trainer
        self._drawn = drawn
        self._moved = False

    def state_dict(self) -> dict[str, Any]:
        kept: dict[str, Any] = self._trainer.state_dict()
        return kept

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self._trainer.load_state_dict(kept)
        self._drawn.clear()
        self._moved = True
        _drop_points_behind(self._trainer.metrics_processor.logger, self._trainer.step)

    def has_moved(self) -> bool:
        """Whether training was put elsewhere since this was last asked."""
        moved, self._moved = self._moved, False
        return moved


def _drop_points_behind(logger: Any, reached: int) -> None:
    """TensorBoard is told to drop the points of later steps than `reached`."""
    for item in getattr(logger, "_loggers", ()):
        if (writer := getattr(item, "writer", None)) is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            restart = SessionLog(status=SessionLog.START)
            writer.file_writer.add_event(Event(session_log=restart), step=reached + 1)


class JoinedOptimizer:
    """The optimizers of torchtitan's container as one: their groups, their states, and their steps.

    container: an OptimizersContainer, whose hooks are called once for the steps of all.
    """

    def __init__(self, container: Any) -> None:
        self._optimizers = list(container)
        self.register_step_pre_hook = container.register_step_pre_hook
        self.register_step_post_hook = container.register_step_post_hook

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {parameter: state for optimizer in self._optimizers for parameter, state in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """As a torch optimizer's of all groups: parameters are counted through."""
        groups: list[dict[str, Any]] = []
        states: dict[int, Any] = {}
        for first, optimizer in self._counted():
            own = optimizer.state_dict()
            groups += [
                {**group, "params": [first + index for index in group["params"]]} for group in own["param_groups"]
            ]
            states |= {first + index: state for index, state in own["state"].items()}
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, joined: dict[str, Any]) -> None:
        groups = iter(joined["param_groups"])
        for first, optimizer in self._counted():
            own = [next(groups) for _ in optimizer.param_groups]
            count = sum(len(group["params"]) for group in own)
            optimizer.load_state_dict(
                {
                    "param_groups": [
                        {**group, "params": [index - first for index in group["params"]]} for group in own
                    ],
                    "state": {
                        index - first: state for index, state in joined["state"].items()
                        if first <= index < first + count
                    },
                }
            )  # fmt: skip

    def _counted(self) -> Iterator[tuple[int, Any]]:
        first = 0
        for optimizer in self._optimizers:
            yield first, optimizer
            first += sum(len(group["params"]) for group in optimizer.param_groups)


@contextmanager
def without_state_dict_hooks(model: nn.Module) -> Iterator[None]:
    """Within it the model's `state_dict` has the parameters as they lie, without what torchtitan's layers make of them.

    A fused layer would gather its parts on each rank, and split them into what other layers have.
    """
    taken = [
        (module._state_dict_hooks, key, hook)
        for module in model.modules()
        for key, hook in module._state_dict_hooks.items()
        if str(getattr(hook, "__module__", "")).startswith("torchtitan.")
    ]
    for hooks, key, _ in taken:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            hooks[key] = hook


def data_sets_of(loader: Any) -> list[Any]:
    """The data set of a loader, and those that it interleaves."""
    dataset = getattr(loader, "dataset", None)
    return [dataset, *getattr(dataset, "_datasets", ())]


def make_rewindable(loader: Any) -> None:
    """Have torchtitan's loader give its state after any batch, without pickle, and go back to an earlier one."""
    if all(kind.__name__ != "ParallelAwareDataloader" for kind in type(loader).__mro__):
        return
    loader.snapshot_every_n_steps = 1  # for its workers; torchtitan sets it to where its own checkpoints are due

    def state_dict() -> Any:
        return StatefulDataLoader.state_dict(loader)

    def load_state_dict(state: Any) -> None:
        for dataset in data_sets_of(loader):
            if hasattr(dataset, "_original_data"):  # it shuffles for its later epochs, and not back for its first
                dataset._data = dataset._original_data
        StatefulDataLoader.load_state_dict(loader, state)

    loader.state_dict, loader.load_state_dict = state_dict, load_state_dict
