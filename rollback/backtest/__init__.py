"""What the sentinel and the policy would have done on a log that exists already.

`read` turns a file into columns of numbers, `columns` finds the ones that matter, `replay` runs the sentinel over them
and asks the policy, `text` and `picture` show the result.
"""
