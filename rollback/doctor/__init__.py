"""`rollback doctor`: can this machine keep the promises? Measures, and judges what it has measured.

    findings  what a finding is
    storage   the run directory's disk, and a ring at a URL
    memory    room for the fast tier
    machine   torch, cores, limits, the clock
    examine   all of it, for one run
    text      for people

Whatever is written to be measured is removed again. Judgements are pure functions of what was measured.
"""
