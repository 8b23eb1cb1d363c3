"""`rollback drill`: planned faults on the user's own job, each in a run directory of its own, and what became of them.

    faults    the table of faults, and what is expected of each
    plan      how long the runs are and when a fault strikes, from the job's pace
    trials    one run of the job under `rollback launch`, and everything that it left
    judge     what became of a fault: a pure function of what the runs left
    drill     which runs there are, in which order, and what can be compared with what
    text      the table for people

The faults strike inside the ranks: `rollback.train.drill`. What the two say to each other: `rollback.rundir.exercise`.
"""
