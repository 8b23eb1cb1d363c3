"""For all tests: one thread in each process, so that sums are added in the same order wherever a job runs."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported here, and for the processes that tests start
os.environ["ROLLBACK_FAST_TIER"] = "off"  # unless a test says otherwise: most look into the run directory's ring
