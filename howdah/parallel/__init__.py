"""Forms of parallelism, each done to a plain model from outside, in one visible order."""
