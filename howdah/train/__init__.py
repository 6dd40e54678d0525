"""The training loop, and what a run does before, between and after its steps."""
