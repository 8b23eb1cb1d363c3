"""A script that resumes by itself, in a run that goes on from its own checkpoint.

Such scripts load the newest folder that they have saved, and leave out what was read of its epoch: never when a run
begins, and always when it goes on. What is loaded the guard replaces. What `skip_first_batches` leaves out counts for
nothing: the guard has its own place in the data. What a loop draws and passes over (`if step < resume_step: continue`)
would be lost where the guard stands before it, and is refused.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from rollback.errors import UsageError
from rollback.train.comm.recorder import say
from rollback.train.start import attach
from rollback.trainers.adopt.script_pass import ScriptPass
from rollback.trainers.adopt.signs import passes_over


class OwnResume:
    """Of the script in this rank."""

    def __init__(self) -> None:
        self._is_first = os.environ.get("RANK", "0") == "0"
        self._shortened: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()
        """What `skip_first_batches` has made: of which loader, and without how many batches."""
        self._left_out: int | None = None
        """So many batches the script leaves out to resume."""
        self._loaded = self._guarded = False
        """Whether the script has loaded the state of an optimizer before it was guarded, and whether it is."""
        self._asked = 0
        """How often it has asked for a batch of the newest pass, up to the first one that it has trained on."""

    def load(self, original: Callable[..., Any], optimizer: Any, state_dict: Any) -> Any:
        """`Optimizer.load_state_dict`. What Accelerate prepares is given the state that it has: none yet."""
        changes = state_dict.get("state") or state_dict != optimizer.state_dict()
        self._loaded = self._loaded or bool(changes and not self._guarded)
        return original(optimizer, state_dict)

    def backward(self, original: Callable[..., Any], *given: Any, **others: Any) -> Any:
        self._asked = -1
        return original(*given, **others)

    def watched(self, iterate: Callable[..., Any], refuse: Callable[[UsageError], Any]) -> Callable[..., Any]:
        """`iterate` makes the pass over a loader. refuse: ends the ranks where the script passes over its beginning."""

        def begin(original: Callable[..., Any], loader: Any) -> Any:
            guarded, self._guarded = self._guarded, True  # what a guard loads meanwhile is its own
            batches = iterate(original, loader)
            self._guarded = guarded or isinstance(batches, ScriptPass)
            if self._loaded and isinstance(batches, ScriptPass):
                self._asked, batches.asked = 0, partial(self._ask, refuse)
            return batches

        return begin

    def _ask(self, refuse: Callable[[UsageError], Any]) -> None:
        if self._asked == 1:
            refuse(passes_over())
        self._asked += self._asked >= 0

    def shorten(self, original: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
        """`accelerate.skip_first_batches`."""
        shortened = original(dataloader, num_batches)
        self._shortened[shortened] = dataloader, num_batches
        return shortened

    def whole(self, loader: Any, *, guarded: bool) -> Any:
        """The loader that a guard takes for `loader`, which is iterated: the whole one, if this leaves out batches to
        resume. guarded: whether there is a guard; behind that the script may leave out others for another reason."""
        whole, left_out = self._shortened.get(loader, (loader, None))
        if guarded or whole is loader:
            return whole if left_out == self._left_out else loader
        if self._is_first and not os.path.lexists(attach.run_paths(None).identity):  # other hosts may not have it
            return loader  # the run begins: this is refused
        if self._is_first and self._left_out is None:
            say(
                f"the script leaves out {left_out} batches (skip_first_batches), as if it resumed: this is left aside, "
                "since the run goes on from its own checkpoint"
            )
        self._left_out = left_out
        return whole
