"""Journals: what is recorded for good, what of it was verified, and the history that it amounts to."""
