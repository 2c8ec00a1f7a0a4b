"""The code that all backends share: engines, gradients and holdings."""
