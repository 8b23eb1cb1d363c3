"""What the sentinel calls and what it leaves alone, on curves that show one thing each."""

import json
import math
import random

import pytest
from curves import descent, norms, observations, raised, verdicts

from rollback.config import Settings
from rollback.errors import RunDoesNotFit, UsageError
from rollback.sentinel import (
    PRESETS,
    Hint,
    Kind,
    Observation,
    Sentinel,
    Verdict,
    learning_rate_hint,
)
from rollback.sentinel.machine import EXCUSED_FOR
from rollback.sentinel.states import TRANSITIONS, Event, State


def spikes(said: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in said if verdict.kind is Kind.SPIKE]


def test_a_healthy_descent_is_never_called() -> None:
    for seed in range(20):
        said = verdicts(observations(descent(600, seed), norms(600, seed)))
        assert {verdict.kind for verdict in said} <= {Kind.HEALTHY, Kind.WATCH}


def test_a_sudden_divergence_is_called_at_its_fifth_step_with_its_onset() -> None:
    (call,) = spikes(verdicts(observations(raised(descent(400), 300, 3.0), norms(400))))
    assert (call.step, call.onset, call.rule) == (304, 300, "loss-high")


def test_four_bad_steps_are_left_alone_and_reported_as_a_blip() -> None:
    said = verdicts(observations(raised(descent(400), 300, 3.0, length=4), norms(400)))
    assert not spikes(said)
    (blip,) = [verdict.ended for verdict in said if verdict.ended]
    assert (blip.first_step, blip.last_step, blip.fate) == (300, 303, "recovered")
    assert blip.peak > blip.threshold


def test_an_excursion_that_falls_back_fast_is_given_time_and_one_that_stalls_is_not() -> None:
    quiet = descent(400, noise=0.02)
    back = raised(quiet, 300, 3.0, decay=3.0)
    assert not spikes(verdicts(observations(back, norms(400))))
    stalled = raised(raised(quiet, 300, 2.5, decay=2.0), 300, 0.25)
    (call,) = spikes(verdicts(observations(stalled, norms(400))))
    assert 304 < call.step < 315


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("by", "decay", "called"), [(3.0, 5.0, False), (3.0, 30.0, True), (12.0, 3.0, True)])
def test_a_loss_is_waited_for_that_will_be_back_while_it_may_be_a_blip(
    by: float, decay: float, called: bool, seed: int
) -> None:
    """One unit of noise is left after 14 steps of the first, 12 of the second; the third undoes all progress."""
    fallen = raised(descent(400, seed), 300, by, decay=decay)
    calls = spikes(verdicts(observations(fallen, norms(400, seed))))
    assert [call.rule for call in calls] == ["loss-high"] * called
    assert all(call.step <= 307 for call in calls)


def test_in_a_sparse_log_the_same_fall_takes_longer_than_a_blip_lasts() -> None:
    fallen = observations(raised(descent(400), 300, 3.0, decay=5.0), norms(400), stride=10)
    assert [call.onset for call in spikes(verdicts(fallen))] == [3000]


def test_a_loss_that_climbs_when_a_blip_would_be_over_is_not_waited_for() -> None:
    low = raised(descent(340), 300, 0.65)
    climbing = [loss + (0.65 * 1.15 ** (i - 328) if i >= 328 else 0.0) for i, loss in enumerate(low)]
    assert [call.step for call in spikes(verdicts(observations(climbing, norms(340))))] == [331]


def test_an_excursion_that_a_rule_held_for_is_called_where_it_stalls_though_no_jump_as_high_would_be() -> None:
    """The plateau is five units up: too little for a jump, and half of the progress."""
    hurt = {"start": 4.0, "end": 2.5, "noise": 0.15}
    plateau = raised(descent(400, **hurt), 302, 0.75)
    assert not spikes(verdicts(observations(plateau, norms(400))[:340]))
    (call,) = spikes(verdicts(observations(raised(plateau, 300, 9.0, decay=0.8), norms(400))))
    assert (call.rule, call.onset) == ("loss-stays-high", 300)
    assert call.step <= 312


