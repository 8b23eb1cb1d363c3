"""Between the ranks: the pulse, the few blocking collectives, and the recorder on rank 0."""
