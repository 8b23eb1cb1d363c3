"""Weights & Biases: one run for each leg, all in one group.

What was logged to W&B cannot be taken back, and its steps must grow. So the steps after a rollback or a restart are a
run of their own, whose steps are the training's; the group shows the legs side by side, and the discarded steps are
the end of an older leg. WANDB_MODE=offline and W&B's other variables mean what they always mean.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollback.errors import OutputNotWritten
from rollback.facts.training import Fact, Incident, PassedOver, Planned, Restored
from rollback.rundir.metrics.metric_lines import Metric
from rollback.trackers.story import Leg

_NOT_IN_IDS = re.compile(r"[:;,#?/']|^\s")
"""What W&B takes in no id of a run. A directory's name may have it, as one that is a time."""


class WeightsAndBiases:
    """A `Tracker` that logs to a project. group: gives what all legs have in common, such as the run's id; asked
    when there is something to log, since a run that has not begun has none."""

    def __init__(self, project: str, group: Callable[[], str]) -> None:
        self._project, self._group = project, group
        self._leg: Leg | None = None
        self._run: Any = None
        self._step = 0
        self._incidents = 0

    def metric(self, leg: Leg, metric: Metric) -> None:
        values = {"train/loss": metric.loss, "train/grad_norm": metric.grad_norm, "train/batch": metric.batch}
        self._log(leg, metric.step, {name: value for name, value in values.items() if value is not None})

    def fact(self, leg: Leg, fact: Fact) -> None:
        match fact:
            case Incident(detection_step=step):
                self._incidents += 1
                self._log(leg, step, {"incident/number": fact.incident})
                self._note(f"incident/{fact.incident}", f"step {step}: {fact.explanation}")
                self._note("incidents", self._incidents)
            case Planned():
                skip = fact.skips_in_words()
                plan = f"{fact.action}: step {fact.step} ({fact.checkpoint}){skip}: {fact.reason}"
                self._note(f"plan/{fact.incident}", plan)
            case Restored():
                self._note("steps_discarded", fact.steps_lost)
            case PassedOver(first=first, last=last):
                skipped = {"skip/first": first, "skip/last": last, "skip/batches": last - first + 1}
                self._log(leg, fact.step, skipped)

    def flush(self) -> None:
        """W&B sends by itself."""

    def close(self) -> None:
        if (run := self._run) is not None:
            self._run = None
            with self._sending():
                run.finish()

    def _log(self, leg: Leg, step: int, values: dict[str, Any]) -> None:
        self._enter(leg)
        self._step = max(self._step, step)  # an earlier step would be refused
        with self._sending():
            self._run.log(values, step=self._step)

    def _note(self, name: str, value: Any) -> None:
        if self._run is not None:
            with self._sending():
                self._run.summary[name] = value

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """What W&B refuses within is raised as an error for the reader. Its own errors are no OSError."""
        import wandb

        try:
            yield
        except wandb.Error as error:
            why = " ".join(str(error).split())
            raise OutputNotWritten(
                f"logging to the project {self._project} of W&B: {why}",
                hint="log in (`wandb login`, or WANDB_API_KEY), see whether W&B can be reached, or keep it here with "
                "WANDB_MODE=offline; then `rollback track` tells all",
            ) from error

    def _enter(self, leg: Leg) -> None:
        if leg == self._leg:
            return
        import wandb

        self.close()
        self._leg, self._step = leg, 0
        group = self._group()
        name = f"attempt {leg.attempt}" + (f", after rollback {leg.timeline}" if leg.timeline else "")
        with self._sending():
            self._run = wandb.init(
                project=self._project,
                group=group,
                name=name,
                id=_NOT_IN_IDS.sub("-", f"{group}-{leg.attempt}-{leg.timeline}"),
                resume="allow",
                config={"attempt": leg.attempt, "timeline": leg.timeline},
                settings=wandb.Settings(
                    console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True
                ),
            )
