"""Checkpoints in the layouts of others: read where a run begins with one, written where a checkpoint is exported."""
