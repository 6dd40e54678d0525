"""Published runs: read from a CSV, said as plans, and judged against what is predicted for them."""
