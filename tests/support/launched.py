"""The options of a launch, as a test wants them."""

from dataclasses import replace
from typing import Any

from rollback.config import Settings
from rollback.rundir.paths import RunPaths
from rollback.supervisor.diagnosis.hang import HangLimits
from rollback.supervisor.torchrun.command import LaunchedJob, LaunchOptions


def launched(paths: RunPaths, job: LaunchedJob, **other: Any) -> LaunchOptions:
    """other: options that are not those of a short launch on one node."""
    options = LaunchOptions(
        paths, job, Settings(), restart_budget=0, grace=1.0, hang=HangLimits(), node_timeout=60.0, spare_nodes=0,
        replicas=1, preload=False, expects_guard=False,
    )  # fmt: skip
    return replace(options, **other)
