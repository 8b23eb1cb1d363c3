"""The conditions of a start that may change what is trained, and how they differ from those of the last start.

Only environment variables that are known to matter are recorded. Secrets are recorded nowhere (`redaction`).
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rollback.config import Settings
from rollback.facts.training import AttemptStarted
from rollback.supervisor.torchrun.command import LaunchedJob
from rollback.supervisor.torchrun.redaction import is_secret, redacted, without_digests, without_secrets

_MATTERS = re.compile(
    r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_(DEVICE_ORDER|LAUNCH_BLOCKING)|(OMP|MKL)_NUM_THREADS|PYTHONHASHSEED"
    r"|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE|(NCCL|GLOO|TORCH|PYTORCH|CUDNN|ROLLBACK)_.*"
)
_SHOWN = 80  # characters of a value
_LARGEST = 64 << 20  # bytes of a script
_ASKED = ("module", "no-python", "nproc-per-node", "nnodes")  # of torchrun's flags; others say how to get there
_READ = 1 << 20  # bytes: a larger file that a command line names is data, and is known by its size and time


def conditions_of(job: LaunchedJob, environment: Mapping[str, str], salt: str | None = None) -> dict[str, Any]:
    """Fields of `AttemptStarted`. environment: the supervisor's. salt: the run's."""
    return {
        "script": script_digest(job),
        "arguments": redacted(job.arguments, job.secret_args, salt),
        "flags": {name: "given" if value is True else str(value) for name, value in _asked(job).items()}
        | ({"adopt": job.runner[-1]} if job.runner else {}),
        "salt": salt,
        "environment": {
            name: without_secrets(value, salt)
            for name, value in sorted(environment.items())
            if _MATTERS.fullmatch(name) and not is_secret(name)
        },
    }


def _asked(job: LaunchedJob) -> dict[str, str | bool]:
    return {name: value for name, value in job.flags.items() if name in _ASKED}


def job_digest(job: LaunchedJob, settings: Settings, salt: str | None) -> str:
    """A hash over script, arguments, settings, and the content of the files that they name.

    salt: the run's, for secret values.
    """
    words = [job.script, *job.arguments]
    asked = [redacted(words, job.secret_args, salt), _asked(job), settings.model_dump(mode="json", exclude_unset=True)]
    found = xxhash.xxh3_128(json.dumps(asked, sort_keys=True).encode())
    for word in words:
        found.update(_content(Path(word.rpartition("=")[2])))
    return found.hexdigest()


def _content(path: Path) -> bytes:
    try:
        status = os.stat(path)
        if path.is_file() and status.st_size <= _READ:
            return path.read_bytes()
        return f"{status.st_size} {status.st_mtime_ns}".encode() if path.is_file() else b""
    except OSError:
        return b""


def script_digest(job: LaunchedJob) -> str | None:
    """A hash of the script's content; None where it has no readable file."""
    try:
        path = _path_of(job)
        if path is None or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    except OSError:
        return None


def _path_of(job: LaunchedJob) -> Path | None:
    if job.flags.get("module"):  # not by importlib, which would import the packages that it is in
        stem = Path(*job.script.split("."))
        return next((path for path in (stem.with_suffix(".py"), stem / "__main__.py") if path.is_file()), None)
    if job.flags.get("no-python") and os.sep not in job.script:
        found = shutil.which(job.script)
        return Path(found) if found else None
    return Path(job.script)


def differences(before: AttemptStarted | None, now: AttemptStarted) -> tuple[str, ...]:
    """The differences from the start before, in words. Nothing where that start has no conditions on record."""
    if before is None or before.arguments is None or now.arguments is None:
        return ()
    same_salt = before.salt == now.salt
    told = _changed(_by_name(before.arguments), _by_name(now.arguments), "argument {}", "not given", same_salt)
    if before.flags is not None and now.flags is not None:
        told += _changed(before.flags, now.flags, "--{}", "not given", same_salt)
    told += _changed(before.environment or {}, now.environment or {}, "{}", "not set", same_salt)
    if before.script is not None and now.script is not None and before.script != now.script:
        told.append("the script has other content")
    return tuple(told)


def _changed(before: Mapping[str, str], now: Mapping[str, str], label: str, absent: str, same_salt: bool) -> list[str]:
    if not same_salt:  # what is hidden cannot be compared
        before, now = ({name: without_digests(value) for name, value in one.items()} for one in (before, now))
    return [
        f"{label.format(name)}: {_short(before.get(name, absent))} -> {_short(now.get(name, absent))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _by_name(arguments: Sequence[str]) -> dict[str, str]:
    """The values of a command line by option, else by position. An option that comes twice has all its values."""
    found: dict[str, list[str]] = {}
    option: str | None = None
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if re.match(r"-+[^\d.]", argument) and not equals:
            option = argument
            found.setdefault(option, [])
        elif equals:
            found.setdefault(name, []).append(value)
            option = None
        else:
            found.setdefault(option or str(sum(key.isdecimal() for key in found) + 1), []).append(argument)
            option = None
    return {name: " ".join(values) or "given" for name, values in found.items()}


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[: _SHOWN - 3]}..."
