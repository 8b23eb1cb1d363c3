"""The last snapshot: what the ranks that live keep of the state when another one is gone."""
