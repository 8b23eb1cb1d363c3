"""What the script does that a guard of its first training cannot keep exact: refused, or said.

One rank may see what others do not. So a refusal ends its rank with a status, and torchrun ends the others: all
of them are told the one message, and none waits for ranks that are gone. What does not end the job is decided by all
ranks in one collective (`agree`), or changes nothing but what is said.
"""

import os
from typing import Any, NoReturn

import torch.distributed as dist

from rollback.errors import EARLY, RollbackError, UsageError
from rollback.source.loop_counters import LoopCounter
from rollback.source.loop_variables import LoopVariable
from rollback.source.syntax import without_cells
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import say
from rollback.train.guard import Guard
from rollback.train.start import attach
from rollback.wording import Calls

READS = "goes over the loader that it trains on, and computes no gradients there: under torch.no_grad() it may"
LEFT_BEHIND = "If a count of its own told it to: a rollback and a resume leave that count behind"


_NO_GUARD = "(Under --adopt the script has no guard: `rollback adopt SCRIPT` shows the lines that make one)"


def speak_of_script(guard: Guard) -> None:
    """Have the guard say what its script knows, which has written nothing of a guard."""
    guard.name_ends("the script's {} updates", "the script's {} epochs")
    guard.name_calls(Calls(first=_NO_GUARD))


class ScriptNotices:
    """Of this rank. strict: late notices end the job too."""

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self._said: set[str] = set()
        self._unshared: list[str] = []
        self.rank = int(os.environ.get("RANK", "0"))
        self.guard: Guard | None = None
        """Of the script, once it has one."""

    def refuse(self, error: UsageError) -> NoReturn:
        """End all ranks because of what this one sees."""
        if self.guard is not None:
            self.guard.refuse(error)
        attach.refuse(error, status=1)

    def agree(self, seen: Any) -> None:
        """Collective: refuse where the ranks see different things. seen: JSON; {"refused": ...} if it is an error."""
        try:
            told = Ranks().from_each(seen)
        except UsageError as lonely:  # several processes without a group
            self.refuse(lonely)
        fault = next(((rank, item["refused"]) for rank, item in enumerate(told) if "refused" in item), None)
        if fault is not None:
            rank, error = fault
            where = "" if all(item == told[0] for item in told) else f" (rank {rank})"
            self.refuse(UsageError(f"{error['message']}{where}", hint=error["hint"]))
        for rank, item in enumerate(told):
            if item != told[0]:
                self.refuse(
                    UsageError(
                        f"the ranks of the script do different things: {_difference(told[0], item, rank)}",
                        hint="--adopt takes scripts in which all ranks train the same objects, in the same order",
                    )
                )

    def script_was_told(self, *, together: bool) -> bool:
        """Whether the script handles a stop signal itself, and a rank has got it. If it leaves its loop then, it has
        not come to its end, so far as anyone can tell. together: all ranks are here."""
        here = self.guard is not None and self.guard.script_was_told
        return any(Ranks().from_each(here)) if together else here

    def note_inexact(self, what: str, step: int) -> None:
        """The script does something at this step that the guard cannot keep exact: it ends, or this is only said."""
        error = inexact(what)
        if self.strict or step < EARLY:
            self.refuse(error)
        late = "It goes on under guard; from here on a rollback or a resume is not exact"
        self._notice(f"{error.message}. {late}")

    def tell_counter(self, where: str, counter: LoopCounter, *, here: bool) -> None:
        """What the script counts or carries beside the guard: said. A training that ends by it, or whose updates depend
        on it, is not exact behind a rollback or a resume. here: whether it is the training that begins."""
        does = f"{'counts with' if counter.counts else 'trains by'} `{without_cells(counter.name)}` by itself ({where})"
        does += ", and ends its loop by it" if counter.ends else ""
        does += ", and trains by it" if counter.counts and counter.trains else ""
        self._left_behind(does, matters=here and (counter.ends or counter.trains))

    def tell_unkept(self, variable: LoopVariable, filename: str, value: Any) -> None:
        """What the script hands on from iteration to iteration cannot be kept. One rank alone may have such a value."""
        does = "trains by" if variable.affects_training else "carries from epoch to epoch"
        where = f"line {variable.line} of {os.path.basename(filename)}, a {type(value).__name__}"
        self._left_behind(f"{does} `{variable.shown}` ({where})", matters=True)

    def tell_copied(self, variable: LoopVariable, filename: str) -> None:
        """The script has copies of its model's weights in another list or dict in each step."""
        where = f"line {variable.line} of {os.path.basename(filename)}"
        self._left_behind(
            f"makes its copies of the weights, `{variable.shown}` ({where}), anew in each step", matters=True,
            instead="They are kept where each is changed in place, as by average.lerp_(weight, 0.1)",
        )  # fmt: skip

    def tell_missed(self, variable: LoopVariable, filename: str) -> None:
        """What the script carries beside its training is not what it was, and training goes on elsewhere."""
        self._notice(
            f"`{variable.shown}` (line {variable.line} of {os.path.basename(filename)}), by which nothing is trained, "
            "stays as it is behind a resume and a rollback: of what is only told, checkpoints have single numbers, in "
            "the host's memory and without a graph. A mean that the script tells of this epoch, or a history that it "
            "writes, is not that of the undisturbed run"
        )

    def _left_behind(self, does: str, *, matters: bool, instead: str = "guard.keep is for such values") -> None:
        error = UsageError(
            f"the script {does}: a rollback and a resume leave that behind. {instead}",
            hint="--adopt without =strict says only that",
        )
        if self.strict and matters:
            self.refuse(error)
        self._notice(error.message)

    def end_of_guard(self, what: str, given_up_by: str = "", step: int = EARLY) -> None:
        """The guarded training is over, and the script begins another one: it ends, or goes on without a guard.

        given_up_by: the kind of error that ended it in its midst, at this step, as where memory ran out."""
        error, then = inexact(what), ""
        if given_up_by:
            error = UsageError(
                f"the script has left its training by an error ({given_up_by}), and begins another one: the first is "
                "given up, and the run is not complete",
                hint="if it cannot train as it began, begin with what it can train with, as a smaller batch. If the "
                "error is meant as the end of the training, have a script of its own for what is trained behind it",
            )
            then = f". What to do: {error.hint}"
        if self.strict or (given_up_by and step < EARLY):
            self.refuse(error)
        self._notice(f"not protected from here on: {error.message}{then}")

    def tell_nothing_guarded(self) -> None:
        """The script has trained and is through, and no guard was made: it ends with that, or that is said."""
        error = UsageError(
            "not protected: the script computes gradients, but goes over no DataLoader with a model in "
            "training and a torch optimizer",
            hint="make a rollback.Guard: docs/guard.md shows how it is written into other loops",
        )
        if self.strict:
            self.refuse(error)
        self.say(error.message)

    def say(self, text: str) -> None:
        """What all ranks see: rank 0 says it, once."""
        if text not in self._said and not self.rank:
            say(text)
        self._said.add(text)

    def share(self) -> None:
        """Collective: rank 0, whose output is shown, says what other ranks have noticed since."""
        if not dist.is_initialized():
            return
        told = Ranks().from_each(self._unshared)
        self._unshared.clear()
        for rank, texts in enumerate(told):
            for text in texts:
                if text not in self._said:
                    self.say(f"rank {rank}: {text}")

    def _notice(self, text: str) -> None:
        if self.rank and text not in self._said:  # it may be noticed at each step
            self._unshared.append(text)
        self.say(text)


