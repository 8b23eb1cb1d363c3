"""A toy run with a ring whose wall clock jumps while it trains: `jumping.py FOLDER`.

To be started under libfaketime, with the file FAKETIME_TIMESTAMP_FILE in FOLDER.
"""

import json
import os
import sys
import time
from pathlib import Path

from toy import Toy, train

TOY = Toy(samples=160, settings={"snapshot_every": 5})
JUMPS = {8: "-400d", 16: "+400d", 24: "-30d"}


def main() -> None:
    folder = Path(sys.argv[1])
    clock = Path(os.environ["FAKETIME_TIMESTAMP_FILE"])
    seen = []

    def jump(_guard: object, position: int) -> None:
        if position in JUMPS:
            clock.write_text(JUMPS[position])
            seen.append(time.time())

    toy = TOY.with_settings(ring=f"file://{folder}/ring")
    (folder / "portrait.json").write_text(json.dumps(train(toy, folder / "run", hook=jump)))
    assert max(seen) - min(seen) > 700 * 86400, "the clock did not jump"


if __name__ == "__main__":
    main()
