"""What `bench_stability.py` is made of: the text, the model and its loop, the arms, the troubles, table and plot."""
