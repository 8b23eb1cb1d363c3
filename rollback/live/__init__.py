"""A run as it goes on, for the person who watches: one panel on a terminal, plain lines elsewhere.

Reads the run directory as `rollback status` does, and writes nothing into it.
"""
