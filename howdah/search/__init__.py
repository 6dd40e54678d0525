"""What to change: plans near one that does not fit, cuts of stages and of sequences."""
