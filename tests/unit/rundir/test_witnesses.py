"""Whose evidence of an incident is kept where the ranks are many."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rollback.rundir.evidence import MOST_WITNESSES, witnesses

HARM = st.one_of(st.floats(0, 10), st.sampled_from([-math.inf, math.inf, math.nan]))


@given(harm=st.lists(HARM, min_size=1, max_size=3 * MOST_WITNESSES))
def test_all_where_they_are_few_and_else_so_many_among_them_those_that_saw_most(harm: list[float]) -> None:
    chosen = witnesses(harm)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(len(harm), MOST_WITNESSES)
    seen = [math.inf if math.isnan(value) else value for value in harm]
    left = [seen[rank] for rank in range(len(harm)) if rank not in chosen]
    kept = sorted((seen[rank] for rank in chosen), reverse=True)
    assert not left or max(left) <= kept[MOST_WITNESSES // 2 - 1]


def test_of_the_others_a_sample_from_all_over_the_job_is_kept() -> None:
    harm = [1.0] * 16_384
    harm[9_999] = math.nan
    chosen = witnesses(harm)
    assert 9_999 in chosen
    assert {rank // 1_024 for rank in chosen} == set(range(16))
