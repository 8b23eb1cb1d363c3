"""Notices a script that loads a snapshot of its own, or initializes the weights, behind the guard.

That would stand in the checkpoint's place. torch counts writes in place, and what the guard has restored is written to
there.
"""

from collections.abc import Callable

from rollback.train.run import AttachedRun
from rollback.train.sharded import version_of
from rollback.train.state.state import TrainingState
from rollback.train.state.stateful import tensors_of_state
from rollback.wording import AdviceText

WRITTEN_BEHIND_GUARD = AdviceText(
    "written-behind-guard",
    "behind the guard and before its loop, the script has written to the weights or to the optimizer's state: it loads "
    "a snapshot of its own there, initializes the model, or wraps it in DistributedDataParallel. The checkpoint of "
    "step {step} has been put in place again. Make the guard behind all that, and take the loading out",
)


def writes_behind(run: AttachedRun, state: TrainingState) -> Callable[[], bool]:
    """Notices, on a run that is resumed, that the script writes to what was restored before its loop begins.

    Make it when all is restored; values are not compared: that would read all of a large model once more. What it
    returns is collective: whether a rank's script has done so. All ranks then restore again, and advice is given.
    """
    restored, then = run.restored, _versions(state) if run.restored is not None else []

    def found() -> bool:
        if restored is None or not any(run.ranks.from_each(then != _versions(state))):
            return False
        run.record.advise(WRITTEN_BEHIND_GUARD.of(step=restored.step))
        return True

    return found


def _versions(state: TrainingState) -> list[tuple[int, int]]:
    """Of all tensors of the modules and of the optimizers' states. A loaded optimizer has other tensors."""
    states = [value for item in (state.optimizer, *state.objects.values()) for value in tensors_of_state(item)]
    own = [item for module in state.modules.values() for item in (*module.parameters(), *module.buffers())]
    return [
        *((0, version_of(item)) for item in own if not item.is_inference()),  # such tensors count no writes
        *((id(item), version_of(item)) for item in states),
    ]
