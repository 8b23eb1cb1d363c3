"""What a guard is made with: refusals in their order, and what it keeps of where it is made."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rollback
from rollback.errors import UsageError


def guard(run: Path, **others: Any) -> rollback.Guard:
    model = nn.Linear(4, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "loader": [], "run": run}
    return rollback.Guard(**given | others)


def test_a_setting_that_cannot_be_is_refused_before_the_loader_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="probation=3 is no longer than"):
        guard(tmp_path / "run", probation=3, loader=object())


def test_a_guard_that_is_made_in_an_except_block_keeps_nothing_of_it(tmp_path: Path) -> None:
    class Large:
        """Something that a frame holds."""

    def fails() -> weakref.ref[Large]:
        large = Large()
        found.append(weakref.ref(large))
        raise ImportError("a library that is not there")

    found: list[weakref.ref[Large]] = []
    try:
        fails()
    except ImportError:
        made = guard(tmp_path / "run")
    assert found[0]() is None
    made.close()
