"""Exceptions as libraries raise them, and the class that each is given."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rollback.rundir.failures import class_of_exception, qualified_name


def saved_by_python() -> None:
    with open("/dev/full", "wb") as file:
        file.write(b"x")


def saved_by_numpy() -> None:
    with open("/dev/full", "wb") as file:
        np.save(file, np.zeros(10**5))


def saved_by_torch() -> None:
    torch.save(torch.zeros(10**6), "/dev/full")


def little_saved_by_torch() -> None:
    torch.save(0, "/dev/full")


@pytest.mark.parametrize("save", [saved_by_python, saved_by_numpy, saved_by_torch, little_saved_by_torch])
def test_what_is_raised_where_a_disk_is_full_is_known_as_such(save: Callable[[], None]) -> None:
    with pytest.raises((OSError, RuntimeError)) as full:
        save()
    assert class_of_exception(qualified_name(full.type), str(full.value)) == "disk"
