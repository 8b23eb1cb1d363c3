"""The audit: a run directory in, a ledger out. Writes nothing; safe to use on a running run.

`reading` reads, `compile` (a pure function) makes the `AuditReport`, `text` shows it. Whoever wants another view of a
run (a page, a table for a spreadsheet) starts from the report, never from the journals.
"""

from __future__ import annotations

from rollback.inspect.audit.compile import compile_ledger
from rollback.inspect.audit.reading import Material, read_material
from rollback.inspect.audit.report import AuditReport

__all__ = ["AuditReport", "Material", "compile_ledger", "read_material"]
