"""From text files to batches: sources, token cache, sample order, micro-batches as NumPy arrays."""
