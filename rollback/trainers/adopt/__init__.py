"""`rollback launch --adopt`: a guard for a script that knows nothing of it, made of what is seen while it runs.

`script` runs the user's script in the rank, `hooks` watches what it makes and calls, `adoption` decides. `objects` and
`plan` find what is trained, `losses` what the guard is told, `signs` ends the ranks together or says what is not exact,
`sources` reads the user's files, `epochs` steers the script's loop over epochs.
"""
