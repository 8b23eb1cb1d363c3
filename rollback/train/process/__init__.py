"""The rank as a process: its heartbeat, its failure record, being told to stop."""
