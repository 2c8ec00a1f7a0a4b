"""Gradients: their writes, means and norms over the ranks, and accel's patches of torch."""
