"""Pickles read as data: what they say is seen, and nothing that they name is imported or called."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollback.checkpoints.outside.pickled import Named, read_pickled


class Trap:
    """What loading would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_a_pickle_says_is_seen_and_not_done(tmp_path: Path, protocol: int) -> None:
    shared = [1, 2]
    value = {"a": [1, -(2**40), 0.5, "é", None, True], (0, "b"): (shared, shared)}
    told = read_pickled(pickle.dumps([value, Trap(tmp_path / "made")], protocol))
    assert told[0]["a"] == value["a"]
    assert told[0][0, "b"] == (shared, shared)
    assert isinstance(told[1], Named)
    assert (told[1].name, told[1].arguments) == ("posix.mkdir", (str(tmp_path / "made"),))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_imported() -> None:
    code = (
        "import sys\nfrom rollback.checkpoints.outside.pickled import read_pickled as read\n"
        r"print(read(b'\x80\x02cantigravity\nfly\n.').name, 'antigravity' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["antigravity.fly", "False", "False"]


@pytest.mark.parametrize(
    "text",
    [
        b"", b"junk", b"\x80\x02", b"\x80\x02N", b"\x80\x02a.", b"\x80\x02h\x05.", b"\x80\x02(.", b"\x80\x02\x85.",
        b"\x80\x02\x82\x01.", b"\x80\x02K\x01K\x02R.", b"\x80\x02NNs.",
    ],
)  # fmt: skip
def test_what_is_no_sound_pickle_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        read_pickled(text)
