"""What PEFT's AdaLoRA goes by when it takes ranks away from adapters: averages over all steps so far of how important
each weight is, in an object that is no module. No state_dict has them, and by them it decides which ranks are trained.
"""

from typing import Any

from torch import nn

NAME = "adalora"
"""Of the object in checkpoints."""
_AVERAGES = "ipt", "exp_avg_ipt", "exp_avg_unc"
"""Of the allocator: tensors by the names of parameters; none before its first step, and none behind its last one."""


class RankAllocation:
    """That of one model, as an object that a guard keeps."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._allocator = model.rankallocator
        self._config = model.peft_config[model.trainable_adapter_name]

    def state_dict(self) -> dict[str, Any]:
        averages: dict[str, Any] = {name: dict(getattr(self._allocator, name)) for name in _AVERAGES}
        return {**averages, "rank_pattern": self._config.rank_pattern}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        devices = {name: item.device for name, item in self._model.model.named_parameters()}
        for name in _AVERAGES:
            setattr(self._allocator, name, {of: average.to(devices[of]) for of, average in state[name].items()})
        self._config.rank_pattern = state["rank_pattern"]


def rank_allocation(model: nn.Module) -> dict[str, RankAllocation]:
    """By its name; empty for a model without."""
    for module in model.modules():
        is_adalora = any(kind.__module__ == "peft.tuners.adalora.model" for kind in type(module).__mro__)
        if is_adalora and hasattr(module, "rankallocator"):  # not where the adapter is only for inference
            return {NAME: RankAllocation(module)}
    return {}
