"""The Transformer in plain PyTorch, close to the papers, without devices or layouts."""
