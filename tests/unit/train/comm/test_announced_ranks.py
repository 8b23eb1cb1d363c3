"""What whoever started the ranks says of their number."""

import pytest

from rollback.errors import UsageError
from rollback.train.comm.ranks import Ranks, announced_ranks


@pytest.mark.parametrize("said", ["", "1", " 1\n"])
def test_a_rank_by_itself_needs_no_group(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", said)
    assert Ranks().world_size == 1


@pytest.mark.parametrize("said", ["two", "-1", "1.5"])
def test_what_is_no_number_of_ranks_is_refused_by_name(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", said)
    with pytest.raises(UsageError, match=f"WORLD_SIZE is '{said}', which is no number of ranks"):
        announced_ranks()
