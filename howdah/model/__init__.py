"""Plain PyTorch that reads like the papers and knows nothing of devices or layouts."""