@pytest.mark.parametrize(("noise", "by", "called"), [(0.06, 0.55, False), (0.06, 0.9, True), (0.085, 0.78, True)])
def test_a_loss_that_undoes_little_while_the_norm_is_quiet_must_be_higher(
    noise: float, by: float, called: bool
) -> None:
    """A sixth of the progress and 8.5 units of noise; 14 units; a quarter of the progress and 8.5 units."""
    losses = raised(descent(360, noise=noise), 300, by)
    assert [call.rule for call in spikes(verdicts(observations(losses, norms(360))))] == ["loss-high"] * called
    assert spikes(verdicts(observations(losses))), "no norm is known"
    clipped = [min(norm, 0.95) for norm in norms(360)]
    assert spikes(verdicts(observations(losses, clipped))), "a norm that cannot rise says nothing by being quiet"


def test_a_watch_names_its_onset_while_it_lasts() -> None:
    said = verdicts(observations(raised(descent(400), 300, 3.0, length=4), norms(400)))
    assert [verdict.onset for verdict in said if verdict.kind is Kind.WATCH and verdict.step >= 300][:4] == [300] * 4


def test_steps_between_lines_of_a_sparse_log_count_towards_patience() -> None:
    (call,) = spikes(verdicts(observations(raised(descent(400), 300, 3.0), norms(400), stride=100)))
    assert (call.step, call.onset) == (30300, 30000)


def test_lines_of_a_log_that_are_all_of_one_step_are_judged_too() -> None:
    """A line that names none belongs to the step before it: how fast the loss falls cannot be told then."""
    healthy = observations(descent(300))
    (call,) = spikes(verdicts([*healthy, *[healthy[-1]._replace(loss=4.0)] * 8]))
    assert (call.step, call.onset) == (299, 299)


def test_an_incident_is_called_once_while_it_lasts_and_again_after_it_has_recovered() -> None:
    losses = raised(raised(descent(700), 300, 3.0, length=60), 500, 3.0, length=60)
    assert [call.onset for call in spikes(verdicts(observations(losses, norms(700))))] == [300, 500]


@pytest.mark.parametrize(("later", "onset"), [(4, 300), (10, 300), (11, 311)])
def test_a_trouble_that_follows_a_blip_soon_began_with_it(later: int, onset: int) -> None:
    losses = raised(raised(descent(400), 300, 3.0, length=2), 300 + later, 3.0)
    said = verdicts(observations(losses, norms(400)))
    (call,) = spikes(said)
    assert (call.step, call.onset) == (304 + later, onset)
    assert f"since step {300 + later}" in call.explanation
    assert ("(a blip or the gradient norm did at step 300)" in call.explanation) == (onset == 300)
    assert {verdict.onset for verdict in said[300 + later :] if verdict.kind is Kind.WATCH} == {onset}


@pytest.mark.parametrize(("later", "onset"), [(4, 300), (10, 300), (11, 311)])
def test_a_trouble_that_follows_a_gradient_norm_far_up_soon_began_with_it(later: int, onset: int) -> None:
    struck = [norm * (100 if i in (300, 302) else 1) for i, norm in enumerate(norms(400))]
    (call,) = spikes(verdicts(observations(raised(descent(400), 300 + later, 3.0), struck)))
    assert (call.step, call.onset) == (304 + later, onset)


@pytest.mark.parametrize(("later", "onset"), [(8, 300), (12, 312)])
def test_a_trouble_that_follows_two_blips_began_at_most_ten_steps_before_it(later: int, onset: int) -> None:
    twice = raised(raised(descent(400), 300, 3.0, length=2), 304, 3.0, length=2)
    seen = observations(raised(twice, 300 + later, 3.0), norms(400))
    before = verdicts(seen[:308])
    assert [(each.ended.first_step, each.ended.last_step) for each in before if each.ended] == [(300, 301), (304, 305)]
    assert [call.onset for call in spikes(verdicts(seen))] == [onset]


def test_a_forerunner_survives_json() -> None:
    seen = observations(raised(raised(descent(400), 300, 3.0, length=2), 305, 3.0), norms(400))
    before, after = Sentinel(), Sentinel()
    verdicts(seen[:305], before)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [call.onset for call in spikes(verdicts(seen[305:], after))] == [300]


def test_in_a_sparse_log_and_where_steps_go_back_a_blip_leads_nowhere() -> None:
    losses = raised(raised(descent(400), 300, 3.0, length=2), 304, 3.0)
    (call,) = spikes(verdicts(observations(losses, norms(400), stride=100)))
    assert call.onset == 30400
    back = [each._replace(step=each.step - 50 * (i >= 304)) for i, each in enumerate(observations(losses, norms(400)))]
    (call,) = spikes(verdicts(back))
    assert call.onset == 254


