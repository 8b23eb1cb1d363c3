"""The sentinel: says of each step whether training is healthy, on watch, spiking or not finite."""

from __future__ import annotations

from rollback.sentinel.machine import Sensitivity, Sentinel
from rollback.sentinel.verdict import Blip, Hint, Kind, Observation, Verdict

__all__ = ["Blip", "Hint", "Kind", "Observation", "Sensitivity", "Sentinel", "Verdict"]
