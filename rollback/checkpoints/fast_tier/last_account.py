"""Accounts: what each rank made of the last snapshot, for the supervisor and the next start.

They lie beside the end marks (`end_marks`), and the next attempt removes them.
"""

from pydantic import BaseModel

from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.small_json import sound_model

_LIMIT = 4 << 20


class LastAccount(BaseModel, frozen=True):
    """What a rank made of the last snapshot."""

    attempt: int
    rank: int
    reason: str
    """Why there was one to make."""
    checkpoint: str | None = None
    """The checkpoint; None: this rank made none."""
    step: int | None = None
    tier: str = "fast"
    seconds: float = 0.0
    why_not: str | None = None
    metrics: tuple[str, ...] = ()
    """The newest lines of the metrics, which rank 0 may not have written any more."""


def write_account(paths: EndMarkPaths, account: LastAccount) -> None:
    """Raises OSError."""
    write_file(paths.account(account.rank), account.model_dump_json().encode(), durable=False)


def read_accounts(paths: EndMarkPaths, attempt: int | None = None) -> list[LastAccount]:
    """What the ranks made of the last snapshot of an attempt (default: of the newest), by rank."""
    found = [sound_model(path, LastAccount, _LIMIT) for path in sorted(paths.root.glob("account-*"))]
    return [account for account in found if account is not None and attempt in (None, account.attempt)]


def forget_accounts(paths: EndMarkPaths, attempt: int) -> None:
    """Remove those of an attempt of this number. Raises OSError."""
    for account in read_accounts(paths, attempt):
        files.unlink(paths.account(account.rank))