def test_a_rise_that_the_gradient_norm_shares_is_called_where_the_loss_alone_is_not() -> None:
    losses = raised(descent(400), 300, 0.7)
    steady = norms(400)
    shaken = [norm * (4 if i >= 300 else 1) for i, norm in enumerate(steady)]
    assert not spikes(verdicts(observations(losses, steady)))
    (call,) = spikes(verdicts(observations(losses, shaken)))
    assert call.rule == "loss-and-grad-norm-high"
    assert call.step < 310


def test_a_fall_back_to_the_start_needs_no_second_witness() -> None:
    losses = raised(descent(400, noise=0.5), 300, 3.0)
    (call,) = spikes(verdicts(observations(losses, norms(400))))
    assert call.rule == "loss-back-at-start"
    assert call.step <= 310


def test_new_data_on_a_solved_task_is_no_damage_but_a_fall_back_to_the_start_is() -> None:
    solved = descent(500, start=2.3, end=0.01, noise=0.002)
    harder = raised(solved, 400, 0.6, decay=60.0)  # sixty times the level, a quarter of the first loss
    assert not spikes(verdicts(observations(harder, norms(500))))
    lost = raised(solved, 400, 2.3)
    assert [call.rule for call in spikes(verdicts(observations(lost, norms(500))))] == ["loss-back-at-start"]


def test_a_slow_ramp_is_called_as_drift_and_a_shift_that_decays_is_not() -> None:
    flat = descent(900)
    ramp = [loss + max(0, i - 500) * 0.006 for i, loss in enumerate(flat)]
    first = spikes(verdicts(observations(ramp, norms(900))))[0]
    assert first.rule == "loss-drift"
    assert 480 <= (first.onset or 0) < first.step < 700
    assert not spikes(verdicts(observations(raised(flat, 500, 0.5, decay=100.0), norms(900))))


NOISY = {"start": 0.9, "end": 0.45, "noise": 0.1}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by", [0.25, 0.35])
def test_a_rise_that_stays_is_called_where_half_of_little_progress_is_lost(by: float, seed: int) -> None:
    said = verdicts(observations(raised(descent(700, seed, **NOISY), 400, by), norms(700, seed)))
    ((called, rule),) = [(verdict.step, verdict.rule) for verdict in said if verdict.kind is Kind.SPIKE]
    assert 440 < called < 560
    assert rule == "loss-stays-high"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by", [0.25, 0.35])
def test_a_rise_that_decays_is_a_shift_and_is_not_called(by: float, seed: int) -> None:
    said = verdicts(observations(raised(descent(700, seed, **NOISY), 400, by, decay=60), norms(700, seed)))
    assert all(verdict.kind in (Kind.HEALTHY, Kind.WATCH) for verdict in said)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(("more", "called"), [(0.0, True), (0.12, False)])
def test_a_rise_that_has_lost_a_fifth_of_what_it_began_with_is_being_learned(
    more: float, called: bool, seed: int
) -> None:
    """Three units of noise stay, and what was above that has gone in the first 60 steps."""
    kept = raised(descent(480, seed, start=0.9, end=0.45, noise=0.055), 400, 0.17)
    said = verdicts(observations(raised(kept, 400, more, decay=25.0), norms(480, seed)))
    assert [verdict.rule for verdict in spikes(said)] == ["loss-stays-high"] * called


def test_a_rise_that_stays_behind_a_hint_is_not_called() -> None:
    seen = observations(raised(descent(700, **NOISY), 400, 0.45), norms(700), {400: Hint.LR_CHANGED})
    assert all(verdict.kind in (Kind.HEALTHY, Kind.WATCH) for verdict in verdicts(seen))


def test_a_dead_plateau_is_called_by_the_gradient_norm_that_is_gone() -> None:
    losses = raised(descent(400), 300, 0.3)
    gone = [norm * (0.2 if i >= 300 else 1) for i, norm in enumerate(norms(400))]
    call = spikes(verdicts(observations(losses, gone)))[0]
    assert (call.rule, call.witness) == ("grad-norm-collapse", "grad_norm")
    assert call.step <= 315
    falling = descent(400)  # the norm of a model that is done is small too
    assert not spikes(verdicts(observations(falling, gone)))


