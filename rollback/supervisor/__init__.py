"""Runs outside the ranks: starts torchrun, watches it, and decides what follows when it ends.

`torchrun` starts and ends the processes on this host, `diagnosis` finds out what ended an attempt, `nodes` has the
supervisors of other hosts.
"""
