"""The code of all backends: engines, their gradients and holdings."""
