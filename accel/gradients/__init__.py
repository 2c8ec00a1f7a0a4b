"""Writes, means and norms of gradients, and accel's patches of torch."""
