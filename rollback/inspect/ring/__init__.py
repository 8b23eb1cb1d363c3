"""`rollback ring`: the checkpoints of a run, listed, proved and exported."""
