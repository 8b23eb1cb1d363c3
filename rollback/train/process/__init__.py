"""The rank as a process: its heartbeat, its failure record, its stop signals."""
