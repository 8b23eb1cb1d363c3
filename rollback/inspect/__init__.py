"""Reads runs and writes nothing: a room for each command that does."""
