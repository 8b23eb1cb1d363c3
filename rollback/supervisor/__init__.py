"""Runs outside the ranks: starts torchrun, watches it, and decides what follows when it ends.

    supervise         one launch: the run directory, the nodes, the attempts
    attempts          watch an attempt, judge how it ended, start the next or end the run
    claim             the run directory: is it one, is it free, and how it is left untouched when a job is refused
    complete          a run that has been trained to its end
    flags             torchrun's command line, as a table
    command           what torchrun is called with, and what the ranks find in their environment
    start_conditions  what an attempt is started with, and how that differs from the last start
    redaction         what looks like a secret is written nowhere
    host              attempts on this host
    processes         starting torchrun, finding and ending every process of an attempt
    standby           the torchrun process of the next attempt, started ahead
    output            what the ranks print: into files for each attempt and rank, and to the terminal
    hang_watch        looking out for a hang while an attempt runs, and what is done about one
    budget            whether and when another attempt follows
    draining          the durable ring of a supervised run
    journal           the supervisor's journal
    signals           being told to stop, and how urgently
    stop_request      being told so by a request in the run directory

What ended an attempt is found out in `diagnosis`; many supervisors of one job are in `nodes`. flags, command and budget
are pure.
"""
