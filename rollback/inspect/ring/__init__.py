"""`rollback ring`: lists, verifies and exports the checkpoints of a run."""
