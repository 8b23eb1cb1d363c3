"""`rollback status`: what a run is doing now."""
