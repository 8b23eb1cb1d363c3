"""TensorBoard event files, written without torch.

Two runs for TensorBoard: `<run>` with the curve, and `<run>/incidents` with incidents as text and skip windows as
scalars. Where steps are run again, a session-start event makes readers drop what lies from that step on, as
`SummaryWriter(purge_step=...)` does: the curve is that of the steps that count. It drops everything in its run, hence
the second one, which keeps its texts.
"""

import time
from pathlib import Path
from typing import Any

from rollback.facts.training import Fact, Incident, PassedOver, Planned, Restored
from rollback.rundir.metrics.metric_lines import Metric
from rollback.terminal.messages import printable
from rollback.trackers.story import Leg

_LIMIT = 4096  # characters of a text


class TensorBoard:
    """A `Tracker` that writes below `directory / name`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._curve = _Events(directory / name)
        self._incidents = _Events(directory / name / "incidents")
        self._leg: Leg | None = None

    def metric(self, leg: Leg, metric: Metric) -> None:
        if leg != self._leg:
            self._leg = leg
            self._curve.drop_from(metric.step)
        for tag, value in (("train/loss", metric.loss), ("train/grad_norm", metric.grad_norm)):
            if value is not None:
                self._curve.scalar(tag, metric.step, value)

    def fact(self, leg: Leg, fact: Fact) -> None:
        events = self._incidents
        match fact:
            case Incident(detection_step=step):
                onset = f"onset at step {fact.onset_step}, seen on ranks {list(fact.ranks) or 'not known'}"
                events.text("incident", step, _lines(fact.explanation, fact.rule, onset))
                events.scalar("incident/number", step, fact.incident)
            case Planned():
                skip = fact.skips_in_words().removeprefix(", ") or "skip nothing"
                back = f": back to step {fact.step} ({fact.checkpoint})" if fact.checkpoint else ""
                events.text(f"plan/{fact.incident}", fact.step or 0, _lines(fact.action + back, skip, fact.reason))
            case Restored():
                events.scalar("rollback/steps_undone", fact.step, fact.steps_lost)
            case PassedOver():
                events.scalar("skip/first_batch", fact.step, fact.first)
                events.scalar("skip/last_batch", fact.step, fact.last)
                events.scalar("skip/batches", fact.step, fact.last - fact.first + 1)

    def flush(self) -> None:
        self._curve.flush()
        self._incidents.flush()

    def close(self) -> None:
        self._curve.close()
        self._incidents.close()


class _Events:
    """One event file, made with the first event: TensorBoard shows a run that has none as an empty one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def drop_from(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step, session_log=SessionLog(status=SessionLog.START))

    def scalar(self, tag: str, step: int, value: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def text(self, tag: str, step: int, markdown: str) -> None:
        import numpy as np
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text import metadata
        from tensorboard.util import tensor_util

        content = tensor_util.make_tensor_proto(np.array([markdown.encode()], dtype=object))
        described = metadata.create_summary_metadata(display_name=tag, description="")
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, tensor=content, metadata=described)]))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._directory))
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _lines(*texts: str) -> str:
    """A Markdown list in which words from a journal are code: shown, not obeyed."""
    return "\n".join(f"- `{printable(text)[:_LIMIT].replace('`', chr(39))}`" for text in texts)
