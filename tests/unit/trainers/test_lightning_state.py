"""What is asked of Lightning at each step is the same as what a look at all of it would find."""

import json
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from sharding import fully_sharded, one_rank
from torch import nn

from rollback.errors import UsageError


@pytest.fixture
def state() -> Any:
    """Its import takes seconds, which only the worker that runs these tests should spend."""
    pytest.importorskip("lightning")
    from rollback.trainers.lightning import state

    return state


def metric() -> nn.Module:
    from torchmetrics import MeanMetric

    return MeanMetric()


def added(module: nn.Module) -> None:
    module.late = metric()


def added_deep(module: nn.Module) -> None:
    module.inner[0].late = metric()  # type: ignore[index, operator]


def exchanged(module: nn.Module) -> None:
    module.inner = nn.ModuleDict({"late": metric()})


@pytest.mark.parametrize("change", [added, added_deep, exchanged])
def test_a_metric_is_found_as_soon_as_it_is_there(state: Any, change: Callable[[nn.Module], None]) -> None:
    module, metrics = nn.Module(), state._Metrics()

    def names(of: nn.Module) -> list[str]:
        return [name for name, _ in metrics.of(of)]

    module.inner = nn.ModuleList([nn.Linear(1, 1)])
    module.loss = metric()
    assert names(module) == names(module) == ["loss"]
    change(module)
    assert len(names(module)) == 2
    other = nn.Sequential(metric())
    assert names(other) == ["0"], "of another model"
    del other[0]
    assert names(other) == []


def test_a_metric_goes_on_with_what_it_has_besides_its_states(state: Any) -> None:
    from torchmetrics import MeanMetric, MinMaxMetric, RunningMean

    def begun() -> dict[str, Any]:
        model = nn.ModuleDict({"seen": MinMaxMetric(MeanMetric()), "window": RunningMean(3)})
        return dict(state._Metrics().of(model))

    def go_on(metrics: dict[str, Any], *values: float) -> list[Any]:
        for value in values:
            for name in ("seen", "window"):
                metrics[name].update(value)
            last = [metrics["seen"].compute(), metrics["window"].compute()]
        return last

    undisturbed, before, behind = begun(), begun(), begun()
    go_on(before, 9.0, 1.0, 2.0, 4.0)
    for name, metric in before.items():
        vars(behind[name]).update(state._unpacked(state._of_metric(metric), torch.device("cpu")))
    assert go_on(behind, 5.0) == go_on(undisturbed, 9.0, 1.0, 2.0, 4.0, 5.0)


def test_a_metric_that_its_first_batch_makes_is_there_behind_a_kill_and_gone_before_it(state: Any) -> None:
    from torchmetrics.segmentation import MeanIoU

    def begun() -> Any:
        return MeanIoU(per_class=True, input_format="one-hot")

    def put(metric: Any, kept: Any) -> Any:
        vars(metric).update(state._unpacked(kept, torch.device("cpu")))
        return metric

    drawn = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 2, (2, 2, 3, 4, 4), generator=drawn) for _ in range(3)]
    undisturbed = begun()
    for_none = state._of_metric(undisturbed)
    for batch in batches:
        undisturbed.update(*batch)
        if batch is batches[0]:
            of_one = state._of_metric(undisturbed)
    whole = undisturbed.compute()
    behind, before = put(begun(), of_one), put(undisturbed, for_none)
    for metric, rest in ((behind, batches[1:]), (before, batches)):
        for batch in rest:
            metric.update(*batch)
        assert torch.equal(metric.compute(), whole)
        metric.reset()
        metric.update(*batches[0])


def test_the_counts_of_a_loop_are_those_of_lightnings_own_state(state: Any) -> None:
    import lightning

    loop = lightning.Trainer(accelerator="cpu", logger=False).fit_loop.epoch_loop
    loop.batch_progress.increment_ready()
    loop.automatic_optimization.optim_progress.optimizer.step.increment_completed()
    for name in state._PROGRESS:
        progress = attrgetter(name)(loop)
        assert state._counts(progress) == progress.state_dict()


def test_what_a_metric_of_the_scripts_own_is_set_to_is_not_kept(state: Any) -> None:
    """A resumed script may set something else; and a large table would be copied at every step."""
    own = metric()
    own.weights = torch.ones(3)
    assert "weights" not in state._of_metric(own)["dict"]


def test_a_sharded_average_in_a_callback_is_refused_with_what_keeps_it(state: Any) -> None:
    with one_rank():
        model = fully_sharded(nn.Sequential(nn.Linear(2, 2)))
        with pytest.raises(UsageError, match="the state of EMA: there is a DTensor in it") as refused:
            state._packed({"average": model.state_dict()}, "the state of EMA")
    assert "rollback.protect(trainer, ema=ema)" in (refused.value.hint or "")


@pytest.mark.parametrize("number", [np.float64(0.1), np.float32("nan"), np.int8(-3), np.bool_(True)])
def test_a_number_of_numpy_in_a_callback_comes_back_as_it_was(state: Any, number: np.generic) -> None:
    """As `self.best = np.mean(losses)` is, behind the first validation: too late for a refusal."""
    kept = json.loads(json.dumps(state._packed({"best": [number]}, "the state of a callback")))
    (found,) = state._unpacked(kept)["best"]
    assert type(found) is type(number)
    assert repr(found) == repr(number)
