"""Runs outside the ranks: starts torchrun, watches it, and decides what follows when it ends.

    flags     torchrun's command line, as a table
    command   what torchrun is called with, and what the ranks find in their environment
    start_conditions  what an attempt is started with, and how that differs from the last start
    claim     the run directory: is it one, is it free, and how it is left untouched when a job is refused
    processes starting torchrun, finding and ending every process of an attempt
    torchrun  what runs in torchrun's process
    output    what the ranks print: into files for each attempt and rank, and to the terminal
    evidence  what the run directory and torchrun say about an attempt
    outcome   the table of how an attempt can have ended
    classify  the table of what can have ended it: first cause, apart from what followed
    hang      when a job hangs, and on which rank
    lookout   looking out for that, and what is done about it
    stacks    the stacks of ranks and loader workers before they are killed
    memory    whether the kernel's OOM killer struck
    budget    whether and when another attempt follows
    ledger    the supervisor's journal
    signals   being told to stop, and how urgently
    asked     being told so by a request in the run directory
    supervise the loop that ties these together

flags, command, outcome, classify, hang and budget are pure.
"""
