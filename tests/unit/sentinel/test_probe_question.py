"""When the sentinel would have the model asked, and what it makes of the answer. No model, numbers alone."""

import itertools
import json
import math
import random
from collections.abc import Iterator

import pytest

from rollback.sentinel import Hint, Kind, Observation, Sentinel
from rollback.sentinel.probe import ASKED_EVERY, OpenQuestion, ProbeAnswer, ProbeFinding, damaged

RISES_AT = 300
NOISE = 0.1


def curve(steps: int, seed: int = 0, *, rise: float = 0.0, hints: Hint = Hint.NONE) -> Iterator[Observation]:
    """A loss that comes down to 2, and from a step on is up by `rise` noise units."""
    source = random.Random(seed)
    for step in range(steps):
        up = rise * NOISE if step >= RISES_AT else 0.0
        loss = 2 + 3 * math.exp(-step / 60) + NOISE * source.gauss(0, 1) + up
        norm = math.exp(0.1 * source.gauss(0, 1))
        yield Observation(step, loss, norm, hints if step == RISES_AT else Hint.NONE)


def asked(sentinel: Sentinel, seen: Iterator[Observation]) -> list[tuple[int, OpenQuestion]]:
    """The questions, and that nothing was called."""
    found = []
    for observation in seen:
        assert sentinel.update(observation).kind in (Kind.HEALTHY, Kind.WATCH)
        if (question := sentinel.question(observation.step)) is not None:
            found.append((observation.step, question))
            sentinel.asked(observation.step)
    return found


