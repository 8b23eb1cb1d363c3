"""A checkpoint as bytes, where it lies (slots of the fast tier, the run directory), and which one stays. What goes to a
URL is in `rollback.ring`."""
