"""Reads runs and writes nothing. Each reading command has a room."""
