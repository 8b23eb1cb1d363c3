"""Likely mistakes in the script, seen from inside. An advice is said once for each run and is never an incident."""

from __future__ import annotations

PLAIN_EPOCH_LOOP = (
    "plain-epoch-loop",
    "the script counts its epochs itself: when the run resumes in epoch 3, the loop body runs with no batches for "
    "epochs 0 to 2 first. `for epoch in guard.epochs(n):` begins where the run stands",
)
