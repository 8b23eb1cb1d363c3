"""`rollback why`: what an attempt died of."""
