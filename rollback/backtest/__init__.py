"""What the sentinel and the policy would have done on a log that exists already."""
