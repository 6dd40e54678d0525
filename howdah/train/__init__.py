"""The loop and what surrounds it."""
