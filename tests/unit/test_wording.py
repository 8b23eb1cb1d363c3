"""What is said in words that the reader can type."""

import re

import pytest

from rollback.train.advice import script_rates, unkept_state
from rollback.train.advice.advisor import NOT_SWITCHED_AGAIN
from rollback.wording import AdviceText, Calls

ADVICE = [
    NOT_SWITCHED_AGAIN,
    *(
        each
        for module in (script_rates, unkept_state)
        for each in vars(module).values()
        if isinstance(each, AdviceText)
    ),
]
OF_TRAINER = Calls("rollback.protect(trainer, ", "trainer.global_step", keep=None)


@pytest.mark.parametrize("advice", ADVICE)
def test_advice_tells_whose_loop_a_library_has_what_can_be_typed_there(advice: AdviceText) -> None:
    advice = advice.of(names="a", kind="Adam", step=1, now=0.1, told="and")
    assert not re.search(r"Guard\(|guard\.", advice.in_words(OF_TRAINER))
    told = advice.in_words(Calls("rollback.protect(accelerator, ..., ", "loader.guard.step", "loader.guard.keep"))
    assert not re.search(r"Guard\(|(?<!loader\.)guard\.", told)


def test_advice_tells_whose_script_has_no_guard_how_to_get_one() -> None:
    calls = Calls(first="(First make one)")

    def told(text: str) -> str:
        return AdviceText("code", text).in_words(calls)

    assert told("Count by {guard.step}") == "Count by guard.step. (First make one)"
    assert told("Hand over: {guard.hand_over:a=a}") == "Hand over: Guard(..., a=a). (First make one)"
    assert told("Clip between backward() and step()") == "Clip between backward() and step()"


@pytest.mark.parametrize("calls", [OF_TRAINER, Calls(first="(First make one)")])
def test_names_of_the_script_that_read_like_a_call_are_left_as_they_are(calls: Calls) -> None:
    advice = AdviceText("code", "the script changes {names}").of(names="self.guard.step, {x}")
    assert advice.in_words(calls) == "the script changes self.guard.step, {x}"


def test_a_value_that_no_call_keeps_is_to_be_handed_over_in_an_object() -> None:
    advice = AdviceText("code", "have a number kept: {guard.keep:kept = mean=0.0}")
    assert advice.in_words(Calls()) == "have a number kept: kept = guard.keep(mean=0.0)"
    assert advice.in_words(OF_TRAINER) == (
        "have a number kept: rollback.protect(trainer, mean=mean), an object that has it, with state_dict and "
        "load_state_dict"
    )
