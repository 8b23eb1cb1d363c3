"""What a script iterates in place of its loader."""

import pytest

from rollback.trainers.adopt.script_pass import ScriptPass


def test_an_error_that_the_script_catches_is_not_the_end_of_the_pass() -> None:
    def draw(answers: list[object]) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    batches = ScriptPass(lambda: ([1, OSError(), 2, StopIteration(), 3],), draw)
    assert next(batches) == 1
    with pytest.raises(OSError):
        next(batches)
    assert [*batches] == [2]
    with pytest.raises(StopIteration):  # where a guard would begin another one
        next(batches)


def test_a_script_that_demands_a_batch_is_given_that_of_a_later_pass() -> None:
    """A resumed run comes to its epoch through passes that are empty, thousands of them in a long run."""
    further = [(iter([batch]),) for batch in (1, 2)] + [(iter(()),)] * 5000
    batches = ScriptPass(lambda: (iter(()),), next, lambda: further.pop() if further else None)
    assert [*batches] == [2, 1]
