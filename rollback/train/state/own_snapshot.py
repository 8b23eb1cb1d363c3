"""A script that loads a snapshot of its own, beside the guard that resumes the run: how that shows. Not collective.

Nothing of torch is patched, so `load_state_dict` is not seen. Its traces are: it writes to every parameter in place, so
that a resumed start has written to each once more than the run's first start had; an optimizer that has done nothing
yet has no updates in its state; and a script that begins with a later epoch says so to its sampler (see `Passes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollback.train.updates.advice import OWN_SNAPSHOT_AT_THE_START, OWN_SNAPSHOT_ON_RESUME


@dataclass(frozen=True)
class Traces:
    """What a script has done to its objects before it made the guard."""

    writes: int
    """In-place writes to all parameters, as torch counts them."""
    parameters: int
    """Number of parameters."""
    updated: bool
    """Whether the optimizer's state is that of an optimizer that has made updates."""

    def advice(self, first_writes: int | None, step: int | None) -> tuple[str, str] | None:
        """What is to be said of them. first_writes: at the run's first start, None where that is not on record. step:
        of the checkpoint that was restored, None where the run begins."""
        if step is None:
            return OWN_SNAPSHOT_AT_THE_START if self.updated else None
        reloaded = first_writes is not None and 0 < self.parameters <= self.writes - first_writes
        if not self.updated and not reloaded:
            return None
        code, text = OWN_SNAPSHOT_ON_RESUME
        done = "loaded the state of its optimizer" if self.updated else "written to all parameters of the model"
        return code, text.format(done=done, step=step)


def traces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Traces:
    """To be called before anything is restored."""
    writes = [parameter._version for parameter in model.parameters()]
    return Traces(sum(writes), len(writes), any(_has_updates(state) for state in optimizer.state.values()))


def _has_updates(state: Any) -> bool:
    """Whether the state of a parameter is that of updates; some optimizers make a state of none when they are made."""
    if not isinstance(state, dict):
        return False
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(value, Tensor) for value in state.values())
