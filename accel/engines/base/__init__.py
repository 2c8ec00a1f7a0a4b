"""The code of all backends: the engine contract, its gradients and its holdings."""
