"""The policy: what is restored lies before the onset and is good, what is skipped covers it, and repeats escalate."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollback.config import Settings
from rollback.data_stream import DataStream
from rollback.facts.training import Incident, Planned, Window
from rollback.policy import PolicyCheckpoint, horizon_end, plan, plan_request, repeats
from rollback.rundir.paths import CheckpointName


def incident(
    onset: int, detected: int, *, batches_per_step: int = 1, timeline: int = 0, in_hand: bool = False
) -> Incident:
    return Incident(
        incident=1, verdict="spike", cause="loss", rule="r", value=9.0, threshold=3.0, explanation="", window=(),
        ranks=(), onset_step=onset, onset_batch=onset * batches_per_step, detection_step=detected,
        detection_batch=(detected + 1) * batches_per_step - 1, step=detected + 1, timeline=timeline, in_hand=in_hand,
    )  # fmt: skip


def held(*steps: int, good: bool = True, batches_per_step: int = 1) -> list[PolicyCheckpoint]:
    return [
        PolicyCheckpoint(CheckpointName.of(seq, step), step, step * batches_per_step, good)
        for seq, step in enumerate(steps)
    ]


def rules(**given: Any) -> Settings:
    """Settings without a floor, which has its own tests."""
    return Settings(**{"max_skipped": "100%", **given})


RING = held(0, 50, 100, 150, 200, 250)


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "onset", "detected", "step", "skip"),
    [
        # balanced: 20 steps before the onset, from the checkpoint through 20 batches beyond the detection
        ({}, 230, 233, 200, (200, 253)),
        ({}, 219, 222, 150, (150, 242)),
        ({}, 220, 220, 200, (200, 240)),
        # palm: 100 steps before, at least 200 batches
        ({"policy": "palm"}, 230, 233, 100, (100, 299)),
        ({"policy": "palm"}, 250, 255, 150, (150, 349)),
        ({"policy": "palm"}, 260, 460, 150, (150, 460)),
        # surgical: the newest good one, only what was seen
        ({"policy": "surgical"}, 230, 233, 200, (230, 233)),
        ({"policy": "surgical"}, 200, 200, 200, (200, 200)),
        ({"policy": "surgical"}, 199, 200, 150, (199, 200)),
        # by hand, over the preset
        ({"policy": "surgical", "rewind": 40, "skip_after": 5}, 230, 233, 150, (230, 238)),
        ({"skip_from": "onset"}, 230, 233, 200, (230, 253)),
        ({"skip_after": 0, "skip_min": 100}, 230, 233, 200, (200, 299)),
        # none is early enough: the oldest there is
        ({"policy": "palm"}, 60, 61, 0, (0, 199)),
        ({}, 10, 12, 0, (0, 32)),
    ],
)
def test_first_answers(settings: dict[str, Any], onset: int, detected: int, step: int, skip: tuple[int, int]) -> None:
    answer = plan(incident(onset, detected), None, RING, rules(**settings))
    assert (answer.action, answer.escalation, answer.step, answer.batch) == ("rollback", 0, step, step)
    assert answer.skip == Window(first=skip[0], last=skip[1])
    assert answer.timeline == 1
    assert answer.discards == tuple(point.name for point in RING if point.step > step)


def test_candidates_are_never_restored() -> None:
    ring = [*held(0, 50), PolicyCheckpoint(CheckpointName.of(9, 100), 100, 100, False)]
    answer = plan(incident(150, 152), None, ring, rules())
    assert answer.step == 50
    assert answer.discards == (CheckpointName.of(9, 100),)


@dataclass
class Story:
    """Incidents one after the other, each answered."""

    settings: Settings
    last: Planned | None = None

    def meets(self, onset: int, ring: list[PolicyCheckpoint] = RING) -> Planned:
        answer = plan(incident(onset, onset + 3), self.last, ring, self.settings)
        if answer.action in ("rollback", "retry"):
            self.last = answer
        return answer


def test_a_repeat_goes_further_back_and_skips_twice_as_much_until_it_has_undone_too_much() -> None:
    story = Story(rules(max_undone=34 + 114 + 194 + 343))
    first = story.meets(230)
    assert (first.step, first.skip) == (200, Window(first=200, last=253))
    second = story.meets(260)
    assert (second.escalation, second.step) == (1, 150)
    assert second.skip == Window(first=150, last=283)
    third = story.meets(290)
    assert (third.escalation, third.step) == (2, 100)
    assert third.skip == Window(first=100, last=367)
    assert [answer.undone for answer in (first, second, third)] == [34, 34 + 114, 34 + 114 + 194]
    fourth = story.meets(390)
    assert (fourth.action, fourth.escalation, fourth.skip, fourth.checkpoint) == ("stop", 3, None, None)
    assert "structural" not in fourth.reason
    assert fourth.giving_up == "structural"
    assert "say so: --objective rl" in fourth.reason
    assert "would undo 686 updates together, and max_undone allows 685" in fourth.reason
    assert "3 rollbacks" in fourth.reason
    assert story.meets(389).action == "rollback"


def test_a_stretch_that_is_longer_than_the_window_costs_what_is_behind_it_and_half_as_much_again() -> None:
    """And no older checkpoint the first time: nothing speaks against the one that was restored."""
    settings, last, skipped = rules(policy="surgical"), None, list[Window]()
    answers = []
    for onset in (230, 234, 238, 244):
        stream = DataStream(skipped=tuple(Window.merged(skipped)))
        last = plan(incident(onset, onset + 3), last, RING, settings, stream)
        assert last.skip is not None
        skipped.append(last.skip)
        answers.append((last.skip.first, last.skip.last, last.step))
    assert answers == [(230, 233, 200), (234, 237, 200), (238, 241, 150), (242, 247, 100)]


@pytest.mark.parametrize(
    ("onset", "window"), [(253, (150, 276)), (254, (254, 280)), (258, (254, 281)), (259, (150, 282))]
)
def test_a_stretch_goes_on_if_the_trouble_is_back_within_five_updates(onset: int, window: tuple[int, int]) -> None:
    story = Story(rules())
    assert story.meets(230).skip == Window(first=200, last=253)
    assert story.meets(onset).skip == Window(first=window[0], last=max(window[1], onset + 23))


def test_when_the_oldest_checkpoint_was_restored_already_it_is_restored_again_with_a_wider_window() -> None:
    story = Story(rules())
    first = story.meets(30, held(0, 50))
    second = story.meets(60, held(0, 50))
    assert (first.step, second.step) == (0, 0)
    assert first.skip
    assert second.skip
    assert len(second.skip) >= 2 * len(first.skip)


@pytest.mark.parametrize(("onset", "escalation"), [(199, 0), (200, 1), (254, 1), (353, 1), (354, 0)])
def test_a_repeat_is_what_begins_between_the_restored_batch_and_the_horizon(onset: int, escalation: int) -> None:
    story = Story(rules(horizon=100))
    assert story.meets(230).skip == Window(first=200, last=253)
    assert story.meets(onset).escalation == escalation


def test_the_horizon_is_told_in_steps_and_reckoned_in_batches() -> None:
    answer = plan(incident(230, 233, batches_per_step=4), None, held(200, batches_per_step=4), rules(), DataStream(4))
    assert answer.skip is not None
    assert horizon_end(answer, rules(horizon=10), 4) == answer.skip.last + 40
    assert horizon_end(answer.model_copy(update={"skip": None}), rules(horizon=10), 4) == answer.through + 40


def test_retry_first_replays_once_then_skips_then_escalates() -> None:
    story = Story(rules(retry_first=True))
    retry = story.meets(230)
    assert (retry.action, retry.step, retry.skip, retry.escalation) == ("retry", 200, None, 0)
    skip = story.meets(230)
    assert (skip.action, skip.step, skip.skip, skip.escalation) == ("rollback", 200, Window(first=200, last=253), 0)
    wider = story.meets(256)
    assert (wider.action, wider.step, wider.skip, wider.escalation) == ("rollback", 200, Window(first=254, last=280), 1)
    elsewhere = story.meets(900)
    assert (elsewhere.action, elsewhere.escalation) == ("retry", 0)


# What a bad batch leads to: its step, whether its loss did it, whether a suspected sample explains it. And what is
# skipped then, how far back it goes, and the escalation.
@pytest.mark.parametrize(
    ("settings", "story"),
    [
        # One after the other, 30 steps apart: each is an occasion of its own, and costs its own batch.
        ({}, [(130, "hand", 130, 130, 100, 0), (160, "hand", 160, 160, 150, 0), (190, "hand", 190, 190, 150, 0)]),
        # Directly behind one another they are a stretch: through 20 batches more, then harder.
        ({}, [(130, "hand", 130, 130, 100, 0), (131, "hand", 131, 151, 100, 0), (152, "hand", 152, 172, 100, 1)]),
        # Such a stretch is gone back behind by no more than it needs.
        ({}, [(149, "hand", 149, 149, 100, 0), (150, "hand", 150, 170, 150, 0)]),
        # A spike soon after a batch that did it alone is another trouble; soon after a spike only with a suspect.
        ({}, [(130, "hand", 130, 130, 100, 0), (160, "spike", 100, 180, 100, 0)]),
        ({}, [(130, "spike", 100, 150, 100, 0), (180, "spike", 50, 200, 50, 1), (230, "suspected", 200, 250, 200, 0)]),
        # Who has set a window by hand, or palm, gets that window; but the next one is another occasion all the same.
        ({"skip_after": 5}, [(130, "hand", 100, 135, 100, 0), (160, "hand", 100, 165, 100, 0)]),
        ({"policy": "palm"}, [(230, "hand", 100, 299, 100, 0), (320, "hand", 200, 399, 200, 0)]),
        ({"policy": "surgical"}, [(130, "hand", 130, 130, 100, 0), (160, "hand", 160, 160, 150, 0)]),
    ],
)
def test_bad_batches_and_occasions(settings: dict[str, Any], story: list[tuple[Any, ...]]) -> None:
    last = None
    for step, how, first, end, back_at, escalation in story:
        found = incident(step, step, in_hand=how == "hand")
        answer = plan(found, last, RING, rules(**settings), suspected=how == "suspected")
        assert (answer.skip, answer.step, answer.escalation) == (Window(first=first, last=end), back_at, escalation)
        last = answer


def test_a_trouble_that_samples_explain_again_and_again_is_structural_within_max_undone() -> None:
    """It comes at step 130, whatever the batches there are; in a small data set any two of them share a sample."""
    settings, last, undone = rules(max_undone=100), None, []
    while len(undone) < 9:
        begins = last.last + 31 if last is not None else 130
        found = incident(begins, begins).model_copy(update={"onset_step": 130, "detection_step": 130, "step": 131})
        last = plan(found, last, held(100), settings, suspected=True)
        undone.append(last.undone)
        if last.action == "stop":
            break
    assert (last.giving_up, undone) == ("structural", [31, 62, 93, 124, 155])


@pytest.mark.parametrize(
    ("settings", "stream", "onset", "allowed"),
    [
        ({}, DataStream(), 230, True),  # 54 batches: one first answer is always possible
        ({}, DataStream(skipped=(Window(first=0, last=45),)), 230, True),  # 100 of 251
        ({}, DataStream(skipped=(Window(first=0, last=46),)), 230, False),
        ({}, DataStream(skipped=(Window(first=0, last=46),), total=2020), 230, True),  # 101 of 2020: five in a hundred
        ({}, DataStream(skipped=(Window(first=0, last=46), Window(first=210, last=250))), 230, False),
        (
            {},
            DataStream(skipped=(Window(first=205, last=250),)),
            230,
            True,
        ),  # skipped already: nothing is counted twice
        ({}, DataStream(skipped=(Window(first=0, last=45), Window(first=200, last=200))), 230, True),
        ({}, DataStream(skipped=(Window(first=0, last=46), Window(first=200, last=200))), 230, False),
        ({"max_skipped": "99%"}, DataStream(skipped=(Window(first=0, last=196),)), 230, True),  # 251 of 254
        ({"max_skipped": "99%"}, DataStream(skipped=(Window(first=0, last=197),)), 230, False),
        ({"max_skipped": "100%"}, DataStream(skipped=(Window(first=300, last=900),)), 230, True),
        ({"max_skipped": "50%"}, DataStream(skipped=(Window(first=0, last=60),)), 230, True),
        ({"max_skipped": "0%"}, DataStream(skipped=(Window(first=0, last=60),), total=10**6), 230, False),
        ({"policy": "palm"}, DataStream(), 150, True),
        ({"policy": "palm"}, DataStream(skipped=(Window(first=0, last=0),)), 150, False),
    ],
)
def test_no_window_makes_incidents_cost_more_than_they_may(
    settings: dict[str, Any], stream: DataStream, onset: int, allowed: bool
) -> None:
    """Instead of what is not allowed, each update is screened."""
    answer = plan(incident(onset, onset + 3), None, RING, Settings(**settings), stream)
    assert answer.action == "rollback"
    window = answer.skip if allowed else answer.screen
    assert window is not None
    assert (answer.skip is None) == (not allowed)
    assert (window.first, window.last >= onset + 3) == (answer.batch, True)
    assert ("max_skipped" in answer.reason) == (not allowed)


@pytest.mark.parametrize(("total", "action"), [(0, "rollback"), (25, "rollback"), (24, "stop")])
def test_a_short_run_of_bad_data_alone_is_not_skipped_whole(total: int, action: str) -> None:
    stream = DataStream(skipped=(Window(first=0, last=22),), total=total)
    found = incident(23, 23).model_copy(update={"onset_step": 0, "detection_step": 0, "step": 1})
    answer = plan(found, None, held(0), Settings(), stream)
    assert answer.action == action
    if action == "stop":
        assert "leave nothing to train on: incidents would have cost all 24 batches" in answer.reason
    elif total:
        assert answer.skip == Window(first=23, last=23)  # one batch is left


@pytest.mark.parametrize("policy", ["balanced", "surgical", "screen"])
@pytest.mark.parametrize(("skipped", "action"), [(99, "rollback"), (100, "stop")])
def test_where_one_more_update_costs_too_much_the_run_stops(policy: str, skipped: int, action: str) -> None:
    stream = DataStream(skipped=(Window(first=0, last=skipped - 1),))
    answer = plan(incident(230, 233), None, RING, Settings(policy=policy, rewind=20, skip_after=20), stream)
    assert answer.action == action
    assert ("max_skipped (5%) allows 100, which one first answer may cost: " in answer.reason) == (action == "stop")


def test_what_a_screen_has_let_through_is_not_screened_again_and_may_cost_too_much() -> None:
    """It gets half of what is left, from the onset on; where not even the way to the detection is allowed, a stop."""
    settings, spent = Settings(rewind=20, skip_after=20), DataStream(skipped=(Window(first=0, last=89),))
    screened = plan(incident(230, 233), None, RING, settings, spent)
    assert (screened.skip, screened.screen) == (None, Window(first=200, last=253))
    again = plan(incident(235, 238), screened, RING, settings, spent)
    assert (again.action, again.skip, again.screen, again.step) == ("rollback", Window(first=235, last=241), None, 150)
    wider = plan(incident(235, 246), screened, RING, settings, spent)
    assert (wider.action, wider.giving_up) == ("stop", "structural")


@pytest.mark.parametrize(("restored", "screened"), [(47, False), (48, True)])
def test_what_is_good_must_be_known_where_a_screen_stands_in_for_a_window(restored: int, screened: bool) -> None:
    spent = DataStream(skipped=(Window(first=0, last=59),))
    answer = plan(incident(60, 63), None, held(restored), Settings(rewind=0, skip_after=20), spent)
    assert (answer.action, answer.screen is not None) == ("rollback", screened)
    assert answer.skip == (None if screened else Window(first=60, last=71))


@pytest.mark.parametrize(("skipped", "screened"), [(71, False), (72, True)])
def test_what_one_first_answer_may_cost_is_told_in_batches(skipped: int, screened: bool) -> None:
    """80 updates of 2 batches and 20 batches more, 108 of which are this window."""
    answer = plan(
        incident(220, 223, batches_per_step=2), None, held(0, 180, batches_per_step=2), Settings(rewind=20),
        DataStream(2, skipped=(Window(first=0, last=skipped),)),
    )  # fmt: skip
    assert (answer.screen if screened else answer.skip) == Window(first=360, last=467), answer.reason


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=40), st.sampled_from(["0%", "5%", "30%"]))
def test_whatever_comes_incidents_cost_no_more_than_they_may(story: list[tuple[int, bool]], most: str) -> None:
    settings, last, position, skipped = Settings(max_skipped=most), None, 0, set[int]()
    for gap, in_hand in story:
        position += gap
        windows = tuple(Window(first=batch, last=batch) for batch in sorted(skipped))
        ring = held(*range(0, position + 1, 50))
        answer = plan(incident(position, position, in_hand=in_hand), last, ring, settings, DataStream(skipped=windows))
        if answer.action == "stop":
            break
        window = answer.skip or Window(first=position, last=position)  # in a screen, what stands out costs itself
        skipped |= {*range(window.first, window.last + 1)}
        last, position = answer, window.last + 1
        assert len(skipped) <= max(100, float(most[:-1]) / 100 * position)


@pytest.mark.parametrize("policy", ["surgical", "balanced"])
@pytest.mark.parametrize("total", [0, 200])
def test_a_loss_that_is_nan_in_each_batch_is_called_structural_where_no_budget_ends_it(policy: str, total: int) -> None:
    """Each answer undoes one update, and each window is half as long again as all before it."""
    settings, last, answers = rules(policy=policy), None, 0
    windows: list[Window] = []
    while True:
        batch = windows[-1].last + 1 if windows else 0
        found = incident(0, 0, in_hand=policy == "surgical").model_copy(
            update={"onset_batch": batch, "detection_batch": batch}
        )
        stream = DataStream(1, skipped=tuple(Window.merged(windows)), total=total)
        answer = plan(found, last, held(0), settings, stream)
        if answer.action == "stop":
            break
        assert answer.skip is not None
        last, answers = answer, answers + 1
        windows.append(answer.skip)
        assert answers < 30, answer
    assert answer.giving_up == "structural"
    assert "this trouble came back behind 2" in answer.reason
    assert "look at the learning rate" in answer.reason


def test_observe_only_says_what_would_have_been_done_and_does_nothing() -> None:
    answer = plan(incident(230, 233), None, RING, rules(observe_only=True))
    assert (answer.action, answer.step, answer.skip) == ("observe", 200, Window(first=200, last=253))
    assert answer.discards == ()
    assert answer.timeline == 0


def test_observe_only_without_a_checkpoint_observes_all_the_same() -> None:
    answer = plan(incident(230, 233), None, [], rules(observe_only=True, snapshot_every=0))
    assert (answer.action, answer.checkpoint, answer.skip) == ("observe", None, None)


@pytest.mark.parametrize("ring", [[], held(300, 350), held(0, 50, good=False)])
def test_without_a_good_checkpoint_before_the_onset_the_run_stops_and_says_why(ring: list[PolicyCheckpoint]) -> None:
    answer = plan(incident(230, 233), None, ring, rules())
    assert (answer.action, answer.checkpoint, answer.giving_up) == ("stop", None, "no_checkpoint")
    assert "no good checkpoint" in answer.reason


def test_a_plan_that_was_not_carried_out_has_no_repeats() -> None:
    observed = plan(incident(230, 233), None, RING, rules(observe_only=True))
    assert not repeats(incident(231, 233), observed, rules(), 1)


@pytest.mark.parametrize(
    ("asked", "skipped"),
    [
        (None, None),
        ((250, 260), (250, 260)),
        ((100, 120), (100, 120)),
        ((90, 120), (100, 120)),  # batches before the restored checkpoint are part of the run
        ((90, 100), (100, 100)),
        ((90, 99), None),
    ],
)
def test_an_operator_goes_back_to_what_they_name_and_past_what_lies_behind_it(
    asked: tuple[int, int] | None, skipped: tuple[int, int] | None
) -> None:
    ring = [*RING[:2], PolicyCheckpoint(RING[2].name, 100, 100, False), *RING[3:]]
    skip = Window(first=asked[0], last=asked[1]) if asked else None
    answer = plan_request(incident(230, 233, timeline=4), ring[2], skip, ring)
    assert answer.skip == (Window(first=skipped[0], last=skipped[1]) if skipped else None)
    assert (answer.action, answer.escalation, answer.timeline, answer.through) == ("rollback", 0, 5, 233)
    assert (answer.checkpoint, answer.step, answer.batch) == (RING[2].name, 100, 100)
    assert answer.discards == tuple(point.name for point in RING[3:])
    assert "only a candidate" in answer.reason
    assert "a good checkpoint" in plan_request(incident(230, 233), RING[2], skip, RING).reason


@pytest.mark.parametrize("stream", [DataStream(4, 303, None), DataStream(4, None, 101), DataStream(4, 303, 0)])
def test_a_window_is_whole_updates_where_the_length_of_epochs_is_not_known(stream: DataStream) -> None:
    assert stream.end_of_update(60, 108) == 111


def test_a_reason_says_which_checkpoint_was_taken_and_why() -> None:
    first = plan(incident(230, 230), None, RING, rules())
    assert first.reason == "first answer to this trouble; the newest good checkpoint at least 20 steps before the onset"
    assert "its batch alone did it" not in first.reason
    back = plan(incident(260, 263), first, RING, rules())
    assert back.reason == "the trouble came back; an older good checkpoint than last time"
    again = plan(incident(10, 12), plan(incident(10, 12), None, RING, rules()), RING, rules())
    assert again.reason == "the trouble came back; the oldest good checkpoint"
    alone = plan(incident(230, 230, in_hand=True), None, RING, rules())
    assert alone.reason.startswith(
        "first answer to this trouble; the newest good checkpoint before the onset; its batch"
    )
    early = plan(incident(10, 12), None, RING, rules())
    assert early.reason.endswith("the oldest good checkpoint; none is 20 steps before the onset")


@pytest.mark.parametrize("action", ["observe", "stop"])
def test_a_plan_that_was_never_carried_out_says_nothing_of_its_batch(action: str) -> None:
    ring = RING if action == "observe" else []
    answer = plan(incident(230, 230, in_hand=True), None, ring, rules(observe_only=action == "observe"))
    assert answer.action == action
    assert answer.in_hand == (action == "observe")


# --- the screen -------------------------------------------------------------------------------------------------------


def test_a_screen_covers_what_balanced_would_skip_and_skips_nothing_itself() -> None:
    answer = plan(incident(230, 233), None, RING, rules(policy="screen"))
    assert (answer.action, answer.step, answer.skip) == ("rollback", 200, None)
    assert answer.screen == plan(incident(230, 233), None, RING, rules()).skip == Window(first=200, last=253)
    assert horizon_end(answer, rules(horizon=10, policy="screen"), 1) == 263


def test_a_batch_that_did_it_alone_is_skipped_alone_also_by_who_screens() -> None:
    answer = plan(incident(230, 230, in_hand=True), None, RING, rules(policy="screen"))
    assert (answer.skip, answer.screen) == (Window(first=230, last=230), None)
    behind = plan(incident(231, 231, in_hand=True), answer, RING, rules(policy="screen"))
    assert (behind.skip, behind.screen, behind.step) == (None, Window(first=200, last=251), 200)


@pytest.mark.parametrize(
    ("onset", "skip", "screen", "step", "escalation"),
    [
        (230, (150, 257), None, 150, 1),  # what the screen let through is skipped whole, and an older checkpoint taken
        (254, None, (200, 277), 200, 0),  # what begins behind it has not been screened yet
        (340, None, (250, 363), 250, 0),
        (354, None, (250, 377), 250, 0),
    ],
)
def test_what_comes_after_a_screen(
    onset: int, skip: tuple[int, int] | None, screen: tuple[int, int] | None, step: int, escalation: int
) -> None:
    first = plan(incident(230, 233), None, RING, rules(policy="screen"))
    answer = plan(incident(onset, onset + 3), first, RING, rules(policy="screen"))
    assert answer.skip == (Window(first=skip[0], last=onset + 23) if skip else None)
    assert answer.screen == (Window(first=screen[0], last=screen[1]) if screen else None)
    assert (answer.step, answer.escalation, answer.repeats) == (step, escalation, None if onset == 354 else 1)


# --- rules that hold for all ------------------------------------------------------------------------------------------


@st.composite
def situations(draw: st.DrawFn) -> tuple[Incident, list[PolicyCheckpoint], Settings, int]:
    """An incident and a ring that may have anything in it but the checkpoint at step 0, which is there and good."""
    per_step = draw(st.integers(1, 8))
    later = draw(st.lists(st.tuples(st.integers(1, 500), st.booleans()), max_size=8, unique_by=lambda pair: pair[0]))
    points = [(0, True), *sorted(later)]
    ring = [PolicyCheckpoint(CheckpointName.of(seq, s), s, s * per_step, good) for seq, (s, good) in enumerate(points)]
    onset = draw(st.integers(0, 500))
    found = incident(onset, onset + draw(st.integers(0, 50)), batches_per_step=per_step)
    settings = rules(
        policy=draw(st.sampled_from(["balanced", "palm", "surgical"])),
        rewind=draw(st.none() | st.integers(0, 200)),
        skip_from=draw(st.sampled_from([None, "checkpoint", "onset"])),
        skip_after=draw(st.none() | st.integers(0, 300)),
        skip_min=draw(st.none() | st.integers(0, 300)),
        max_undone=10**6,
    )
    return found, ring, settings, per_step


@given(situations())
def test_what_is_restored_is_good_and_not_after_the_onset(
    case: tuple[Incident, list[PolicyCheckpoint], Settings, int],
) -> None:
    found, ring, settings, per_step = case
    answer = plan(found, None, ring, settings, DataStream(per_step))
    target = next(point for point in ring if point.name == answer.checkpoint)
    assert target.good
    assert target.step == answer.step <= found.onset_step
    assert target.batch == answer.batch
    early = [p for p in ring if p.good and p.step <= found.onset_step - settings.reach.rewind]
    assert target == (early[-1] if early else ring[0])


@given(situations())
def test_the_window_covers_the_onset_to_the_detection_in_whole_steps(
    case: tuple[Incident, list[PolicyCheckpoint], Settings, int],
) -> None:
    found, ring, settings, per_step = case
    answer = plan(found, None, ring, settings, DataStream(per_step))
    assert answer.skip is not None
    assert found.onset_batch in answer.skip
    assert found.detection_batch in answer.skip
    assert answer.skip.last >= found.detection_batch + settings.reach.skip_after
    assert len(answer.skip) >= settings.reach.skip_min
    assert answer.skip.first % per_step == 0
    assert len(answer.skip) % per_step == 0
    assert answer.batch is not None
    assert answer.skip.first >= answer.batch, "what comes before the restored batch is not read again"


@given(situations(), st.integers(0, 60), st.integers(0, 20))
def test_a_repeat_restores_no_newer_checkpoint_and_goes_on_from_the_window_or_doubles_it(
    case: tuple[Incident, list[PolicyCheckpoint], Settings, int], later: int, delay: int
) -> None:
    found, ring, settings, per_step = case
    first = plan(found, None, ring, settings, DataStream(per_step))
    assert first.skip is not None
    onset = first.skip.last // per_step + later
    again = incident(onset, onset + delay, batches_per_step=per_step, timeline=1)
    assume(repeats(again, first, settings, per_step))
    goes_on = 0 < again.onset_batch - first.skip.last <= 5 * per_step
    kept = [point for point in ring if point.name not in first.discards]
    second = plan(again, first, kept, settings, DataStream(per_step))
    assert second.action == "rollback"
    assert second.escalation == 1
    assert second.step is not None
    assert first.step is not None
    assert second.step <= first.step
    assert second.skip is not None
    assert second.skip.last >= again.detection_batch
    assert second.timeline == 2
    if goes_on:
        assert second.skip.first == first.skip.last + 1
        assert len(second.skip) >= len(first.skip) // 2
        return
    older = [point for point in kept if point.good and point.step < first.step]
    assert not older or second.checkpoint == older[-1].name
    assert len(second.skip) >= 2 * len(first.skip)
    assert second.skip.first <= first.skip.first


@pytest.mark.parametrize(
    ("stream", "onset", "skip"),
    [
        # Updates of 4 in epochs of 101 batches: the window that ends in the second epoch leaves 88 of it.
        (DataStream(4, 101, 101), 22, (60, 113)),
        # One that ends in the first leaves 4 of it, and so takes the remainder along; but not where it need not.
        (DataStream(4, 101, 101), 18, (60, 96)),
        (DataStream(4, 100, 100), 18, (60, 95)),
        # What an epoch's last update is like is all the same where it is told in batches of many epochs.
        (DataStream(4), 22, (60, 111)),
        (DataStream(4, 303, 101), 22, (60, 113)),
    ],
)
def test_a_window_leaves_whole_updates_of_the_epoch_in_which_it_ends(
    stream: DataStream, onset: int, skip: tuple[int, int]
) -> None:
    ring = [
        PolicyCheckpoint(CheckpointName.of(seq, step), step, 4 * step, True) for seq, step in enumerate((0, 5, 10, 15))
    ]
    found = incident(onset, onset, batches_per_step=4)
    answer = plan(found, None, ring, rules(rewind=3, skip_after=20), stream)
    assert answer.skip == Window(first=skip[0], last=skip[1])


@given(st.integers(1, 9), st.integers(1, 120), st.integers(0, 500), st.integers(0, 300), st.integers(0, 3))
def test_behind_any_window_whole_updates_are_left_of_its_epoch(
    per_step: int, epoch: int, first: int, length: int, told_in: int
) -> None:
    stream = DataStream(per_step, (told_in + 1) * epoch, epoch)
    last = stream.end_of_update(first, first + length)
    assert first + length <= last < first + length + per_step
    assert (-(last + 1)) % epoch % per_step == 0
    for batch in range(first + length, last):
        assert (-(batch + 1)) % epoch % per_step, "it would have been long enough"


@given(situations())
def test_discards_are_exactly_what_lies_beyond_the_restored_checkpoint(
    case: tuple[Incident, list[PolicyCheckpoint], Settings, int],
) -> None:
    found, ring, settings, per_step = case
    answer = plan(found, None, ring, settings, DataStream(per_step))
    assert answer.step is not None
    assert set(answer.discards) == {point.name for point in ring if point.step > answer.step}


@given(situations())
def test_the_same_evidence_gives_the_same_plan(case: tuple[Incident, list[PolicyCheckpoint], Settings, int]) -> None:
    found, ring, settings, per_step = case
    once, again = (plan(found, None, list(ring), settings, DataStream(per_step)) for _ in range(2))
    assert once == again


@given(situations())
def test_beyond_the_horizon_a_trouble_is_a_new_one(
    case: tuple[Incident, list[PolicyCheckpoint], Settings, int],
) -> None:
    found, ring, settings, per_step = case
    first = plan(found, None, ring, settings, DataStream(per_step))
    after = horizon_end(first, settings, per_step) // per_step + 1
    assert not repeats(incident(after, after, batches_per_step=per_step), first, settings, per_step)


# --- a lower learning rate --------------------------------------------------------------------------------------------


def test_before_a_trouble_is_called_structural_it_is_replayed_with_lower_and_lower_rates() -> None:
    story = Story(rules(max_undone=34, lr_after="0.1:200"))
    first, second, third, fourth = (story.meets(onset) for onset in (230, 270, 280, 285))
    assert (first.action, first.lower_rate) == ("rollback", None)
    assert (second.action, second.lower_rate, second.skip, second.giving_up) == ("rollback", (0.1, 200), None, None)
    assert second.reason.startswith("with a lower learning rate before it is called structural; the newest good ")
    assert (third.action, third.lower_rate) == ("rollback", (pytest.approx(0.01), 200))
    assert second.step == third.step, "what lies between is not to blame"
    assert (fourth.action, fourth.giving_up) == ("stop", "structural")


def test_a_lower_rate_does_not_answer_what_has_not_come_back_and_what_has_no_checkpoint() -> None:
    settings = Settings(policy="surgical", max_skipped="0%", lr_after="0.5:200")
    spent = DataStream(skipped=(Window(first=0, last=99),))
    assert plan(incident(230, 233), None, RING, settings, spent).giving_up == "structural"
    back = plan(incident(230, 233), None, RING, settings)
    assert plan(incident(240, 243), back, [], settings).giving_up == "no_checkpoint"
    assert plan(incident(240, 243), back, RING, settings, spent).lower_rate == (0.5, 200)


@pytest.mark.parametrize("wrong", ["0.5", "1.0:20", "0.5:0", "half:20", "-0.5:20", "0.0:20", "0.009:20"])
def test_what_is_no_factor_and_number_of_steps_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="lr_after"):
        Settings(lr_after=wrong)
