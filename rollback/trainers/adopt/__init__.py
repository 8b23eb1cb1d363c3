"""`rollback launch --adopt`: a guard for a script that knows nothing of it, made of what is seen while it runs."""
