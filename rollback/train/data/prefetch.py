"""Finds a script that draws its next batch before the update of the present one, in an open update or behind the last.

nanoGPT does so: forward, draw the next batch, backward, step. For the guard, the batches that it handed out before an
update went into that update. With such a script it would count the wrong batches as trained, and a resumed run would be
a batch off. The guard cannot know which batches were used, so the script is refused.

The order of forward passes (with gradients), backward and handed-out batches distinguishes such a script from one that
leaves out a batch, or that draws all batches of an update first:

| seen                                             | as in                                | ahead? |
|--------------------------------------------------|--------------------------------------|--------|
| hand out, forward, backward, step                | the usual loop, accumulation         | no     |
| hand out, hand out, forward, backward, ...       | all batches of an update drawn first | no     |
| hand out, forward, hand out, forward, backward   | a batch that is left out             | no     |
| forward, hand out, backward (no forward between) | nanoGPT's loop                       | yes    |
| forward, backward, hand out, step, twice running | drawn between backward and step      | yes    |
| hand out, step (in its closure: forward, backward) | a step that is given a closure       | no     |

`_MOVES` says the same act by act. `HeldBack` has another table, for scripts whose batches are late by a whole update. A
script that draws in a thread beside the one that trains, as a prefetcher around the guard does, is refused where it
trains: what is raised in the thread is often heard by nobody. Where reading takes longer than an update, such a thread
never has two batches to spare; but it waits for the next one while the other trains.
"""

import inspect
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rollback.errors import UsageError
from rollback.train.introspection import first_caller_outside
from rollback.train.updates.backward import BackwardWatch, is_compiled
from rollback.train.updates.hooks import before_update, weak_hook

_WATCHED = 16  # updates; later the loop does not change
_SURE = 16  # updates in which batches were held back


class _Stage(Enum):
    """How far the open update has come."""

    BEGUN = "no forward has run"
    FORWARD = "a forward has run, whose backward is to come"
    DRAWN_WITHIN = "the same, and a batch was handed out behind it that no forward has had"
    BACKWARD = "its backward has run"
    DRAWN_BEHIND = "the same, and a batch was handed out behind it that no forward has had"
    AHEAD = "a batch was drawn within the update"


class _Act(Enum):
    """What the script does."""

    DRAWS = "it is handed out a batch"
    FORWARD = "a forward in training, with gradients"
    BACKWARD = "a backward"
    UPDATE = "the optimizer's step"


_MOVES: dict[tuple[_Stage, _Act], _Stage] = {
    (_Stage.BEGUN, _Act.FORWARD): _Stage.FORWARD,
    (_Stage.FORWARD, _Act.DRAWS): _Stage.DRAWN_WITHIN,
    (_Stage.FORWARD, _Act.BACKWARD): _Stage.BACKWARD,
    (_Stage.FORWARD, _Act.UPDATE): _Stage.BEGUN,
    (_Stage.DRAWN_WITHIN, _Act.FORWARD): _Stage.FORWARD,
    (_Stage.DRAWN_WITHIN, _Act.BACKWARD): _Stage.AHEAD,
    (_Stage.DRAWN_WITHIN, _Act.UPDATE): _Stage.BEGUN,
    (_Stage.BACKWARD, _Act.DRAWS): _Stage.DRAWN_BEHIND,
    (_Stage.BACKWARD, _Act.FORWARD): _Stage.FORWARD,
    (_Stage.BACKWARD, _Act.UPDATE): _Stage.BEGUN,
    (_Stage.DRAWN_BEHIND, _Act.FORWARD): _Stage.FORWARD,
    (_Stage.DRAWN_BEHIND, _Act.UPDATE): _Stage.BEGUN,
}
"""What is not here moves nothing."""


class Asking:
    """Within it a thread asks the guard for a batch, and waits for it."""

    thread: int | None = None

    def __enter__(self) -> None:
        self.thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.thread = None


