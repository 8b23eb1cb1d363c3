"""A replay for people: a plot that fits the terminal, and what was called in words."""

import math
from textwrap import TextWrapper

from rollback.backtest.replay import Replay
from rollback.facts.training import Planned
from rollback.sentinel import Verdict
from rollback.terminal.curve import Bucket, draw, is_logarithmic

_HEIGHT = 12  # lines of the plot
_ADVICE_SHOWN = 3
_PROBES_SHOWN = 3


def describe(replay: Replay, width: int) -> str:
    """The whole account as plain text, `width` columns wide. Only the plot's marks are not ASCII."""
    assumed = [line for each in replay.assumed for line in TextWrapper(max(50, width)).wrap(f"assumed: {each}")]
    lines = [_headline(replay), *assumed, "", *plot(replay, width, _HEIGHT), ""]
    for verdict, planned in zip(replay.calls, replay.plan, strict=True):
        lines += _call_in_words(verdict, planned, width)
    if not replay.calls:
        lines.append("nothing that would have demanded action")
    for verdict in replay.advice[:_ADVICE_SHOWN]:
        lines += [f"  advice at step {verdict.step} ({verdict.rule})", *_wrapped(verdict.advice, width)]
    if (more := len(replay.advice) - _ADVICE_SHOWN) > 0:
        lines.append(f"  and {more} more of such advice (--json has them all)")
    for step, question in replay.questions[:_PROBES_SHOWN]:
        text = f"{question.in_words()}. A running job would hand out a probe batch here; a log has no model to ask"
        lines += [f"  a probe at step {step}", *_wrapped(text, width)]
    if len(replay.questions) > _PROBES_SHOWN:
        lines.append(f"  and {len(replay.questions) - _PROBES_SHOWN} more probes (--json has them all)")
    for blip in replay.blips[:10]:
        fate = "went back by itself" if blip.fate == "recovered" else "became the new level"
        lines.append(f"  left alone: steps {blip.first_step} to {blip.last_step}, peak {blip.peak:.6g}, {fate}")
    if len(replay.blips) > 10:
        lines.append(f"  and {len(replay.blips) - 10} more that were left alone (--json has them all)")
    return "\n".join(lines)


def plot(replay: Replay, width: int, height: int) -> list[str]:
    """The loss over the observations in braille dots, a cross where it is not finite, with a line of marks below: `^` a
    call, `o` left alone."""
    losses = [observation.loss for observation in replay.observations]
    finite = sorted(loss for loss in losses if loss is not None and math.isfinite(loss))
    if not finite:
        return ["(no finite loss to draw)"]
    bounds = low, high = finite[0], finite[int(0.998 * (len(finite) - 1))]
    columns = max(20, width - 12)
    buckets = [Bucket() for _ in range(2 * columns)]
    for index, loss in enumerate(losses):
        if loss is not None:
            buckets[index * (2 * columns - 1) // max(1, len(losses) - 1)].take(Bucket.of(loss))
    labels = [f"{high:10.4g} "] + [" " * 11] * (height - 2) + [f"{low:10.4g} "]
    drawn = [label + line.plain for label, line in zip(labels, draw(buckets, bounds, height), strict=True)]
    return [*drawn, " " * 11 + _marks(replay, columns), _axis(replay, columns, is_logarithmic(bounds))]


def _marks(replay: Replay, columns: int) -> str:
    place = {observation.step: index for index, observation in enumerate(replay.observations)}
    marks = [" "] * columns
    events = [(blip.first_step, "o") for blip in replay.blips] + [(verdict.step, "^") for verdict in replay.calls]
    for step, mark in events:
        marks[place.get(step, 0) * (columns - 1) // max(1, len(replay.observations) - 1)] = mark
    return "".join(marks).rstrip()


def _axis(replay: Replay, columns: int, logarithmic: bool) -> str:
    first, last = str(replay.observations[0].step), str(replay.observations[-1].step)
    middle = "step (loss on a logarithmic scale)" if logarithmic else "step"
    return " " * 11 + first + middle.center(max(0, columns - len(first) - len(last))) + last


def _headline(replay: Replay) -> str:
    columns = ", ".join(f"{name}={column}" for name, column in vars(replay.columns).items() if column is not None)
    return f"{replay.path}: {len(replay.observations)} observations ({columns})"


def _call_in_words(verdict: Verdict, planned: Planned, width: int) -> list[str]:
    onset = f", since step {verdict.onset}" if verdict.onset != verdict.step else ""
    answer: str = planned.action
    if planned.step is not None:
        answer += f": restore step {planned.step}"
    if planned.skip is not None:
        answer += f", skip {planned.skip.in_words()}"
    return [
        f"  {verdict.kind} at step {verdict.step}{onset} ({verdict.rule})",
        *_wrapped(verdict.explanation, width),
        *_wrapped(f"{answer} ({planned.reason})", width),
    ]


def _wrapped(text: str, width: int) -> list[str]:
    return TextWrapper(max(50, width), initial_indent=" " * 6, subsequent_indent=" " * 6).wrap(text)
