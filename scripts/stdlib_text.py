"""The demo's data set: the Python standard library's own sources, as bytes.

Every machine that can run the demo has this text already, so nothing is downloaded. `corrupt=True` gives the same
data set with two stretches of it gone bad, the way a broken shard of a real corpus is bad:

- *garbage*: random bytes. The loss jumps; worse, the large gradients stay in Adam's second moment for a long time;
- *non-finite weights*: good text, but one sample in eight weighs NaN or infinity.

`python scripts/stdlib_text.py` prints which samples are bad.
"""

import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # a DataLoader takes whatever has a length and items; its type says less
    from torch.utils.data import Dataset

    DataSet = Dataset[Any]
else:
    DataSet = object

WINDOW = 128  # bytes of context in a sample
SAMPLES = 24_000  # in the training set: 3 MB
HELD_OUT = 512  # samples for validation, from files that training never reads
GARBAGE = range(8_320, 9_984)  # data set indices: with 32 samples in a batch, 52 batches from 260 on
NON_FINITE_WEIGHTS = range(14_720, 14_848)  # 4 batches from 460 on


class StdlibText(DataSet):
    """Windows of Python source in one fixed, shuffled order.

    Item i is a pair: `WINDOW + 1` bytes as int64, and the sample's weight as float32. A data set needs nothing of
    torch but a length and items; a DataLoader makes tensors of them.
    """

    def __init__(self, *, held_out: bool = False, corrupt: bool = False) -> None:
        count = HELD_OUT if held_out else SAMPLES
        text = _sources(held_out, count * (WINDOW + 1))
        windows = text.reshape(count, WINDOW + 1)
        self.windows = windows[np.random.default_rng(0).permutation(count)]
        self.weights = np.ones(count, dtype=np.float32)
        if corrupt:
            noise = np.random.default_rng(1)
            self.windows[GARBAGE] = noise.integers(0, 256, (len(GARBAGE), WINDOW + 1), dtype=np.uint8)
            self.weights[NON_FINITE_WEIGHTS[::16]] = np.nan
            self.weights[NON_FINITE_WEIGHTS[8::16]] = np.inf

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.float32]:
        return self.windows[index].astype(np.int64), self.weights[index]


def _sources(held_out: bool, size: int) -> np.ndarray:
    """The first `size` bytes of the library's modules in the order of their names; every tenth file is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = {*below} - left_out  # what is installed is not walked through: it may be a hundred times as much
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    files.sort()
    chosen = [path for number, path in enumerate(files) if (number % 10 == 9) == held_out]
    text, read = [], 0
    for path in chosen:
        text.append(path.read_bytes())
        read += len(text[-1])
        if read >= size:
            return np.frombuffer(b"".join(text)[:size], dtype=np.uint8)
    raise SystemExit(f"{root} holds {read:,} bytes of Python source and the demo needs {size:,}")


if __name__ == "__main__":
    for name, bad in (("garbage", GARBAGE), ("non-finite weights", NON_FINITE_WEIGHTS)):
        print(f"{name}: samples {bad[0]} to {bad[-1]}")
