"""Optimizers on pieces of tensors, learning rates and clipping."""
