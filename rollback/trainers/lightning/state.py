"""What a Trainer of Lightning knows of its training besides model, optimizer and learning rate.

Lightning's counters are put back by their own `load_state_dict`. What it has of metrics is the sum over the epoch so
far of each value that was logged, and the states of torchmetrics, which are plain attributes. In a process that has
just begun nothing has been logged yet: each value is logged anew, with the arguments that the script gave, and its sum
put in its place.
"""

import builtins
import functools
import json
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollback.errors import UsageError
from rollback.train.sharded import is_sharded
from rollback.train.state.kept_values import SharedText
from rollback.train.state.module_buffers import KEPT_ELSEWHERE
from rollback.trainers.lightning.logged_rows import LoggedRows
from rollback.trainers.lightning.own_attributes import OwnAttributes
from rollback.trainers.saved_files import SavedAt, SavedFiles
from rollback.trainers.variable_values import decoded, state_of

_PROGRESS = (
    "batch_progress", "scheduler_progress", "automatic_optimization.optim_progress", "val_loop.batch_progress",
)  # fmt: skip
"""Of the loop over an epoch's batches. The epochs are counted by the guard."""
_CONNECTOR = ("_first_loop_iter", "_current_fx", "_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_LOGGED = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute",
)  # fmt: skip
"""Arguments of a call of `log`."""
_METRIC = ("_update_count", "_computed", "_forward_cache", "has_reset")
"""Of a torchmetrics Metric, besides its states; the last one Lightning's own have."""
_OF_SOME = {
    "MinMaxMetric": ("min_val", "max_val"), "Running": ("_num_vals_seen",),
    "MeanIoU": ("num_classes", "_is_initialized", "_defaults"),  # made by its first batch
}  # fmt: skip
"""The same of torchmetrics' own, by their classes. What else a metric has may be a setting."""
_CHECKPOINT = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation", "current_score")
"""Of ModelCheckpoint, besides its `state_dict`."""
_SAVING = "ModelCheckpoint", "callbacks.model_checkpoint"
_STOPPING = "EarlyStopping", "callbacks.early_stopping"
_TIMING = "Timer", "callbacks.timer"