LEARNT = {"start": 2.0, "end": 0.45, "noise": 0.1}


def faded(count: int, since: int, to: float, over: int = 200) -> list[float]:
    """Gradient norms that fade to a share of theirs, too slowly for a reference of 32 steps to stay behind."""
    return [norm * to ** min(1.0, max(0, i - since) / over) for i, norm in enumerate(norms(count))]


@pytest.mark.parametrize("to", [0.3, 0.5])
def test_a_gradient_that_fades_slowly_while_the_loss_creeps_up_is_called(to: float) -> None:
    creeping = [loss + 0.25 * min(1.0, max(0, i - 300) / 200) for i, loss in enumerate(descent(700, **LEARNT))]
    (call,) = spikes(verdicts(observations(creeping, faded(700, 300, to))))
    assert (call.rule, call.witness) == ("grad-norm-collapse", "grad_norm")
    assert 300 <= call.onset <= call.step <= 520
    assert not spikes(verdicts(observations(creeping, norms(700)))), "the loss alone says too little"
    assert not spikes(verdicts(observations(descent(700, **LEARNT), faded(700, 300, to)))), "so does the norm alone"


def test_a_gradient_that_fades_behind_a_hint_has_another_reference() -> None:
    higher = raised(descent(700, **LEARNT), 400, 0.25)
    smaller = [norm * (1 if i < 400 else 0.6) for i, norm in enumerate(norms(700))]
    assert [call.rule for call in spikes(verdicts(observations(higher, smaller)))] == ["grad-norm-collapse"]
    assert not spikes(verdicts(observations(higher, smaller, {400: Hint.LR_CHANGED})))


def test_a_level_that_persists_uncalled_is_accepted_and_reported() -> None:
    said = verdicts(observations(raised(descent(600), 300, 0.75), norms(600)))
    assert not spikes(said)
    assert all(verdict.kind is Kind.HEALTHY for verdict in said[450:500])
    later = raised(raised(descent(700), 300, 0.75), 600, 3.0)
    (call,) = spikes(verdicts(observations(later, norms(700))))
    assert call.step == 604


def test_a_level_that_persists_after_a_call_is_accepted() -> None:
    said = verdicts(observations(raised(descent(800), 300, 3.0), norms(800)))
    assert len(spikes(said)) == 1
    assert all(verdict.kind is Kind.HEALTHY for verdict in said[500:])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_called_in_their_step_and_forgotten(bad: float) -> None:
    seen = observations(descent(300), norms(300))
    clean = verdicts(seen)
    at = 200
    broken_loss = [*seen[:at], Observation(at, bad, 1.0), *seen[at:]]
    broken_norm = [*seen[:at], Observation(at, 2.0, bad), *seen[at:]]
    for broken, rule in ((broken_loss, "nonfinite-loss"), (broken_norm, "nonfinite-grad-norm")):
        said = verdicts(broken)
        assert (said[at].kind, said[at].rule, said[at].onset) == (Kind.NONFINITE, rule, at)
        assert said[:at] + said[at + 1 :] == clean


def test_a_spike_that_ends_in_nan_has_its_onset_where_the_spike_began() -> None:
    seen = observations(raised(descent(303), 300, 50.0), norms(303))
    assert verdicts([*seen, Observation(303, math.nan, math.nan)])[-1].onset == 300


@pytest.mark.parametrize(
    ("steps", "height", "norm", "onset"),
    [(1, 4.0, None, 301), (1, 2.5, None, 301), (1, 50.0, None, 300), (2, 4.0, None, 300), (1, 4.0, 500.0, 300)],
)
def test_one_step_that_was_raised_a_little_before_a_nan_is_no_spike(
    steps: int, height: float, norm: float | None, onset: int
) -> None:
    """A higher one, several of them, or one with a gradient norm far up, is."""
    seen = observations(descent(300 + steps), norms(300 + steps))
    seen[300:] = [each._replace(loss=2.3 + 0.15 * height, grad_norm=norm or each.grad_norm) for each in seen[300:]]
    assert verdicts([*seen, Observation(300 + steps, math.nan, 1.0)])[-1].onset == onset


