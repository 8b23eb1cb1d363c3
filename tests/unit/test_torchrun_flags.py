"""What the supervisor relies on in torchrun: its flags, and how it tells which ranks failed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import get_args_parser

from rollback.config import Settings
from rollback.supervisor.flags import FLAGS, RENDEZVOUS, names_a_rendezvous
from rollback.supervisor.outcome import Failures
from rollback.supervisor.torchrun import describe, method_name


def flags_of_torchrun() -> dict[str, tuple[bool, str | None]]:
    """Long name to whether it takes a value and its short name."""
    found = {}
    for action in get_args_parser()._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if names and not isinstance(action, argparse._HelpAction):
            short = next((name[1:] for name in action.option_strings if not name.startswith("--")), None)
            found[names[0].removeprefix("--")] = (action.nargs != 0, short)
    return found


def test_the_table_is_torchruns_command_line() -> None:
    assert {flag.name: (flag.metavar is not None, flag.short) for flag in FLAGS} == flags_of_torchrun()


def test_no_flag_of_torchrun_hides_a_setting_of_the_guard() -> None:
    assert not {flag.parameter for flag in FLAGS} & set(Settings.model_fields)


@pytest.mark.parametrize("name", RENDEZVOUS)
def test_a_rendezvous_is_recognized_as_flag_and_as_variable(name: str) -> None:
    (flag,) = (flag for flag in FLAGS if flag.name == name)
    assert names_a_rendezvous({name: "x"}, {})
    assert names_a_rendezvous({}, {flag.variable: "x"})


@pytest.mark.parametrize(("nnodes", "many"), [("1", False), ("1:1", False), ("2", True), ("1:4", True)])
def test_several_nodes_need_a_rendezvous_of_their_own(nnodes: str, many: bool) -> None:
    assert names_a_rendezvous({"nnodes": nnodes}, {}) is many
    assert names_a_rendezvous({}, {"PET_NNODES": nnodes}) is many


def test_one_node_needs_no_rendezvous() -> None:
    assert not names_a_rendezvous({"nproc-per-node": "8", "standalone": True}, {"PET_NPROC_PER_NODE": "8"})
    assert not names_a_rendezvous({}, {})


def failure(rank: int, exitcode: int, *, at: int, error_file: str = "") -> ProcessFailure:
    found = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=error_file)
    found.timestamp = at
    return found


def test_the_first_failure_comes_first_and_ranks_that_torchrun_ended_come_last() -> None:
    failures = {0: failure(0, -15, at=6), 1: failure(1, 1, at=8), 2: failure(2, -9, at=8), 3: failure(3, 1, at=7)}
    told = Failures.model_validate(describe(ChildFailedError("train.py", failures)))
    assert [failed.rank for failed in told.failures] == [3, 2, 1, 0]
    assert told.failures[1].exitcode == -9
    assert told.failures[1].pid == 102
    assert told.failures[1].message is None


def test_what_a_rank_left_in_its_error_file_is_handed_on(tmp_path: Path) -> None:
    message = {"message": "ValueError: no such sample", "extraInfo": {"py_callstack": "...", "timestamp": "5"}}
    left = tmp_path / "error.json"
    left.write_text(json.dumps({"message": message}))
    told = Failures.model_validate(
        describe(ChildFailedError("train.py", {0: failure(0, 1, at=5, error_file=str(left))}))
    )
    assert told.failures[0].message == "ValueError: no such sample"


def test_another_error_of_torchrun_names_itself() -> None:
    assert describe(RuntimeError("no\nrendezvous")) == {"error": "RuntimeError: no", "failures": []}


@pytest.mark.parametrize("depth", [1, 2, 3, 10**4])
def test_methods_are_named_as_torchruns_rendezvous_names_them(depth: int) -> None:
    def asked() -> tuple[str, str]:
        return dynamic_rendezvous.get_method_name(depth), method_name(depth)

    theirs, ours = asked()
    assert ours == theirs
