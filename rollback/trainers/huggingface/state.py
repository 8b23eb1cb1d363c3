"""What a Trainer knows of its training besides model, optimizer and learning rate."""

import copy
import json
import math
import os
from collections.abc import Callable
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import DefaultFlowCallback, ExportableState

from rollback.train.comm.recorder import say
from rollback.train.state.kept_values import SharedText
from rollback.trainers.huggingface.saves import BEST, FolderSaves
from rollback.trainers.huggingface.trl import adapted_attributes

_COUNTED = "epoch", "global_step", "num_input_tokens_seen"
"""Of TrainerState, what another update changes: alike on all ranks, since of tokens it gathers how many all have."""
_STATE = "total_flos", *BEST
"""The rest, with its `log_history`; what else it has follows from arguments."""
_LOOP = (
    "_total_loss_scalar", "_globalstep_last_logged", "current_flos", "_total_train_tokens", "_step", "_buffer_step",
)  # fmt: skip
"""Of the Trainer; the last three TRL's trainers have, and some have more (`adapted_attributes`). `_tr_loss` and
`_METRICS` are put back in place."""
_METRICS = "_metrics", "_stored_metrics"
"""What TRL's trainers have gathered for their next log, by mode and name; of those one has one of the two."""
_PLAIN = {type(None), bool, int, float, str}


