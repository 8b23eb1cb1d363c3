"""The data: cursors, the draw log, passes over the loader, skips, random states, loader workers."""
