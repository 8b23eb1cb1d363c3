"""Inside the ranks: the guard, and a room for each of its concerns."""
