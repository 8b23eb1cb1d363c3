"""A script without a guard, and without torch: `bare.py fail-twice|save|meet`."""

import os
import signal
import sys
import time
from pathlib import Path

RANK, START = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"start {START} of {os.environ['TORCHELASTIC_MAX_RESTARTS']} in {os.environ['TORCHELASTIC_RUN_ID']}", flush=True)


def save(number: int, frame: object) -> None:
    """Longer than the two seconds that nobody asks for."""
    time.sleep(3)
    print(f"rank {RANK} has saved on {signal.Signals(number).name}", flush=True)
    sys.exit(0)


match sys.argv[1]:
    case "fail-twice":
        sys.exit(START < 2)
    case "save":
        signal.signal(signal.SIGHUP, save if RANK == "0" else signal.SIG_DFL)
        Path(os.environ["NOTES"], f"waits-{RANK}").touch()
        time.sleep(60)
    case "meet":  # until another launch of the same script is there too
        Path(os.environ["NOTES"], f"here-{os.getpid()}").touch()
        while len(list(Path(os.environ["NOTES"]).glob("here-*"))) < 2:
            time.sleep(0.01)