def test_an_infinite_norm_of_a_step_that_the_scaler_skipped_is_routine() -> None:
    seen = observations(descent(100), norms(100))
    skipped = Observation(100, 9.0, math.inf, Hint.SCALER_SKIPPED)
    sentinel = Sentinel()
    verdicts(seen, sentinel)
    before = sentinel.state_dict()
    assert sentinel.update(skipped).kind is Kind.HEALTHY
    assert sentinel.state_dict()["loss"] == before["loss"]
    assert sentinel.update(Observation(101, math.nan, math.inf, Hint.SCALER_SKIPPED)).rule == "nonfinite-loss"


def test_steps_without_a_loss_are_judged_by_what_is_there() -> None:
    sentinel = Sentinel()
    assert sentinel.update(Observation(0, None, None)).kind is Kind.HEALTHY
    assert sentinel.update(Observation(1, None, math.inf)).rule == "nonfinite-grad-norm"


@pytest.mark.parametrize("hint", [Hint.LR_CHANGED, Hint.RESUMED, Hint.ANNOUNCED])
def test_a_hint_excuses_a_rise(hint: Hint) -> None:
    losses = raised(descent(600), 300, 1.6, decay=25.0)
    assert spikes(verdicts(observations(losses, norms(600))))
    assert not spikes(verdicts(observations(losses, norms(600), {300: hint})))


@pytest.mark.parametrize("hint", [Hint.LR_CHANGED, Hint.RESUMED, Hint.EPOCH, Hint.ANNOUNCED])
@pytest.mark.parametrize("later", [20, 40])
def test_a_divergence_behind_a_hint_is_called(hint: Hint, later: int) -> None:
    losses = raised(descent(500), 300, 2.5)
    (call,) = spikes(verdicts(observations(losses, norms(500), {300 - later: hint})))
    assert (call.step, call.onset, call.rule) == (304, 300, "loss-high")


@pytest.mark.parametrize("hint", [Hint.LR_CHANGED, Hint.RESUMED])
def test_a_rise_with_a_hint_is_called_when_it_undoes_nearly_all_progress(hint: Hint) -> None:
    (call,) = spikes(verdicts(observations(raised(descent(400), 300, 2.8), norms(400), {300: hint})))
    assert call.rule == "loss-beyond-start"


def test_a_hint_that_a_log_notes_a_line_too_late_still_excuses() -> None:
    losses = raised(descent(600), 300, 1.6, decay=25.0)
    assert not spikes(verdicts(observations(losses, norms(600), {302: Hint.LR_CHANGED})))


def test_a_ramp_behind_a_hint_is_called_as_drift() -> None:
    ramp = [loss + max(0, i - 520) * 0.006 for i, loss in enumerate(descent(800))]
    first = spikes(verdicts(observations(ramp, norms(800), {500: Hint.LR_CHANGED})))[0]
    assert first.rule == "loss-drift"
    assert first.step < 720


def test_losses_that_are_nearly_always_zero_are_not_called_when_they_return_to_it() -> None:
    chance = random.Random(0)
    rare = [float(-(chance.random() < 0.1)) for _ in range(300)]
    often = [float(-(chance.random() < 0.9)) for _ in range(100)]
    for losses in (rare + [-1.0] * 60 + [0.0] * 200, rare + often + [0.0] * 200):
        assert not spikes(verdicts(observations(losses)))
    assert spikes(verdicts(observations(rare + [20.0] * 10)))


def test_a_rounded_loss_that_moves_by_one_place_is_not_called() -> None:
    flat = [round(loss, 4) for loss in descent(500, start=0.01, end=0.0003, noise=0.00001)]
    assert len(set(flat[-100:])) == 1
    assert not spikes(verdicts(observations([*flat, *[0.0004] * 60, *[0.0003] * 60])))
    assert spikes(verdicts(observations([*flat, *[0.02] * 10])))


def test_a_hint_does_not_excuse_a_loss_far_above_the_first_ones() -> None:
    losses = raised(descent(400), 300, 30.0)
    (call,) = spikes(verdicts(observations(losses, norms(400), {300: Hint.LR_CHANGED})))
    assert call.rule == "loss-beyond-start"


def test_an_announced_phase_may_have_any_level() -> None:
    losses = raised(descent(600), 300, 30.0)
    assert not spikes(verdicts(observations(losses, norms(600), {300: Hint.ANNOUNCED})))


