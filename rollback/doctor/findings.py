"""What a finding is."""

from functools import partial
from typing import Literal

from pydantic import Field

from rollback.errors import ExitCode
from rollback.inspect.document import Document, ReportItem
from rollback.terminal import quantities

Level = Literal["ok", "warn", "fail"]


class Finding(ReportItem):
    topic: str
    level: Level = Field(description="warn: a promise is weaker than it could be; fail: it cannot be kept")
    found: str
    fix: str | None = Field(None, description="what to do about it")


def ok(topic: str, found: str) -> Finding:
    return Finding(topic=topic, level="ok", found=found)


def warn(topic: str, found: str, fix: str) -> Finding:
    return Finding(topic=topic, level="warn", found=found, fix=fix)


def fail(topic: str, found: str, fix: str) -> Finding:
    return Finding(topic=topic, level="fail", found=found, fix=fix)


class DoctorReport(Document):
    """Schema of `rollback doctor --json`, version 1; conventions as in the audit."""

    host: str
    run: str = Field(description="the run directory that it is about; it need not exist")
    state_bytes: int | None = Field(description="of a checkpoint, all ranks together; null: not known")
    ranks: int | None = Field(description="on this host; null: not known")
    findings: list[Finding]

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.FAILED if any(finding.level == "fail" for finding in self.findings) else ExitCode.DONE


size = partial(quantities.size, least="bytes")
