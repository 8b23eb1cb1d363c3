"""The record of a run on disk: what ranks and supervisor share. See docs/format.md."""
