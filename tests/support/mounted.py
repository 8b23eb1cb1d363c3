"""A toy run on a disk of its own that becomes read-only while it trains: `mounted.py DISK BATCH OUTPUT`.

To be started in a mount namespace of its own (`unshare --mount`), since it mounts a disk (tmpfs) at DISK.
"""

import json
import subprocess
import sys
from pathlib import Path

from toy import Toy, train

TOY = Toy(samples=160, settings={"snapshot_every": 5})


def main() -> None:
    disk, batch, output = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "rollback-test", str(disk)], check=True)

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
