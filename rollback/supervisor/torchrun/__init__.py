"""torchrun on this host: its command line, its processes, its output."""
