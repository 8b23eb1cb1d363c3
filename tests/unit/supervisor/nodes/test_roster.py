"""What a leader knows of its followers, by what they report."""

import pytest

from rollback.supervisor.diagnosis.outcome import Failures, HostOutcome, RankFailure
from rollback.supervisor.nodes.membership import NodePlace
from rollback.supervisor.nodes.protocol import NodeReport
from rollback.supervisor.nodes.roster import FAILURES, Roster

OWN = NodePlace(3, 3, "node-0", "a:1:1", "a", 1, 60.0, command={"script": "1", "settings": "2"})


def report(rank: int, **more: object) -> NodeReport:
    told = NodeReport(node=f"node-{rank}", launch=f"h{rank}:1:1", host=f"h{rank}", pid=1, leader=OWN.launch, attempt=1)
    return told.model_copy(update={"command": OWN.command, **more})


@pytest.fixture
def roster() -> Roster:
    roster = Roster(OWN)
    roster.seat({"node-1": "h1:1:1", "node-2": "h2:1:1"})
    return roster


def failed(rank: int) -> HostOutcome:
    failures = (RankFailure(rank=rank, pid=1, exitcode=1, message=None),)
    return HostOutcome(status=1, failures=Failures(error="ChildFailedError", failures=failures))


def test_only_failures_in_a_row_count_against_a_node(roster: Roster) -> None:
    assert FAILURES == 2
    roster.hear([report(1, left=failed(4)), report(2, left=failed(8))])
    members = roster.members(1, overdue=False).values()
    for rank, progressed, failing in (
        (4, True, set()),
        (4, False, {"node-1"}),
        (8, False, {"node-1"}),
        (None, False, {"node-1"}),
        (8, True, set()),
        (8, False, {"node-2"}),
        (None, True, set()),
    ):
        roster.failed(rank, members, progressed=progressed)
        assert roster.failing() == failing


def test_a_member_is_lost_where_it_is_silent_or_overdue_or_came_anew_and_what_it_says_late_does_not_count(
    roster: Roster,
) -> None:
    one, two = report(1, state="running"), report(2, state="ended", left=HostOutcome(status=0))
    roster.hear([one, two])
    assert roster.members(1, overdue=False) == {"node-1": one, "node-2": two}
    assert roster.members(1, overdue=True) == {"node-1": None, "node-2": two}
    assert roster.members(2, overdue=False) == {"node-1": None, "node-2": None}
    for silent in ([two], [two, report(1, launch="h1:2:1")], [two, report(1, leader="b:1:1")]):
        roster.hear(silent)
        assert roster.members(1, overdue=False) == {"node-1": None, "node-2": two}
    roster.lose(["node-1"], 1)
    late = report(1, state="running", signals=("SIGTERM",))
    roster.hear([late])
    assert roster.new_signals() == []
    roster.hear([late.model_copy(update={"attempt": 2})])
    assert roster.new_signals() == [("node-1", "SIGTERM")]
    assert roster.new_signals() == []


def test_two_supervisors_of_one_name_are_told_once_and_one_that_is_started_again_is_not(roster: Roster) -> None:
    """Where hosts share no directory, no lock keeps them from it: both report, in turn."""
    first, again, other = (report(1, launch=f"h1:{pid}:1") for pid in (1, 2, 3))
    assert [roster.hear([it]) for it in (first, again)] == [[], []]
    (told,), *rest = (roster.hear([it]) for it in (first, again, other, again))
    assert told.startswith("two supervisors take part as node-1, one of them on h1")
    assert rest == [[], [], []]


def test_a_node_that_runs_something_else_is_told_once_for_each_difference_and_its_settings_are_the_ranks(
    roster: Roster,
) -> None:
    other = report(1, command={"script": "3", "settings": "4"})
    (told,) = roster.hear([other])
    assert told.startswith("node-1 (h1) has other script than node-0 (a)")
    assert roster.hear([other]) == []
    assert roster.hear([report(1)]) == []
    assert len(roster.hear([other])) == 1
