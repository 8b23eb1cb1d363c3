"""A checkpoint as bytes (`format`), in a host's memory (`fast_tier`), in the run directory (`ring`), in files of other
tools (`outside`); in which tiers all lie (`tiers`), and which ones stay. What goes to a URL is in `rollback.ring`."""
