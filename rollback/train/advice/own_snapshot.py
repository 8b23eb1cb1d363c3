"""Finds a script that loads a snapshot of its own although the guard resumes the run.

torch is not patched, so a call of `load_state_dict` is not seen. It leaves traces. It writes to every parameter in
place, so a resumed start has one write more to each than the run's first start had; of those that wrap the model alike,
since DDP writes to each parameter when it is made, and a model that is sharded has new ones. A new optimizer has no
updates in its state. And a script that begins with a later epoch calls `set_epoch` with it (see `Passes`).
`rollback.train.restore.late_writes` notices what it loads behind the guard.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollback.facts.training import Wrapping
from rollback.train.sharded import sharding_of
from rollback.train.state.state import TrainingState
from rollback.wording import AdviceText

OWN_SNAPSHOT_ON_RESUME = AdviceText(
    "own-snapshot",
    "before it made the guard, the script has {done}, which it had not at the run's first start: it seems to load a "
    "snapshot of its own. The checkpoint of step {step} stands in its place now; but what the script itself takes from "
    "its snapshot, such as the epoch to begin with, is not of that step. Take that loading out: the guard restores all "
    "that it is handed, and `for epoch in guard.epochs(n):` begins where the run stands",
)
OWN_SNAPSHOT_AT_THE_START = AdviceText(
    "own-snapshot",
    "this run is new, and its optimizer has made updates before the guard was made: the script seems to have loaded a "
    "snapshot of its own. If the run is to begin with that, load it at the first start only: the guard restores all "
    "that it is handed, and later starts go on from the run's checkpoints. If not, take the loading out",
)


@dataclass(frozen=True)
class ScriptTraces:
    """What a script has done to its objects before it made the guard."""

    writes: int
    """In-place writes to all parameters, as torch counts them."""
    wrapped: Wrapping
    parameters: int
    """Number of parameters."""
    updated: bool
    """Whether the optimizer's state is that of an optimizer that has made updates."""

    def advice(self, first_writes: int | None, step: int | None) -> Iterator[AdviceText]:
        """Advice about the traces. first_writes: writes at the run's first start that wrapped the model
        alike; None: not on record. step: of the restored checkpoint; None: the run begins."""
        reloaded = first_writes is not None and 0 < self.parameters <= self.writes - first_writes
        done = "loaded the state of its optimizer" if self.updated else "written to all parameters of the model"
        if step is None and self.updated:
            yield OWN_SNAPSHOT_AT_THE_START
        elif step is not None and (self.updated or reloaded):
            yield OWN_SNAPSHOT_ON_RESUME.of(done=done, step=step)


def traces_of(state: TrainingState) -> ScriptTraces:
    """The traces. Call it before anything is restored."""
    writes = [parameter._version for parameter in state.model.parameters()]
    wrapped: Wrapping = "sharded" if sharding_of(state.model) else "ddp" if state.broadcasts.of_model else "bare"
    updated = any(_has_updates(each) for each in state.optimizer.state.values())
    return ScriptTraces(sum(writes), wrapped, len(writes), updated)


def _has_updates(state: Any) -> bool:
    """Whether a parameter's optimizer state has updates. Some optimizers make an empty state at once."""
    if not isinstance(state, dict):
        return False
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(value, Tensor) for value in state.values())
