"""Gradients: which came, their mean and norm over the ranks, and what accel changes in torch."""
