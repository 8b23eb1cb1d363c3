"""`rollback status`: the present state of a run."""
