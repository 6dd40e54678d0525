"""Optimizers on ranges of flat buffers, learning-rate schedules and gradient clipping."""
