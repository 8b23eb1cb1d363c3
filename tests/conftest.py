"""For all tests: one thread in each process, so that sums are added in the same order wherever a job runs."""

from __future__ import annotations

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported here, and for the processes that tests start
os.environ["ROLLBACK_FAST_TIER"] = "off"  # unless a test says otherwise: most look into the run directory's ring

# A shell that starts the tests in the background has them ignore these, and every process of theirs would as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
