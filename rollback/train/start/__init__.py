"""A guard's start: its arguments, attaching to the run, and what a start adds to the record."""
