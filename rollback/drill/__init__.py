"""`rollback drill`: planned faults on the user's own job, each in a run directory of its own, and what became of them.

The faults strike inside the ranks: `rollback.train.drill`. What the two say to each other: `rollback.rundir.exercise`.
"""