@pytest.mark.parametrize("rise", [2.0, 2.5, 3.0, 4.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_flat_rise_that_nothing_calls_is_asked_about_soon_and_from_where_it_began(rise: float, seed: int) -> None:
    questions = asked(Sentinel(), curve(450, seed, rise=rise))
    (step, question) = questions[0]
    assert RISES_AT < step <= RISES_AT + 100
    assert RISES_AT - 16 <= question.onset <= RISES_AT + 16
    assert question.rise / question.noise == pytest.approx(rise, abs=1.3)
    assert all(later - earlier >= ASKED_EVERY for (earlier, _), (later, _) in itertools.pairwise(questions))


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_curve_is_not_asked_about(seed: int) -> None:
    assert asked(Sentinel(), curve(1500, seed)) == []


def test_at_most_once_in_200_steps_and_again_after_them_also_when_the_state_was_loaded_between() -> None:
    first, second, steps = Sentinel(), Sentinel(), []
    for observation in curve(900, 2, rise=2.5):
        first.update(observation)
        if first.question(observation.step) is not None:
            steps.append(observation.step)
            first.asked(observation.step)
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            first, second = second, first
    assert len(steps) == 3
    assert min(b - a for a, b in itertools.pairwise(steps)) >= ASKED_EVERY


def test_what_a_hint_explains_is_not_asked_about_while_it_does() -> None:
    questions = asked(Sentinel(), curve(520, rise=2.5, hints=Hint.LR_CHANGED))
    assert all(step >= RISES_AT + 100 for step, _ in questions)


def test_a_loss_that_measures_no_progress_is_not_asked_about() -> None:
    assert asked(Sentinel(objective="rl"), curve(500, rise=4.0)) == []


@pytest.mark.parametrize("rise", [2.5, 5.0])
def test_a_rise_that_was_accepted_is_the_level_and_what_rises_above_it_is_asked_about(rise: float) -> None:
    sentinel, again = Sentinel(), []
    for observation in curve(1400, 1, rise=rise):
        step = observation.step
        higher = Observation(step, (observation.loss or 0.0) + (3 * NOISE if step >= 1000 else 0.0), None)
        assert sentinel.update(higher).kind in (Kind.HEALTHY, Kind.WATCH)
        if (question := sentinel.question(step)) is not None:
            again.append(question.onset)
            sentinel.asked(step)
            sentinel.accept_rise()
            assert sentinel.settled_level is None or sentinel.settled_level > 2 + 1.0 * NOISE
    first, second = again
    assert abs(first - RISES_AT) <= 16
    assert -50 <= second - 1000 <= 16  # a block of before may be up by chance, and is then thought to be of the rise


def test_a_step_that_stands_out_between_question_and_answer_is_no_level_to_learn() -> None:
    """The step behind the question is judged before the model is asked."""
    sentinel, source = Sentinel(), curve(520, rise=2.0)
    for observation in source:
        sentinel.update(observation)
        if sentinel.question(observation.step) is not None:
            break
    step, loss, norm, _ = next(source)
    assert loss is not None
    assert sentinel.update(Observation(step, loss + 10 * NOISE, norm)).kind is Kind.WATCH
    sentinel.asked(step)
    sentinel.accept_rise()
    assert [sentinel.update(observation).kind for observation in source][-100:] == [Kind.HEALTHY] * 100
    assert sentinel.settled_level == pytest.approx(2 + 2 * NOISE, abs=NOISE)


def test_what_is_kept_is_of_a_time_in_which_nothing_is_up() -> None:
    sentinel, settled = Sentinel(), set()
    for observation in curve(RISES_AT + 60, rise=4.0):
        sentinel.update(observation)
        if sentinel.settled_level is not None:
            settled.add(observation.step)
    assert not {step for step in settled if step < 16 or step >= RISES_AT}
    assert len(settled) > 200


QUESTION = OpenQuestion(onset=300, level=2.0, now=2.4, noise=0.1)


@pytest.mark.parametrize(
    ("level", "then", "now", "finding"),
    [
        (2.0, 1.7, 1.7, ProbeFinding.DATA),  # nothing has changed
        (2.0, 1.7, 1.89, ProbeFinding.DATA),
        (2.0, 1.7, 1.91, ProbeFinding.MODEL),  # more than half of what the curve has risen by
        (2.0, 1.7, 2.1, ProbeFinding.MODEL),
        (2.0, 1.7, 1.5, ProbeFinding.DATA),  # it has learned meanwhile
        (2.3, 2.0, 1.65, ProbeFinding.DATA),  # as all losses have come down
        (2.3, 2.0, 1.95, ProbeFinding.UNCLEAR),  # less than all others have
        (2.3, 2.0, 2.3, ProbeFinding.MODEL),
        (1.9, 1.7, 1.85, ProbeFinding.DATA),  # a level that was lower is no decline
        (2.0, 1.7, math.nan, ProbeFinding.MODEL),
        (2.0, 1.7, math.inf, ProbeFinding.MODEL),
    ],
)
def test_what_an_answer_says(level: float, then: float, now: float, finding: ProbeFinding) -> None:
    answer = ProbeAnswer(kept=200, level=level, then=then, now=now)
    assert answer.finding(QUESTION) is finding
    assert f"the probe batch of step 200 had loss {then:.6g}, has {now:.6g} now" in answer.in_words(QUESTION)


@pytest.mark.parametrize(
    ("now", "finding"), [(1.79, ProbeFinding.DATA), (1.84, ProbeFinding.UNCLEAR), (1.86, ProbeFinding.MODEL)]
)
def test_where_the_rise_is_small_half_of_it_is_too_little_for_damage(now: float, finding: ProbeFinding) -> None:
    """A healthy model's loss of one batch moves by so much now and then."""
    question = OpenQuestion(onset=300, level=2.0, now=2.2, noise=0.1)
    assert ProbeAnswer(kept=200, level=2.0, then=1.7, now=now).finding(question) is finding


def test_the_verdict_names_both_losses_and_the_rise() -> None:
    verdict = damaged(330, QUESTION, ProbeAnswer(200, 2.0, 1.7, 2.1), (2.0, 2.4))
    assert (verdict.kind, verdict.onset, verdict.rule, verdict.witness) == (Kind.DAMAGED, 300, "probe-loss", "loss")
    assert (verdict.value, verdict.threshold) == (2.1, pytest.approx(1.9))
    assert "had loss 1.7, has 2.1 now: the model is damaged" in verdict.explanation
    assert "since about step 300, from 2 to 2.4 (4 noise units)" in verdict.explanation
