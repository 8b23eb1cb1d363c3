"""A toy run on a disk that becomes read-only while it trains: `mounted.py DISK BATCH OUTPUT`.

To be started where it may change mounts (`apart.py mounts`). DISK is one (tmpfs).
"""

import json
import subprocess
import sys
from pathlib import Path

from toy import Toy, train

TOY = Toy(samples=112, settings={"snapshot_every": 5})


def main() -> None:
    disk, batch, output = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

    def make_read_only(_guard: object, position: int) -> None:
        if position == batch:
            # A disk with files that are open for writing cannot be made read-only. Another mount in its place can: what
            # is open stays writable, and nothing new can be made, renamed or removed.
            subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)

    output.write_text(json.dumps(train(TOY, disk / "run", hook=make_read_only)))
    print("checkpoints:", *sorted(path.name for path in (disk / "run" / "ring").iterdir()))


if __name__ == "__main__":
    main()
