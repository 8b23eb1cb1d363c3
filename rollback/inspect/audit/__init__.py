"""The audit: an account of what happened to a run. Writes nothing, and does not disturb a running run.

`contents` reads the run directory, `compile` (a pure function) makes the `AuditReport`, `text` shows it. Other views of
a run (a page, a table for a spreadsheet) are made from the report, not from the journals.
"""
