"""What the survivors hold, and so no mark has: parameters and optimizer; with their small state the `shared` tree."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rollback.train.last_snapshot.small_state import SharedState
from rollback.train.state import tree
from rollback.train.state.module_buffers import all_of
from rollback.train.state.state import TrainingState


def large_state(state: TrainingState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is not in the marks, and the same on all ranks: the trees of parameters and optimizer, and their tensors.

    Any thread may call it: nothing is asked that another thread might be changing between two updates.
    """
    model, buffers = state.model.state_dict(), all_of(state.model)
    shared = {
        "model": {name: value for name, value in model.items() if name not in buffers},
        "optimizer": state.optimizer.state_dict(),
        "trained": state.trained_names(),
        "sentinel": state.sentinel.state_dict(),
    }
    tensors: dict[str, Tensor] = {}
    return tree.encode(shared, "shared", tensors), tensors


def shared_tree(large: Mapping[str, Any], small: SharedState, sentinel: Mapping[str, Any]) -> dict[str, Any]:
    """The `shared` tree: the parameters and the optimizer of one rank, its small state, and the sentinel's state."""
    optimizer, (trees, _) = dict(large["optimizer"]), small.encoded()
    optimizer["param_groups"] = [
        {**told, "params": group["params"]}
        for group, told in zip(optimizer["param_groups"], trees["groups"], strict=True)
    ]
    return {
        **large, "optimizer": optimizer, "objects": trees["objects"], "counters": trees["counters"],
        "gradients": trees["gradients"], "sentinel": tree.encode(dict(sentinel), "shared/sentinel", {}),
    }  # fmt: skip
