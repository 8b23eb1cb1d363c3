"""The cursor of a callable or iterator that draws its batches: nanoGPT's `get_batch`, an endless generator."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from rollback.errors import RunDoesNotFit, UsageError
from rollback.train.data import rng
from rollback.train.data.cursor.base import Cursor, Indices, cannot_ask_again
from rollback.train.data.cursor.digest import Digest
from rollback.wording import AdviceText

DRAWS_BESIDE = AdviceText(
    "draws-beside-the-data",
    "'{name}' draws the batches, and something else in the loop draws random numbers on the CPU, too (an evaluation, "
    "dropout). Under a guard the batches have random states of their own, so that a batch is the same after a restart "
    "or a rollback. So they are other batches than without a guard, as random: this needs no answer. For the same "
    "ones in both, let '{name}' draw from a generator of its own, and give it a state_dict and load_state_dict",
)


class DrawnCursor(Cursor):
    """Replays `draw` from the CPU random states (Python, NumPy, torch). Its batches must depend on nothing else.

    The data have a random stream of their own. At the first batch the stream takes over the random states of the
    process, and the process goes on from seeds drawn from the same states. So the batches are those of an unguarded run
    in which nothing but the data draws, and batch b is the same whatever the model draws. All batches are one endless
    epoch, unless `draw` raises StopIteration. `skip` draws a batch and drops it.

    Four things cannot be restored here: a generator that walks through files, a counter in a closure, a
    `torch.Generator` of the callable's own, and a draw on a GPU. To find them early, `open_epoch` draws the first batch
    of a run twice from the same random states; if the two differ, it raises UsageError. A process that resumes draws
    the last batch before its position again; if it differs, RunDoesNotFit is raised.

    once: whether `draw` cannot repeat what it gave (an iterator). A batch that is drawn only to be compared would then
    be lost, so batches that cannot be compared are refused.
    """

    kind = "drawn"
    has_epochs = False

    def __init__(self, draw: Callable[[], Any], *, name: str, once: bool = False) -> None:
        super().__init__()
        self._draw = draw
        self._name = name
        self._once = once
        self._stream: rng.RandomStream | None = None
        self._last: tuple[rng.RandomStream, Digest] | None = None
        """The stream before the batch drawn last, and the digest of that batch."""
        self._drew_beside = self._is_lost = False

    def remarks(self) -> Iterable[AdviceText]:
        return [DRAWS_BESIDE.of(name=self._name)] if self._drew_beside else ()

    def _open(self) -> None:
        if self._stream is None:
            self._refuse_hidden_state()
            self._stream = rng.RandomStream.take_over()

    def _refuse_hidden_state(self) -> None:
        first, second = self._trial(), self._trial()
        if first.value != second.value:
            of_loader = (
                "in the place of an iterator over a loader, as of cycle(loader), hand over the loader: `batches = "
                "(batch for _ in guard.epochs(10**9) for batch in guard)` begins it anew at each end; else "
            )
            raise UsageError(
                f"cannot go back in the batches of '{self._name}': drawn twice from the same random states, the first "
                "is not the same, so they depend on something else (a position or a generator of its own)",
                hint=(of_loader if self._once else "")
                + "draw from the global random states of Python, NumPy or torch (CPU) alone; or hand over an object "
                "with state_dict and load_state_dict, or one whose __iter__ begins anew each time",
            )
        if self._once and not first.whole:
            raise UsageError(
                f"cannot tell whether the batches of '{self._name}' can be drawn again: they hold objects that cannot "
                "be compared",
                hint="hand out tensors, arrays, numbers and strings in dicts, lists, tuples or dataclasses; or hand "
                "over an object with state_dict and load_state_dict, or one whose __iter__ begins anew each time",
            )

    def _trial(self) -> Digest:
        with rng.preserved():
            try:
                return Digest(self._draw())
            except StopIteration:
                return Digest(())

    def _fetch(self) -> Any:
        assert self._stream is not None
        self._drew_beside = self._drew_beside or (self._last is not None and self._stream.drawn_beside)
        self._require_more()
        before = self._stream.copy()
        try:
            with self._stream:
                data = self._draw()
        except StopIteration:
            raise
        except Exception:
            self._note_failure()
            raise
        self._last = before, Digest(data)
        return data

    def _note_failure(self) -> None:
        self._is_lost = inspect.isgenerator(getattr(self._draw, "__self__", None))  # it has come to its end

    def _require_more(self) -> None:
        if self._is_lost:
            raise cannot_ask_again(self._name)

    def _pass_over(self) -> Indices:
        assert self._stream is not None
        self._require_more()
        with self._stream:
            try:
                self._draw()
            except StopIteration:
                raise
            except Exception:  # noqa: BLE001 - it may be passed over for this very reason; the draws made still count
                self._note_failure()
        return None

    def _state(self) -> dict[str, Any]:
        last = None
        if self._last is not None and (digest := self._last[1].value) is not None:
            last = {"stream": self._last[0].state_dict(), "digest": f"{digest:016x}"}
        return {"stream": self._stream.state_dict() if self._stream else None, "last": last}

    def _seek(self, state: dict[str, Any]) -> None:
        fresh, stream, self._last = self._stream is None, state["stream"], None
        self._stream = rng.RandomStream.from_state_dict(stream) if stream is not None else None
        if fresh and state["last"] is not None and not self.accepts_other_length:
            self._compare_with(state["last"])

    def _compare_with(self, last: dict[str, Any]) -> None:
        with rng.preserved():
            rng.restore(last["stream"])
            try:
                drawn = Digest(self._draw()).value
            except Exception as error:
                raise self._does_not_fit(f"drawing it again fails ({type(error).__name__}: {error})") from error
        if drawn is not None and f"{drawn:016x}" != last["digest"]:
            raise self._does_not_fit("drawn again from the same random states, it is another one")

    def _does_not_fit(self, reason: str) -> RunDoesNotFit:
        return RunDoesNotFit(
            f"cannot go to batch {self.batch} of '{self._name}': the checkpoint tells what the batch before it was, "
            f"and {reason}",
            hint="the batch size, the data or the code that draws has changed; put that back, start a new run "
            "directory, or go on with the data as they are now by --accept-data-change",
        )

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "loader": self._name}
