"""What all backends share: the engine contract, its gradients and its holdings."""
