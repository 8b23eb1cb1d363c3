"""What ended an attempt, and whether a job hangs: evidence in, a finding out. Ends and starts nothing.

    evidence      what the run directory and torchrun say about an attempt
    outcome       the table of how an attempt can have ended
    first_cause   the table of what can have ended it, and the rank with which it began, apart from what followed
    blamed_data   whether a batch, or a sample in it, is to blame
    hang          when a job hangs, and on which rank
    stacks        the stacks of ranks and loader workers before they are killed
    memory        whether the kernel's OOM killer struck

outcome, first_cause, blamed_data and hang are pure.
"""
