"""`rollback why`: what ended an attempt."""
