"""The audit: an account of what happened to a run. Writes nothing, and does not disturb a running run.

`reading` reads the run directory, `compile` (a pure function) makes the `AuditReport`, `text` shows it. Other views of
a run (a page, a table for a spreadsheet) are made from the report, not from the journals.
"""

from rollback.inspect.audit.compile import compile_ledger
from rollback.inspect.audit.reading import Material, read_material
from rollback.inspect.audit.report import AuditReport

__all__ = ["AuditReport", "Material", "compile_ledger", "read_material"]
