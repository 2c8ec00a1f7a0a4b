"""Gradients: which came, when they are final, and the step."""
