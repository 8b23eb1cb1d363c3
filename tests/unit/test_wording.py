"""What is said in words that the reader can type."""

import re

import pytest

from rollback.train.advice import script_rates, unkept_state
from rollback.wording import Calls

ADVICE = [
    value[1]
    for module in (script_rates, unkept_state)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, tuple)
]


@pytest.mark.parametrize("text", ADVICE)
def test_advice_tells_whose_loop_a_library_has_what_can_be_typed_there(text: str) -> None:
    assert Calls().put_into(text) == text
    told = Calls("rollback.protect(trainer, ", "trainer.global_step", keep=None).put_into(text)
    assert not re.search(r"Guard\(|guard\.", told)
    told = Calls("rollback.protect(accelerator, ..., ", "loader.guard.step", "loader.guard.keep").put_into(text)
    assert not re.search(r"Guard\(|(?<!loader\.)guard\.", told)


def test_advice_tells_whose_script_has_no_guard_how_to_get_one() -> None:
    calls = Calls(first="(First make one)")
    assert calls.put_into("Count by guard.step") == "Count by guard.step. (First make one)"
    assert calls.put_into("Hand over: Guard(..., a=a)") == "Hand over: Guard(..., a=a). (First make one)"
    assert calls.put_into("Clip between backward() and step()") == "Clip between backward() and step()"


def test_a_value_that_no_call_keeps_is_to_be_handed_over_in_an_object() -> None:
    calls = Calls("rollback.protect(trainer, ", "trainer.global_step", keep=None)
    assert calls.put_into("have a number kept: kept = guard.keep(mean=0.0)") == (
        "have a number kept: rollback.protect(trainer, mean=mean), an object that has it, with state_dict and "
        "load_state_dict"
    )
