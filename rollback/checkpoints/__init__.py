"""A checkpoint as bytes (`format`), in the memory of a host (`fast_tier`) and in the run directory (`ring`), in files of
other tools (`outside`); where all lie (`tiers`), which ones stay. What goes to a URL is in `rollback.ring`."""
