"""What the URL of a ring may be: one that fsspec knows, without credentials in it."""

import re
from urllib.parse import unquote, urlsplit

from rollback.errors import UsageError

# What stands before an @ is a user or a container, no key.
_USERS = {"sftp", "ssh", "abfs", "abfss", "hdfs"}
_OF_ONE_PROCESS = {"memory"}


def require_url(url: str) -> None:
    """Raise UsageError unless `url` can be a ring: a protocol that fsspec knows, and no credentials inside."""
    import fsspec

    require_no_credentials(url)
    none = UsageError(f"the ring {url!r} is not a URL", hint="write PROTOCOL://PLACE, for example s3://bucket/runs/one")
    try:
        parts = urlsplit(url)
    except ValueError as error:  # a bracket without the other one
        raise none from error
    protocol = parts.scheme
    if not protocol or "://" not in url:
        raise none
    if not (parts.netloc + parts.path).strip("/"):
        raise UsageError(f"the ring {url!r} names no place", hint="for example s3://bucket/runs/one")
    if protocol in _OF_ONE_PROCESS:
        raise UsageError(
            f"the ring {url!r} is in the memory of each process by itself: no other process would find it",
            hint="checkpoints in this host's memory are kept without a ring (--fast-tier); for tests, file:///PLACE",
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except Exception as error:  # what that package needs in turn may be of another version, and raise anything
        if protocol not in fsspec.available_protocols():
            raise UsageError(
                f"the ring {url!r}: no file system is known by the protocol {protocol!r}",
                hint="s3, gs, abfs, file and sftp are among those that fsspec knows",
            ) from error
        raise UsageError(
            f"the ring {url!r} needs a package that cannot be imported: {error}",
            hint="s3fs for s3, gcsfs for gs, adlfs for abfs; for S3 also: pip install 'torch-rollback[s3]'",
        ) from error


def require_no_credentials(url: str) -> None:
    """Raise UsageError where a URL, or one of a chain (`one::other://...`), contains credentials or a place for them.

    The error does not repeat them.
    """
    protocol = ""
    for part in re.split(r"::|://", url):
        user, at, _ = re.split(r"[/?#]", part.lstrip("/"), maxsplit=1)[0].rpartition("@")
        if at and (":" in unquote(user) or not (protocol in _USERS or part.startswith("/"))):
            shown = re.sub(r"[^/:@]*(:[^/@]*)?@", "…@", _without_fields(url))
            raise UsageError(
                f"the ring {shown} names credentials, and the URL is written into the run's record",
                hint="leave them to the environment or to fsspec's configuration files",
            )
        protocol = part
    if set(unquote(url)) & {"?", "#"}:
        raise UsageError(
            f"the ring {_without_fields(url)} has a query or a fragment, and the URL is written into the run's record",
            hint="leave credentials and options to the environment or to fsspec's configuration files",
        )


def _without_fields(url: str) -> str:
    return re.split(r"[?#]|%3[fF]|%23", url, maxsplit=1)[0]