def test_an_excuse_ends() -> None:
    losses = raised(descent(800), 500, 3.0)
    late = 500 - EXCUSED_FOR[Hint.LR_CHANGED] - 1
    assert spikes(verdicts(observations(losses, norms(800), {late: Hint.LR_CHANGED})))


def test_short_epochs_excuse_nothing() -> None:
    losses = raised(descent(400), 300, 3.0)
    every_ten = dict.fromkeys(range(0, 400, 10), Hint.EPOCH)
    assert [call.step for call in spikes(verdicts(observations(losses, norms(400), every_ten)))] == [304]


def test_a_learning_rate_above_all_earlier_ones_is_no_excuse() -> None:
    assert learning_rate_hint(1e-4, 1e-3, 1e-3) is Hint.LR_CHANGED  # a warm restart
    assert learning_rate_hint(1e-3, 1e-2, 1e-3) is Hint.NONE
    assert learning_rate_hint(1e-3, 1e-4, 1e-3) is Hint.NONE  # a decay lowers the loss
    assert learning_rate_hint(1e-4, 1.1e-4, 1e-3) is Hint.NONE  # a schedule
    assert learning_rate_hint(None, 1e-3, None) is Hint.NONE


def test_every_call_explains_itself_with_numbers_that_agree() -> None:
    curves = {
        "loss-high": (raised(descent(400), 300, 3.0), norms(400)),
        "loss-back-at-start": (raised(descent(400, noise=0.5), 300, 3.0), norms(400)),
        "loss-drift": ([loss + max(0, i - 200) * 0.006 for i, loss in enumerate(descent(400))], norms(400)),
    }
    for rule, (losses, grad_norms) in curves.items():
        call = spikes(verdicts(observations(losses, grad_norms)))[0]
        assert call.rule == rule
        assert call.value is not None
        assert call.threshold is not None
        assert call.value > call.threshold
        assert f"{call.value:.6g}" in call.explanation
        assert f"{call.threshold:.6g}" in call.explanation
        assert 8 <= len(call.window) <= 32
        assert min(call.window) < call.value


def test_presets_are_ordered_from_deaf_to_nervous() -> None:
    low, normal, high = PRESETS["low"], PRESETS["normal"], PRESETS["high"]
    for name in ("patience", "alone", "supported", "support", "drift"):
        assert getattr(low, name) >= getattr(normal, name) >= getattr(high, name)
        assert getattr(low, name) > getattr(high, name)
    for name, preset in PRESETS.items():
        assert Sentinel(name).patience == preset.patience < Settings().probation


def test_an_unknown_sensitivity_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="paranoid"):
        Sentinel("paranoid")  # type: ignore[arg-type]


@pytest.mark.parametrize("schema", [1, 2, 3, 4, 5, 6, 7])
def test_the_state_of_a_sentinel_that_knew_less_is_read(schema: int) -> None:
    older, newer = Sentinel(), Sentinel()
    for step in range(100):
        older.update(Observation(step, 3.0 + 0.01 * (step % 7), 1.0))
    state = older.state_dict() | {"schema": schema}
    del state["seen"]["teeth"]
    if schema < 7:
        del state["seen"]["largest"], state["seen"]["unlike_zero"]
    if schema < 5:
        del state["forerunner"]
    if schema < 4:
        del state["fading"]
    if schema < 3:
        del state["seen"]
    if schema == 1:
        del state["explaining"]
        for window in ("loss", "norm"):
            state[window] = {name: state[window][name] for name in ("level", "noise")}
    newer.load_state_dict(state)
    assert newer.update(Observation(100, 30.0, 1.0)).kind is older.update(Observation(100, 30.0, 1.0)).kind


def test_an_excursion_of_a_state_that_knew_no_forerunners_goes_on() -> None:
    losses = observations(raised(descent(400), 300, 3.0), norms(400))
    older, newer = Sentinel(), Sentinel()
    verdicts(losses[:302], older)
    state = older.state_dict() | {"schema": 4}
    del state["forerunner"], state["excursion"]["began"], state["excursion"]["held"], state["excursion"]["early"]
    state["excursion"]["highest"] = 20.0
    newer.load_state_dict(state)
    assert verdicts(losses[302:], newer) == verdicts(losses[302:], older)