class FitState:
    """Kept by the guard on each rank. saved: the files that this run has saved; None before there is a run.

    ending: whether Lightning is at an epoch's end, behind its batches. epoch: that of the state that was put back last;
    None: there is none, or an earlier version kept it. asked_for_more: whether the script asks for more than when that
    was kept.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rows = [LoggedRows(logger) for logger in trainer.loggers if LoggedRows.fits(logger)]
        self._metrics = _Metrics()
        self.counts = LoopCounts(self._loop)
        self._loaded: dict[str, Any] | None = None
        self.saved: SavedFiles | None = None
        self.ending = False
        self.epoch: int | None = None
        self.asked_for_more = False

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError for what of it cannot be kept."""
        return self._told({name: getattr(self._trainer._logger_connector, name) for name in _CONNECTOR})

    def coming_state_dict(self) -> dict[str, Any] | None:
        """`state_dict` at the end of the step whose backward is under way; None: there will be none, or it is not
        known, as where Lightning logs, validates or saves."""
        if self._ends_with_more():
            return None
        connector = self._trainer._logger_connector
        new = connector.metrics  # which the batch's end takes over
        of_kinds = {
            "_callback_metrics": new["callback"], "_logged_metrics": new["log"], "_progress_bar_metrics": new["pbar"],
        }  # fmt: skip
        told = {name: getattr(connector, name) for name in _CONNECTOR}
        return self._told(told | {name: {**told[name], **metrics} for name, metrics in of_kinds.items()})

    def _told(self, connector: dict[str, Any]) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "should_stop": trainer.should_stop,
            "limits": _asked_for(trainer),
            "connector": _packed(connector, "what was logged"),
            "logged": {key: self._of_logged(item) for key, item in self._loop._results.items()},
            "metrics": {name: _of_metric(item) for name, item in self._metrics.of(trainer.lightning_module)},
            "callbacks": [
                [
                    name,
                    _packed(item.state_dict(), f"the state of {name}"),
                    _packed(_attributes(item, _CHECKPOINT), f"the state of {name}"),
                ]
                for name, item in self._stateful()
            ],
            "attributes": self._attributes.state_dict(),
            "rows": [rows.state_dict() for rows in self._rows] if trainer.is_global_zero else [],
        }

    def _ends_with_more(self) -> bool:
        """Whether behind this backward comes no update, or more than one, unless a callback wants that there."""
        trainer, loop = self._trainer, self._loop
        updates = trainer.global_step + 1
        return bool(
            loop._should_accumulate()
            or loop._num_ready_batches_reached()  # the epoch ends
            or 0 <= trainer.max_steps <= updates
            or trainer._logger_connector.should_update_logs
            or loop._should_check_val_fx(None)
            or any(_saves_at(updates, item) for item in trainer.callbacks if is_of(item, *_SAVING))
        )

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        """Load `counts` first."""
        if "progress" in kept:  # as an earlier version kept them
            self.counts.load_state_dict(json.dumps({name: kept[name] for name in ("progress", "stepped")}))
        self._loaded, self.ending, self.epoch = kept, False, kept.get("epoch")
        now, before = _asked_for(self._trainer), kept.get("limits", {})  # an earlier version kept none
        self.asked_for_more = any(
            number != -1 and (now[name] == -1 or now[name] > number) for name, number in before.items()
        )
        self.restore_again()
        if self._trainer.is_global_zero and self.saved is not None:
            folders = (getattr(callback, "dirpath", None) for callback in self._trainer.callbacks)
            self.saved.set_aside(self.place, (str(folder) for folder in folders if folder))

    @property
    def place(self) -> SavedAt:
        progress = self._loop.batch_progress
        ended = self.ending or progress.current.ready == 0
        return SavedAt(self._trainer.global_step, progress.total.ready, ended)

    def go_on(self) -> bool:
        """Training goes on. Whether it was put elsewhere since it last did."""
        moved = self._loaded is not None
        self.restore_again()
        self._loaded = self.counts.loaded = None
        return moved

    def begin(self) -> None:
        """Lightning has told the script that training begins."""
        self._attributes.begin()

    def restore_again(self) -> None:
        """Where training was put elsewhere: put it there once more, since Lightning has begun an epoch since, and
        callbacks may have logged that again."""
        if (kept := self._loaded) is None:
            return
        trainer, connector = self._trainer, self._trainer._logger_connector
        self.counts.restore_again()
        trainer.should_stop = kept["should_stop"]
        vars(connector).update(self._unpacked(kept["connector"]))
        self._put_logged(kept["logged"])
        for name, metric in self._metrics.of(trainer.lightning_module):
            if name in kept["metrics"]:
                vars(metric).update(self._unpacked(kept["metrics"][name]))
        states = {name: (state, attributes) for name, state, attributes in kept["callbacks"]}
        for name, item in self._stateful():
            if name in states:
                state, attributes = map(_unpacked, states[name])
                own = _of_this_process(item)
                item.load_state_dict(state)
                vars(item).update({**attributes, **own})
        if "attributes" in kept:  # an earlier version kept none
            self._attributes.load_state_dict(kept["attributes"])
        if trainer.is_global_zero:
            for rows, state in zip(self._rows, kept["rows"], strict=False):
                rows.load_state_dict(state)

    # Metrics ---------------------------------------------------------------------------------------------------------

    def _of_logged(self, item: Any) -> dict[str, Any]:
        meta = item.meta
        return {
            "arguments": {name: getattr(meta, name) for name in _LOGGED},
            "reduce_fx": [meta.reduce_fx.__name__, getattr(builtins, meta.reduce_fx.__name__, None) is meta.reduce_fx],
            "sync": [meta.sync.should, meta.sync.rank_zero_only],
            "sum": _of_metric(item),
        }

    def _put_logged(self, kept: dict[str, Any]) -> None:
        results, strategy = self._loop._results, self._trainer.strategy
        metrics = dict(self._metrics.of(self._trainer.lightning_module))
        for key in list(results):
            if key not in kept:
                del results[key]
        for key, item in kept.items():
            (name, is_builtin), (should, rank_zero_only) = item["reduce_fx"], item["sync"]
            if key not in results:
                value = metrics.get(item["arguments"]["metric_attribute"])
                results.log(
                    **item["arguments"], rank_zero_only=rank_zero_only, sync_dist_fn=strategy.reduce, batch_size=1,
                    value=torch.zeros((), device=strategy.root_device) if value is None else value,
                    reduce_fx=getattr(builtins if is_builtin else torch, name),
                )  # fmt: skip
                results[key].meta.sync.should = should  # not before: nothing is to be reduced now
            vars(results[key]).update(self._unpacked(item["sum"]))

    # Others ----------------------------------------------------------------------------------------------------------

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        """Callbacks and the data module, by name."""
        for item in self._trainer.callbacks:
            yield str(item.state_key), item
        if (data := self._trainer.datamodule) is not None:
            yield type(data).__qualname__, data

    @functools.cached_property
    def _attributes(self) -> OwnAttributes:
        """Asked for first when training is about to begin."""
        return OwnAttributes(self._trainer.lightning_module)

    def _unpacked(self, value: Any) -> Any:
        return _unpacked(value, self._trainer.strategy.root_device)


