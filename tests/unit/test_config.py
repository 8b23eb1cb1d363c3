"""Settings: defaults, who wins, and what is refused with which words."""

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollback.config import PRESETS, Settings, settings_as_environment, settings_from, spelt
from rollback.environment import ENV_SETTINGS
from rollback.errors import ExitCode, UsageError
from rollback.facts.training import Window


def test_the_default_is_the_balanced_preset() -> None:
    assert settings_from({}, {}).reach == PRESETS["balanced"]


def test_the_palm_preset_is_what_the_paper_did_by_hand() -> None:
    reach = Settings(policy="palm").reach
    assert (reach.rewind, reach.skip_min, reach.skip_from) == (100, 200, "checkpoint")


def test_the_surgical_preset_skips_what_was_seen_and_nothing_else() -> None:
    reach = Settings(policy="surgical").reach
    assert (reach.rewind, reach.skip_min, reach.skip_after, reach.skip_from) == (0, 0, 0, "onset")


def test_a_setting_by_hand_takes_the_presets_place_also_when_it_is_0() -> None:
    reach = Settings(policy="palm", rewind=0, skip_after=7).reach
    assert (reach.rewind, reach.skip_after, reach.skip_min) == (0, 7, 200)


windows = st.tuples(st.integers(0, 99), st.integers(0, 9)).map(lambda pair: Window(first=pair[0], last=sum(pair)))
own: dict[str, st.SearchStrategy[Any]] = {
    "policy": st.sampled_from(["balanced", "palm", "surgical", "screen"]),
    "rewind": st.integers(0, 1000),
    "skip_after": st.integers(0, 1000),
    "horizon": st.integers(1, 1000),
    "retry_first": st.booleans(),
    "sensitivity": st.sampled_from(["low", "normal", "high"]),
    "snapshot_every": st.integers(1, 1000),
    "keep": st.integers(3, 10),
    "skip": st.lists(windows),
}  # fmt: skip
some = st.fixed_dictionaries({}, optional=own)


@given(some, some)
def test_the_command_line_wins_over_the_script_and_leaves_the_rest_alone(
    script: dict[str, Any], operator: dict[str, Any]
) -> None:
    handed_down = Settings(**operator).model_dump_json(exclude_unset=True)
    settings = settings_from(script, {ENV_SETTINGS: handed_down})
    assert settings == Settings(**{**script, **operator})


def test_a_skip_list_of_any_length_is_handed_down() -> None:
    """`--skips-of` names all samples once more for each time that one was added; Linux takes 128 KiB in a variable."""
    windows = [{"first": 10 * number, "last": 10 * number + 3} for number in range(12_000)]
    given = Settings.model_validate({"skip": windows, "ring": "file:///Ärger/ring"})
    program = "import os; from rollback.config import settings_from; print(len(settings_from({}, os.environ).skip))"
    started = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **settings_as_environment(given)}, stdout=subprocess.PIPE,
        check=True,
    )  # fmt: skip
    assert int(started.stdout) == len(windows)
    assert settings_from({}, settings_as_environment(given)) == given


@pytest.mark.parametrize(
    ("script", "means"),
    [
        ({"skip": "120:139"}, {"skip": [{"first": 120, "last": 139}]}),
        ({"skip": ["3:3", {"first": 5, "last": 7}]}, {"skip": [{"first": 3, "last": 3}, {"first": 5, "last": 7}]}),
        ({"skip_samples": "17,402"}, {"skip_samples": [{"samples": [17, 402]}]}),
        ({"skip_samples": [17, "402"]}, {"skip_samples": [{"samples": [17]}, {"samples": [402]}]}),
        ({"skip_samples": "100:17"}, {"skip_samples": [{"batch": 100, "samples": [17]}]}),
    ],
)
def test_a_script_may_write_what_is_left_out_as_on_the_command_line(
    script: dict[str, Any], means: dict[str, Any]
) -> None:
    assert settings_from(script, {}) == settings_from(means, {})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rewind": -1}, "setting rewind"),
        ({"skip": "9"}, r"^setting skip.0: '9' is not a range of batches: write FIRST:LAST"),
        ({"skip_samples": "all"}, "^setting skip_samples.0: 'all' is not a list of samples: write data set indices"),
        ({"max_skipped": 0.05}, r"^setting max_skipped: '0.05' is not of the form X% .*, such as 5%"),
        ({"lr_after": 0.5}, r"^setting lr_after: '0.5' is not of the form FACTOR:STEPS .*, such as 0.5:200"),
        ({"keep": 2}, "setting keep"),
        ({"probation": 0}, "setting probation"),
        ({"horizon": "far"}, "setting horizon"),
        ({"sensitivity": "extreme"}, "setting sensitivity"),
        ({"objective": "generative"}, "setting objective"),
        ({"policy": "brave"}, "setting policy"),
        ({"skip": [{"first": 5, "last": 2}]}, "setting skip.0"),
        ({"skip": [(5, 9)]}, r"^setting skip.0: '\(5, 9\)' is not a range of batches: write FIRST:LAST"),
        ({"skip_samples": [1.5]}, r"^setting skip_samples.0: '1.5' is not a list of samples"),
        ({"snapshot_every": None}, r"setting snapshot_every: Input should be a valid integer or 'auto' \(got None\)"),
        ({"rewindd": 3}, "no setting 'rewindd'"),
        ({"init": ""}, "setting init: it is empty"),
        ({"snapshot_every": 0}, "setting snapshot_every: 0 leaves nothing to restore"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        settings_from(settings, {})
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["{", "[]", '"text"', '{"rewind": -1}', '{"unheard_of": 1}'])
def test_settings_handed_down_that_cannot_be_are_refused_too(text: str) -> None:
    with pytest.raises(UsageError):
        settings_from({}, {ENV_SETTINGS: text})


def test_what_the_command_line_has_given_is_refused_by_its_option() -> None:
    given = {ENV_SETTINGS: '{"snapshot_every": 0, "ring": null}'}
    with pytest.raises(UsageError, match=r"^--snapshot-every: 0 leaves nothing to restore") as refused:
        settings_from({"keep": 3}, given)
    assert refused.value.__suppress_context__, "a script would print pydantic's traceback above it"
    assert [spelt(name, given) for name in ("snapshot_every", "keep")] == ["--snapshot-every", "keep"]
    assert spelt("keep", {}) == "keep"


def test_without_snapshots_one_may_still_observe() -> None:
    assert settings_from({"snapshot_every": 0, "observe_only": True}, {}).snapshot_every == 0
