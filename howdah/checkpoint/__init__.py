"""Checkpoints: pieces of tensors to files and back, for any layout."""
