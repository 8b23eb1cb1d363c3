"""Finds what holds a batch back between the guard and the loop: it takes the next one before it gives this one.

Prefetchers of data do so, as timm's, in a generator; and loops that train on the batch before. Each update is then made
of an older batch than the guard believes: the wrong one would be skipped, and a run that goes on would lack what was
held. As the guard sees it, such a script has batches to spare at its first update, and one for each further one:

| seen in a pass                                     | as in                                   | held back? |
|----------------------------------------------------|-----------------------------------------|------------|
| each batch is followed by a forward                | the usual loop, accumulation            | no         |
| again and again one is not                         | batches that are left out, or drawn first | no       |
| only the first are not, for sixteen updates       | a generator that holds them             | yes        |
| the same, where no generator asks for them         | a loop that leaves out the first ones   | unless:    |
| and a forward in training behind the last batch    | a loop that holds them                  | yes        |

A generator that leaves out the very first batches looks like one that holds them, and is taken for one.
"""

import inspect
import sys
from types import FrameType

_SURE = 16  # updates


class HeldBack:
    """Of one rank's script, in the pass that it is in. Tell it of each forward in training with gradients."""

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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "rollback":
        frame = frame.f_back
    if frame is None or not frame.f_code.co_flags & inspect.CO_GENERATOR:
        return None
    return f"the generator {frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