class LoopCounts(SharedText):
    """Where the loop over an epoch's batches stands: what each update changes behind the sum of its gradients, alike on
    all ranks. loaded: what was put there last, until training goes on."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> str:
        progress = {name: _counts(attrgetter(name)(self._loop)) for name in _PROGRESS}
        return json.dumps({"progress": progress, "stepped": self._loop._batches_that_stepped})

    def load_state_dict(self, text: str) -> None:
        self.loaded = json.loads(text)
        self.restore_again()

    def restore_again(self) -> None:
        if self.loaded is None:
            return
        for name, state in self.loaded["progress"].items():
            attrgetter(name)(self._loop).load_state_dict(state)
        self._loop._batches_that_stepped = self.loaded["stepped"]


class _Metrics:
    """The torchmetrics of a LightningModule, by their names in it. They are asked for at each step, and looked for
    again where some module in it has others than before."""

    def __init__(self) -> None:
        self._found: list[tuple[str, nn.Module]] = []
        self._registers: list[dict[str, nn.Module | None]] = []
        """What each of its modules has registered, if that was anything."""
        self._lengths: list[int] = []
        self._modules: list[nn.Module | None] = [None]

    def of(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        present = chain((module,), chain.from_iterable(map(dict.values, self._registers)))
        if [*map(len, self._registers)] != self._lengths or not all(map(is_, present, self._modules)):
            self._look(module)
        return self._found

    def _look(self, root: nn.Module) -> None:
        within = dict(root.named_modules())
        self._found = [(name, module) for name, module in within.items() if _is_metric(module)]
        for _, metric in self._found:
            vars(metric)[KEPT_ELSEWHERE] = True
        self._registers = [module._modules for module in within.values()]
        self._lengths = [*map(len, self._registers)]
        self._modules = [root, *chain.from_iterable(map(dict.values, self._registers))]


def _is_metric(module: nn.Module) -> bool:
    return any(kind.__module__ == "torchmetrics.metric" for kind in type(module).__mro__)


@functools.cache
def _of_some(kind: Any) -> tuple[str, ...]:
    return tuple(name for each in kind.__mro__ for name in _OF_SOME.get(each.__name__, ()))


def _of_metric(metric: Any) -> Any:
    states = () if vars(metric).get("is_tensor") is False else metric._defaults  # it stands for one of the module's
    kind: Any = type(metric)
    kept = _attributes(metric, (*states, *_METRIC, *_of_some(kind)))
    return _packed(kept, f"the metric {type(metric).__name__}")


def _counts(progress: Any) -> dict[str, Any]:
    """What its `state_dict` has. That looks up the fields of each of these dataclasses, 300 calls in a step."""
    return {name: _counts(value) if hasattr(value, "__dict__") else value for name, value in vars(progress).items()}


def _attributes(item: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names if name in vars(item)}


def _of_this_process(item: Any) -> dict[str, Any]:
    """Attributes of a callback that its `load_state_dict` is not to change.

    A Timer (`max_time`) adds `_offset` to the time since it began. What it keeps is all the time until then. Behind a
    rollback, which does not begin it anew, that would count twice; and the time of undone steps has passed.
    An EarlyStopping's patience is a setting, which the script of a resumed run may have changed.
    """
    running = ("_offset",) if is_of(item, *_TIMING) and item.start_time() is not None else ()
    return _attributes(item, (*running, *(("patience",) if is_of(item, *_STOPPING) else ())))


def is_of(item: Any, name: str, *modules: str) -> bool:
    """Whether it is of the class of that name from one of these modules of Lightning."""
    return any(kind.__name__ == name and kind.__module__.endswith(modules) for kind in type(item).__mro__)


def _saves_at(updates: int, callback: Any) -> bool:
    """Whether a ModelCheckpoint may save behind so many updates, within an epoch."""
    every = callback._every_n_train_steps
    return callback._train_time_interval is not None or (every >= 1 and updates % every == 0)


def _asked_for(trainer: Any) -> dict[str, float]:
    """How much training is asked for; -1: without end."""
    of_time = [item._duration for item in trainer.callbacks if is_of(item, *_TIMING)]
    return {
        "epochs": trainer.max_epochs,
        "steps": trainer.max_steps,
        "seconds": min((seconds for seconds in of_time if seconds is not None), default=-1),
        "patience": min((item.patience for item in trainer.callbacks if is_of(item, *_STOPPING)), default=-1),
    }


def _packed(value: Any, what: str) -> Any:
    """`value` with its tensors as numbers, of which the guard keeps all bits. Raises UsageError for anything else."""
    if isinstance(value, Tensor) and not is_sharded(value):
        flat = value.detach().reshape(-1).tolist()
        return {"tensor": flat, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_packed(item, what) for item in value)]
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {"dict": {key: _packed(item, what) for key, item in value.items()}}
    if isinstance(value, np.generic) and (state := state_of(lambda: value)):
        return state
    raise UsageError(
        f"rollback.protect cannot keep {what}: there is a {type(value).__name__} in it",
        hint="its state_dict may have numbers, texts, None, whole tensors, and lists, tuples and dicts of these; hand "
        "over a sharded average in an object of its own: rollback.protect(trainer, ema=ema)",
    )


def _unpacked(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, list):
        items = (_unpacked(item, device) for item in value[1:])
        return tuple(items) if value[0] == "tuple" else list(items)
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: _unpacked(item, device) for key, item in value["dict"].items()}
    if "value" in value:
        return decoded(value["value"])
    dtype = getattr(torch, value["dtype"])
    return torch.tensor(value["tensor"], dtype=dtype, device=device).reshape(value["shape"])
