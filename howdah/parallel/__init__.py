"""Forms of parallelism, each applied to a plain model from outside, in one visible order."""
