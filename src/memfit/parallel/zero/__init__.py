"""DeepSpeed's ZeRO: partitioned states, gradients and parameters."""