class LoopState:
    """Kept by the guard on each rank. moved: whether training has been put elsewhere since that was last looked at.

    asked_for_more: whether a run that a callback had stopped is to go on behind that.
    """

    def __init__(self, trainer: Any, saves: FolderSaves) -> None:
        self._trainer, self._saves = trainer, saves
        self.moved = False
        self.asked_for_more = False
        self.counts = TrainerCounts(trainer)
        self.logs = LogHistory(trainer)
        self.sums = StepSums(trainer)
        self._generation = _Changes(lambda: getattr(trainer.model, "generation_config", None) or SimpleNamespace())
        """The first evaluation that makes texts fills in what was left open, so that those behind it make texts of
        another length."""
        self._first: dict[int, dict[str, Any]] = {}
        """Arguments of each callback when it was first seen, by its id."""

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        of_trainer, of_state = vars(trainer), vars(state)
        return {
            "state": {name: of_state[name] for name in _STATE if name in of_state},
            "stopped_before": state.max_steps if self.stopped_early else None,
            "stateful_callbacks": state.stateful_callbacks,
            "callbacks": [[type(item).__name__, *self._of_callback(item)] for item in self._exportable()],
            "loop": {name: of_trainer[name] for name in self._attributes() if name in of_trainer},
            "loss": trainer._tr_loss.item(),
            "generation": self._generation.told(),
            "metrics": {
                mode: {name: list(map(_number, values)) for name, values in gathered.items()}
                for mode, gathered in self._gathered().items()
            },
        }

    def coming_state_dict(self) -> dict[str, Any] | None:
        """`state_dict` at the end of the step whose backward is under way, if that is known."""
        if (sums := self.sums.at_steps_end()) is None:
            return None
        state, (loss, flos) = self.state_dict(), sums
        return {**state, "loss": loss, "loop": {**state["loop"], "current_flos": flos}}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        """Load `counts` first."""
        trainer, state = self._trainer, self._trainer.state
        for name, value in kept["state"].items():
            setattr(state, name, value)
        if "logs" in kept:  # as an earlier version kept them
            self.logs.load_state_dict(kept["logs"])
        for name in state.stateful_callbacks.keys() & kept["stateful_callbacks"].keys():
            state.stateful_callbacks[name] = kept["stateful_callbacks"][name]
        for item, (name, attributes, *counted) in zip(self._exportable(), kept["callbacks"], strict=False):
            if type(item).__name__ == name:  # an earlier version kept attributes alone
                self._put_callback(item, attributes, *counted)
        for name in kept["loop"].keys() & self._attributes():
            setattr(trainer, name, kept["loop"][name])
        trainer._tr_loss.fill_(kept["loss"])
        if "generation" in kept:  # an earlier version did not tell
            self._generation.put(kept["generation"])
        for gathered in self._gathered().values():
            gathered.clear()
        for mode, values in kept["metrics"].items():
            self._gathered()[mode].update(values)
        if "_last_loaded_step" in vars(trainer):  # TRL's, of the weights that vLLM has: of a step that may be undone
            trainer._last_loaded_step = -1
        stopped_before = kept.get("stopped_before")
        trainer.control.should_training_stop = stopped_before is not None
        # Only more than was asked for then is a reason to go on behind a stop.
        self.asked_for_more = stopped_before is not None and state.max_steps > stopped_before
        trainer.control.should_epoch_stop = False
        self._saves.set_aside()
        self.moved = True

    def _attributes(self) -> tuple[str, ...]:
        return *_LOOP, *adapted_attributes(self._trainer)

    @property
    def stopped_early(self) -> bool:
        """Whether a callback has stopped the training: at `max_steps` the Trainer does."""
        state = self._trainer.state
        return bool(self._trainer.control.should_training_stop and state.global_step < state.max_steps)

    def forget_lost_best(self) -> None:
        """Let the next evaluation choose a new best model where the folder of the best one is gone. Collective.

        With `save_total_limit`, the Trainer deletes it for a better one, and the steps of that may be undone later; or
        a host is lost. Ranks that save nothing may have no folders at all.
        """
        trainer, state, accelerator = self._trainer, self._trainer.state, self._trainer.accelerator
        best = state.best_model_checkpoint
        is_lost = trainer.args.should_save and best is not None and not os.path.isdir(best)
        lost = torch.tensor(float(is_lost), device=accelerator.device)
        if not accelerator.reduce(lost, "sum").item():
            return
        vars(state).update(dict.fromkeys(BEST))  # as before the first evaluation
        if accelerator.is_main_process:
            say(
                f"the folder of the best model so far, {best}, is gone: a better one of a step that is undone now had "
                "taken its place, or it was on a host that was lost. The next evaluation chooses a new best model"
            )

    def _gathered(self) -> Any:
        of_trainer = vars(self._trainer)
        return next((of_trainer[name] for name in _METRICS if name in of_trainer), {})

    def _of_callback(self, item: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its attributes, and those of its arguments that are others than at first: what it counts there. What stays
        as it is may be a setting, which the script of a resumed run may have changed."""
        told = item.state()
        first, args = self._first_args(item), told.get("args", {})
        counted = {name: value for name, value in args.items() if name not in first or value != first[name]}
        return told.get("attributes", {}), counted

    def _put_callback(self, item: Any, attributes: dict[str, Any], counted: dict[str, Any] | None = None) -> None:
        """As `ExportableState.from_state`, but in place: handler and script go on with this one."""
        args = {**self._first_args(item), **(counted or {})}
        if item.state().get("args", {}) != args:
            vars(item).update(vars(type(item)(**copy.deepcopy(args))))
        vars(item).update(attributes)

    def _first_args(self, item: Any) -> dict[str, Any]:
        known = self._first.get(id(item))
        if known is None:
            known = self._first[id(item)] = copy.deepcopy(item.state().get("args", {}))
        return known

    def stateless_callbacks(self) -> list[Any]:
        return [item for item in self._trainer.callback_handler.callbacks if not isinstance(item, ExportableState)]

    def _exportable(self) -> list[Any]:
        return [item for item in self._trainer.callback_handler.callbacks if isinstance(item, ExportableState)]


class ChangedArguments(SharedText):
    """Arguments that a callback sets otherwise while it trains, as how often the Trainer logs: they go with the
    training. Make it where that begins. What nothing changes is a setting of the script, as it has it now."""

    def __init__(self, trainer: Any) -> None:
        self._arguments = _Changes(lambda: trainer.args)
        self._intervals = _Changes(lambda: trainer.state, "logging_steps", "eval_steps", "save_steps")

    def state_dict(self) -> str:
        return json.dumps([self._arguments.told(), self._intervals.told()])

    def load_state_dict(self, text: str) -> None:
        for changes, told in zip((self._arguments, self._intervals), json.loads(text), strict=True):
            changes.put(told)


class _Changes:
    """What has become of an object's plain values since this was made. names: of those that count; none: all."""

    def __init__(self, owner: Callable[[], object], *names: str) -> None:
        self._owner, self._names = owner, names
        self._first = {**self._now()}
        self._seen, self._told = self._first, dict[str, list[Any]]()
        """What there was when it was last asked, and what it told of that."""

    def told(self) -> dict[str, list[Any]]:
        """By name, what it was at first and what it is. Asked at each step, and arguments are 130 values."""
        now = self._now()
        if len(now) != len(self._seen) or not all(map(is_, now.values(), self._seen.values())):
            first, self._seen = self._first, {**now}
            pairs = {name: [first.get(name), value] for name, value in now.items() if value is not first.get(name)}
            self._told = {
                name: pair for name, pair in pairs.items() if {*map(type, pair)} <= _PLAIN and pair[0] != pair[1]
            }
        return self._told

    def put(self, told: dict[str, list[Any]]) -> None:
        """What is no plain value was set by `train()` itself, and stays."""
        undone = {name: was for name, (was, _) in self.told().items()}
        again = {name: value for name, (was, value) in told.items() if self._first.get(name) == was}  # else set anew
        vars(self._owner()).update({**undone, **again})

    def _now(self) -> dict[str, Any]:
        values = vars(self._owner())
        return {name: values[name] for name in self._names if name in values} if self._names else values


class TrainerCounts(SharedText):
    """What each update changes behind the sum of its gradients, alike on all ranks.

    last_update: its gradient's norm, and the learning rate that it was made with.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.last_update: tuple[Any, Any] = None, None

    def state_dict(self) -> str:
        of_state = vars(self._trainer.state)
        counted = {name: of_state[name] for name in _COUNTED if name in of_state}
        return _text_of([counted, *map(_number, self.last_update)])

    def load_state_dict(self, text: str) -> None:
        counted, *last_update = json.loads(text)
        vars(self._trainer.state).update(counted)
        self.last_update = tuple(last_update)


class StepSums:
    """What the Trainer adds up behind each backward, as known in the last one of an update: of this rank's losses since
    the last log, and of its operations. Two methods here stand in the place of others."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._backward, self._operations = trainer.accelerator.backward, trainer.floating_point_ops
        self._batch: Any = None
        self._loss: Tensor | None = None
        self._counted: tuple[Any, Any] | None = None
        self._sums: list[tuple[float, float] | None] = []
        """Of this backward, once they were asked for."""

    def begin(self, batch: Any) -> None:
        self._batch, self._loss, self._sums = batch, None, []

    def backward(self, loss: Tensor, **given: Any) -> None:
        self._loss = loss.detach()
        self._backward(loss, **given)

    def floating_point_ops(self, batch: Any) -> Any:
        """It goes through all parameters: once for each batch."""
        counted, self._counted, self._batch = self._counted, None, None
        return counted[1] if counted is not None and counted[0] is batch else self._operations(batch)

    def at_steps_end(self) -> tuple[float, float] | None:
        """None: not known, as where the Trainer logs at the step's end, which begins them anew, or evaluates."""
        if not self._sums:
            self._sums.append(self._foretold())
        return self._sums[0]

    def _foretold(self) -> tuple[float, float] | None:
        trainer = self._trainer
        if self._loss is None or not trainer.accelerator.sync_gradients or self._ends_with_more():
            return None
        total = trainer._tr_loss.clone()
        total += self._loss
        if not math.isfinite(loss := total.item()):  # of another one the Trainer adds something else, if so set
            return None
        self._counted = self._batch, self._operations(self._batch)
        return loss, trainer.current_flos + float(self._counted[1])

    def _ends_with_more(self) -> bool:
        """Whether the Trainer logs, evaluates or saves at the end of this step, unless a callback wants that there."""
        trainer = self._trainer
        state, control = copy.copy(trainer.state), copy.copy(trainer.control)
        state.global_step += 1
        control = DefaultFlowCallback().on_step_end(trainer.args, state, control)
        return bool(control.should_log or control.should_evaluate or control.should_save)


class LogHistory(SharedText):
    """What a Trainer has logged so far, as text: a row to a line.

    The guard reads it at every step's end, and the rows of a long run are thousands. They only become more. Ranks log
    the same, but for how long an evaluation took, and a Trainer whose `evaluate` logs on its first rank alone.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rows: list[dict[str, Any]] = []
        self._known = 0
        self._text = ""

    @property
    def lines(self) -> int:
        return len(self._trainer.state.log_history)

    def load_state_dict(self, text: str) -> None:
        self._trainer.state.log_history = [json.loads(row) for row in text.splitlines()]

    def state_dict(self) -> str:
        rows = self._trainer.state.log_history
        if rows is not self._rows or len(rows) < self._known:
            self._rows, self._known, self._text = rows, 0, ""
        if len(rows) > self._known:
            self._text += "".join(f"{_text_of(row)}\n" for row in rows[self._known :])
            self._known = len(rows)
        return self._text


def _number(value: Any) -> Any:
    """A tensor's number; plain values are read at every step's end in less time."""
    return value.item() if isinstance(value, Tensor) else value


def _in_json(value: Any) -> Any:
    """A number of another library, or what people would read."""
    return value.item() if getattr(value, "shape", None) == () else str(value)


_text_of = json.JSONEncoder(default=_in_json).encode