def test_state_of_another_schema_is_refused() -> None:
    with pytest.raises(RunDoesNotFit, match="schema 0"):
        Sentinel().load_state_dict({"schema": 0})


def test_the_table_answers_every_event_that_its_state_can_meet_and_reaches_every_state() -> None:
    watched = {Event.HIGH, Event.CALL, Event.RECOVERED, Event.PERSISTED}
    meets = {
        State.LEARNING: {Event.CALM, Event.READY},
        State.HEALTHY: {Event.CALM, Event.HIGH, Event.CALL},
        State.WATCHING: watched,
        State.CALLED: watched - {Event.CALL},
    }
    assert set(TRANSITIONS) == {(state, event) for state, events in meets.items() for event in events}
    assert {state for state, _ in TRANSITIONS.values()} == set(State)
    calls = {key for key, (_, kind) in TRANSITIONS.items() if kind is Kind.SPIKE}
    assert calls == {(State.HEALTHY, Event.CALL), (State.WATCHING, Event.CALL)}


def level(noise: float = 0.15) -> Sentinel:
    """One that knows a level of 2.3 and norms of 1."""
    sentinel = Sentinel()
    verdicts(observations(descent(600, noise=noise), norms(600)), sentinel)
    return sentinel


@pytest.mark.parametrize(
    ("loss", "norm", "hint", "rule"),
    [
        (2.3, 1.0, Hint.NONE, None),
        (2.9, 1.0, Hint.NONE, None),  # four noise units up: a good batch may be so
        (3.6, 1.0, Hint.NONE, "stands-out-loss"),
        (3.6, None, Hint.NONE, "stands-out-loss"),
        (2.9, 2.0, Hint.NONE, "stands-out-loss-and-grad-norm"),
        (2.3, 2.0, Hint.NONE, None),
        (2.3, 10.0, Hint.NONE, "stands-out-grad-norm"),
        (math.nan, 1.0, Hint.NONE, "nonfinite-loss"),
        (2.3, math.inf, Hint.NONE, "nonfinite-grad-norm"),
        (2.3, math.inf, Hint.SCALER_SKIPPED, None),
        (3.6, 1.0, Hint.LR_CHANGED, None),
        (3.6, 1.0, Hint.ANNOUNCED, None),
        (None, 10.0, Hint.NONE, None),
    ],
)
def test_what_stands_out_in_a_screen(loss: float | None, norm: float | None, hint: Hint, rule: str | None) -> None:
    sentinel = level()
    before = sentinel.state_dict()
    verdict = sentinel.screen(Observation(600, loss, norm, hint))
    assert (verdict.rule if verdict else None) == rule
    assert sentinel.state_dict() == before
    if verdict is not None:
        assert (verdict.step, verdict.onset) == (600, 600)
        assert f"{verdict.value:.6g}" in verdict.explanation


@pytest.mark.parametrize(
    ("loss", "fell_to", "rule"),
    [(0.9, 0.3, "stands-out-low"), (2.3, 0.3, None), (1.7, 0.3, None), (0.9, 2.2, None), (0.9, None, None)],
)
def test_a_loss_that_is_far_down_stands_out_where_a_trouble_began_so_far_down(
    loss: float, fell_to: float | None, rule: str | None
) -> None:
    verdict = level().screen(Observation(600, loss, 1.0), fell_to=fell_to)
    assert (verdict.rule if verdict else None) == rule
    assert verdict is None or "below 1.36" in verdict.explanation


def test_while_a_rise_is_excused_only_a_fall_behind_the_start_stands_out() -> None:
    sentinel = level()
    sentinel.update(Observation(600, 2.3, 1.0, Hint.LR_CHANGED))
    assert sentinel.screen(Observation(601, 4.0, 1.0)) is None
    lost = sentinel.screen(Observation(601, 6.5, 1.0))
    assert lost is not None
    assert lost.rule == "stands-out-lost"


def test_nothing_finite_stands_out_before_a_level_is_known() -> None:
    assert Sentinel().screen(Observation(0, 50.0, 50.0)) is None


def test_hardly_a_good_batch_stands_out() -> None:
    out = 0
    for seed in range(20):
        sentinel = Sentinel()
        for observation in observations(descent(600, seed), norms(600, seed)):
            out += sentinel.screen(observation) is not None
            sentinel.update(observation)
    assert out <= 6, "of 12,000"
