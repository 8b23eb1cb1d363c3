"""The table of torchrun's flags against torchrun's own parser."""

from __future__ import annotations

import argparse

import pytest
from torch.distributed.run import get_args_parser

from rollback.config import Settings
from rollback.supervisor.flags import FLAGS, RENDEZVOUS, names_a_rendezvous


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
