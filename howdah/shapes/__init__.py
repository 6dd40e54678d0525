"""What a model is: sizes, weights, products, saved tensors, presets, and the names of others."""
