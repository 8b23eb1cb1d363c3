"""The operator's side of a running job: looks before it asks, hands in the request, and waits for the ranks' answer."""
