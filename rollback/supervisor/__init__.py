"""Runs outside the ranks: starts torchrun, watches it, and decides what follows when it ends.

    supervise     one launch: the run directory, the nodes, the attempts
    attempts      watches an attempt, judges how it ended, starts the next one or ends the run
    claim         the run directory: whether it is a run and free, and leaving it untouched when a job is refused
    complete      whether a complete run has anything left to start
    hang_watch    looks for a hang while an attempt runs, and takes the stacks
    budget        whether and when another attempt follows; pure
    draining      the durable ring of a supervised run
    journal       the supervisor's journal
    signals       stop signals, and how urgent they are
    stop_request  stop requests in the run directory

`torchrun` starts and ends the processes on this host, `diagnosis` finds out what ended an attempt, `nodes` has the
supervisors of other hosts.
"""
