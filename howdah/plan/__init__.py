"""Plans: which rank holds and computes what. Plain data and arithmetic, without torch."""