class PrefetchWatch:
    """Watches one rank's script during its first updates. Does nothing where it cannot see the model's forward.

    model: the model as the script calls it. telltale: see `BackwardWatch`; None: there is none. refuse: ends the job
    where a thread draws ahead, from within the script's training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        telltale: nn.Parameter | None,
        refuse: Callable[[UsageError], object],
    ) -> None:
        self.asking = Asking()
        self._refuse = refuse
        self._stage = _Stage.BEGUN
        self._updates = 0
        self._late = 0
        """Updates in a row that were made with a batch in hand that no forward had had: one may be left out."""
        self._drawn, self._drawn_in = 0, 0
        """Batches that were handed out behind the last forward, and the thread in which the last one was."""
        self._trained_in = 0
        """The thread of the last forward behind a batch. A backward may compute it again, in a thread of its own."""
        self._held_back = HeldBack()
        self._hooks: list[Any] = []
        if telltale is not None and not is_compiled(model):
            self._hooks = [
                model.register_forward_pre_hook(weak_hook(self._before_forward)),
                BackwardWatch(model, telltale, self._after_backward),
                before_update(optimizer, self._before_update),
            ]

    def _move(self, act: _Act) -> None:
        self._stage = _MOVES.get((self._stage, act), self._stage)

    def handed_out(self) -> None:
        """A batch was handed out. Raises UsageError where this was too early."""
        if not self._hooks:
            return  # nothing moves any more
        if self._stage is _Stage.AHEAD and self._trained_in == threading.get_ident():  # else it is told there
            raise UsageError(
                "the script draws its next batch before optimizer.step() of the one before: the guard could not tell "
                "which batches an update was made of, and a run that resumes would leave one out",
                hint="ask the guard for the next batch after optimizer.step(). To have data read meanwhile, use a "
                "DataLoader with num_workers and pin_memory",
            )
        if (by := self._held_back.by) is not None:
            raise UsageError(
                f"{by} takes a batch before it gives the script the one before, or leaves out the first ones: the "
                "guard could not tell which batch an update was made of, and a run that resumes would lack one",
                hint="iterate the guard's batches one by one, with nothing that holds them in between. To have data "
                "read meanwhile, use a DataLoader with num_workers and pin_memory",
            )
        self._drawn, self._drawn_in = self._drawn + 1, threading.get_ident()
        self._held_back.handed_out()
        self._move(_Act.DRAWS)
        if self._updates >= _WATCHED and not self._held_back.suspected:
            self.end()

    def end(self) -> None:
        """There is nothing more to watch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def pass_ended(self) -> None:
        """There is no further batch in this pass."""
        self._held_back.pass_ended()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not module.training:
            return
        drawn, self._drawn = self._drawn, 0  # also by one without gradients, which a backward computes again
        if drawn:
            self._trained_in = threading.get_ident()
        if torch.is_grad_enabled():
            self._require_turns(ahead=drawn > 1 or self._stage is _Stage.AHEAD)
            self._move(_Act.FORWARD)
            self._held_back.forward()

    def _after_backward(self, *_: object) -> None:
        self._move(_Act.BACKWARD)

    def _before_update(self, optimizer: Optimizer) -> None:
        self._late = self._late + 1 if self._stage in (_Stage.DRAWN_WITHIN, _Stage.DRAWN_BEHIND) else 0
        self._move(_Act.UPDATE)
        if self._late > 1:
            self._stage = _Stage.AHEAD
        self._require_turns(ahead=self._stage is _Stage.AHEAD)
        self._updates += 1
        self._held_back.updated()

    def _require_turns(self, *, ahead: bool) -> None:
        """Called in the thread that trains. Another one may draw the batches, but each in its turn.

        ahead: whether the last batch was drawn too early, if another thread has drawn it."""
        here = threading.get_ident()
        if self.asking.thread in (None, here) and (self._drawn_in == here or not ahead):
            return
        self._refuse(
            UsageError(
                "a thread draws batches from the guard ahead of the one that trains on them: the guard could not tell "
                "which batches an update was made of, and what it does between two updates would be done within one",
                hint="loop over the guard in the thread that trains. To have data read meanwhile, use a DataLoader "
                "with num_workers and pin_memory",
            )
        )


class HeldBack:
    """Finds what holds a batch back between the guard and the loop, of one rank's script, in the pass that it is in: it
    takes the next one before it gives this one. Tell it of each forward in training with gradients.

    Prefetchers of data do so, as timm's, in a generator; and loops that train on the batch before. Each update is then
    made of an older batch than the guard believes: the wrong one would be skipped, and a run that goes on would lack
    what was held. As the guard sees it, such a script has batches to spare at its first update, and one for each
    further one:

    | seen in a pass                                     | as in                                   | held back? |
    |----------------------------------------------------|-----------------------------------------|------------|
    | each batch is followed by a forward                | the usual loop, accumulation            | no         |
    | again and again one is not                         | batches that are left out, or drawn first | no       |
    | only the first are not, for sixteen updates       | a generator that holds them             | yes        |
    | the same, where no generator asks for them         | a loop that leaves out the first ones   | unless:    |
    | and a forward in training behind the last batch    | a loop that holds them                  | yes        |

    A generator that leaves out the very first batches looks like one that holds them, and is taken for one.
    """

    def __init__(self) -> None:
        self.by: str | None = None
        """What holds batches back, once it is found out, in words."""
        self._start()

    def _start(self) -> None:
        self._unused = self._updates = 0
        """The pass's first batches that no forward followed, and its updates so far."""
        self._used = True
        self._regular, self._over = True, False
        self._generator: str | None = None

    @property
    def suspected(self) -> bool:
        return self._unused > 0 and self._regular

    def handed_out(self) -> None:
        """A batch was handed out, perhaps the first of a pass."""
        if self._over:
            self._start()
        if not self._used:
            if self._updates:
                self._regular = False
            else:
                self._unused += 1
                self._generator = _generator_that_asks()
        self._used = False

    def forward(self) -> None:
        self._used = True
        if self._over and self.suspected:
            self.by = self._generator or "its loop"

    def updated(self) -> None:
        self._updates += 1
        if self._updates == _SURE and self._generator is not None and self.suspected:
            self.by = self._generator

    def pass_ended(self) -> None:
        """There is no further batch."""
        self._over = True
        self._regular &= self._used  # who holds batches back trains on one behind the last, too


def _generator_that_asks() -> str | None:
    """The generator of somebody else's in which the guard was asked for a batch, in words; None: it was none."""
    frame = first_caller_outside("rollback")
    if frame is None or not frame.f_code.co_flags & inspect.CO_GENERATOR:
        return None
    return f"the generator {frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
