"""From files to batches: sources, tokens, order, micro-batches, as plain arrays."""
