"""Pipeline schedules as plain data: the actions of every rank, in order. One module per family.

Symbols in the docstrings: p pipeline ranks, r the index of one of them, m micro-batches, v stages
on each rank; F, B, I and W are the times of a rank's actions for one micro-batch.
"""
