"""A script that resumes by itself, in a run that goes on from its own checkpoint.

Such scripts load the newest folder that they have saved, and leave out what was read of its epoch: never when a run
begins, and always when it goes on. What is loaded the guard replaces. What `skip_first_batches` leaves out counts for
nothing: the guard has its own place in the data. What a loop draws and passes over (`if step < resume_step: continue`)
would be lost where the guard stands before it, and is refused.
"""

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from rollback.train.introspection import first_caller_outside
from rollback.train.start import attach
from rollback.trainers.adopt.enumeration import ScriptProgress
from rollback.trainers.adopt.notices import ScriptNotices, batches_passed_over


class OwnResume:
    """Of the script in this rank. progress: what it is given of the guard."""

    def __init__(self, progress: ScriptProgress, notices: ScriptNotices) -> None:
        self._progress, self._notices = progress, notices
        self._shortened: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()
        """What `skip_first_batches` has made: of which loader, and without how many batches."""
        self._left_out: int | None = None
        """So many batches the script leaves out to resume."""
        self._loaded = False
        """Whether the script has loaded a snapshot of its own before it was guarded."""
        self._begun: int | None = None
        """How many batches it was given before the newest pass, until it trains on one of that."""

    def note_load(self) -> None:
        """An optimizer is loaded, and the script is not guarded. What Accelerate prepares is given its own state."""
        frame = first_caller_outside("rollback", "torch")
        by = (frame.f_globals.get("__name__"), frame.f_code.co_name) if frame is not None else None
        self._loaded = self._loaded or by != ("accelerate.optimizer", "__init__")

    def note_script_pass(self) -> None:
        self._begun = self._progress.batches if self._loaded and not self._progress.holds else None

    def note_backward(self) -> None:
        self._begun = None

    def require_trained(self) -> None:
        """The script asks for a batch."""
        if self._begun is not None and self._progress.batches > self._begun and not self._progress.gathers:
            self._notices.refuse(batches_passed_over())

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
        if not self._notices.rank and not os.path.lexists(attach.run_paths(None).identity):  # other hosts may lack it
            return loader  # the run begins: this is refused
        if self._left_out is None:
            self._notices.say(
                f"the script leaves out {left_out} batches (skip_first_batches), as if it resumed: this is left aside, "
                "since the run goes on from its own checkpoint"
            )
        self._left_out = left_out
        return whole
