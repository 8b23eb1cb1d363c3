"""The durable ring: what is copied when, what copies it, on this host and on others, and the URL."""
