"""`rollback launch --adopt`: a guard for a script that knows nothing of it, made of what is seen while it runs.

`script` runs the user's script in the rank, `hooks` watches what it makes and calls, `adoption` decides, `objects`
finds what is trained, `sources` reads the user's files, `epochs` steers the script's loop over epochs. What a guard
could not keep exact is refused by name.
"""
