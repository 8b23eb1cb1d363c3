"""From the ring that the ranks write to the durable one: what is copied when, and the thread that copies it."""