def inexact(what: str) -> UsageError:
    return UsageError(
        f"the script {what}: what a guard of the first alone keeps would not be exact",
        hint='docs/trainers/adopt.md, "What is refused", has what to write in its place',
    )


def updates_without_loop(where: str) -> UsageError:
    return UsageError(
        f"the script updates a model ({where}) with a batch that came from no `for` loop over a DataLoader, or that a "
        "loop inside of it takes apart",
        hint="--adopt knows `for batch in loader:`, inside of it loops over a range or over x.chunk(2), and a loop "
        "whose `next` is of a generator over a loader. For other loops, and for batches of a function (get_batch) "
        "or of an iterator of your own, write a rollback.Guard into the script: docs/tutorial.md shows how",
    )


def trains_by_own_entry(trainer: object, entry: str) -> UsageError:
    return UsageError(
        f"the script trains by a {type(trainer).__name__} with a {entry}() of its own",
        hint=f"write rollback.protect(trainer) in front of trainer.{entry}(), and leave out --adopt",
    )


def cycled_loader() -> UsageError:
    return UsageError(
        "the script goes over its loader by itertools.cycle, which gives the batches of one round again",
        hint="begin the loader anew for each round: `while True:` around `for batch in loader:`",
    )


def batches_passed_over() -> UsageError:
    return UsageError(
        "the script has loaded a snapshot of its own, and does not train on the first batch that it takes of an epoch: "
        "it seems to pass over what it had trained on by then (`if step < resume_step: continue`). The run goes on "
        "from its own checkpoint, so these batches would be in no update",
        hint="take that loading out of the command or the script: the same command goes on where the run stands. "
        "accelerator.skip_first_batches in place of that `continue` does no harm",
    )


def scheduler_made_anew(kind: str) -> RollbackError:
    return RollbackError(
        f"going back led into the first epoch, in which the script has made its {kind} anew: that has changed the "
        "learning rate, and this process cannot put it back",
        hint="a new attempt can: `rollback launch` starts one, else run the same command again",
    )


def begins_elsewhere(begun: int, first: int) -> str:
    return (
        f"the script begins with epoch {begun} now, and the run began with epoch {first}: it seems to load a snapshot "
        "of its own. The guard's epochs go on where the run stands, and are numbered as the run began"
    )


def left_epochs(epoch: int, epochs: int) -> str:
    return f"the script has left its loop over epochs by itself, in epoch {epoch} of {epochs}. {LEFT_BEHIND}"


def not_led(where: str) -> str:
    return (
        f"the script begins its loader anew in a loop that is not led ({where}): a rollback over an epoch's start does "
        "not do again what the script does between epochs. With `for epoch in range(n):` around the training loop, in "
        "the same file, it does"
    )


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    name = next(name for name in first if first[name] != other.get(name))
    return f"{name} is {first[name]!r} on rank 0 and {other.get(name)!r} on rank {rank}"
