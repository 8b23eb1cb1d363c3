"""Everything that is looked at, for one run."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path

from rollback.checkpoints.fast_tier.sizing import bytes_of_tier
from rollback.checkpoints.tiers import base_of, fast_tier_of, host_count, locate
from rollback.config import Settings
from rollback.doctor.findings import DoctorReport, Finding, fail
from rollback.doctor.machine import (
    judge_cores,
    judge_python,
    look_at_clock,
    look_at_limits,
    look_at_temporary_files,
    look_at_torch,
)
from rollback.doctor.storage import judge_save, look_at_disk, look_at_fast_tier, look_at_ring
from rollback.errors import RollbackError
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import RunPaths
from rollback.system.cgroups import usable_cores


def examine(
    run: Path,
    *,
    ring: str | None = None,
    state_bytes: int | None = None,
    ranks: int | None = None,
    keep: int | None = None,
    grace: float,
    base: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> DoctorReport:
    """Look at everything; takes some seconds. Writes to the disk and the ring, and removes it again. Never raises for
    what it finds: that becomes a finding.

    run: the run's directory, which need not exist. state_bytes, ranks (of a host): where not given, that run's.
    base: of fast tiers (default: as for a launch). tell: takes what is looked at next.
    """
    paths = RunPaths(run)
    findings: list[Finding] = []
    here = None
    try:
        identity = read_identity(paths)
        hosts = max(1, host_count(paths))
        ranks = ranks or (-(-identity.job.world_size // hosts) if identity else None)
        if state_bytes is None and (found := locate(paths)):
            sizes = sorted(shard.size for shard in found[-1].manifest.shards)
            state_bytes = sum(sizes)
            here = sum(sizes[-ranks:]) if ranks else None  # what the ranks of one host store of it at the most
        tier = fast_tier_of(paths)
        held = bytes_of_tier(tier.root) if tier else 0
    except (RollbackError, OSError) as error:
        held = 0
        findings.append(fail("run", str(error), "name another one with --run DIR"))
    keep = keep or Settings().keep
    findings.append(judge_python(sys.version_info[:3]))
    tell("torch")
    findings.append(look_at_torch())
    findings.append(look_at_fast_tier(base or base_of("auto"), here or state_bytes, keep, held=held))
    tell("the run directory's disk")
    about_disk, rate = look_at_disk(paths.root, state_bytes, keep)
    findings += about_disk
    saves = [judge_save(state_bytes, rate, grace, "disk")]
    if ring is not None:
        tell("the ring")
        about_ring, ring_rate = look_at_ring(ring)
        findings.append(about_ring)
        saves.append(judge_save(state_bytes, ring_rate, grace, "ring"))
    findings += [finding for finding in saves if finding is not None]
    findings += [judge_cores(usable_cores(), ranks), look_at_limits(), look_at_temporary_files(), look_at_clock()]
    return DoctorReport(
        host=socket.gethostname(),
        run=str(run),
        state_bytes=state_bytes,
        ranks=ranks,
        findings=findings,
    )
