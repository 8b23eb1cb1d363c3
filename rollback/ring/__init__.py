"""The durable ring: what is copied when, the thread that copies it, its helpers on other hosts, and the URL."""
