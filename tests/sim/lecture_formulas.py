"""The lectures' formulas: what training takes, from a number of parameters and tokens alone.

They know no table of weights, no list of messages and no plan: what the program says of a plan is
held against them.
"""

from math import ceil


def rough_flops(parameters, tokens):
    """6·P·T: the floating-point operations of a training run, without attention's scores.

    Kaplan et al. 2020, arXiv 2001.08361, section 2.1.
    """
    return 6 * parameters * tokens


def devices_needed(flops, *, attained, days):
    """Number of devices that compute `flops` in `days`, at `attained` FLOP/s each; not rounded."""
    return flops / (attained * days * 86400)


def throughput(attained, *, devices, parameters, scaling=1.0, batch=1.0):
    """Batches of `batch` tokens per second; with the default batch of 1, tokens per second.

    It is the speed of one device (`attained` FLOP/s) x devices x the efficiency of `scaling`,
    divided by the 6·P operations of each token of a batch.
    """
    return attained * devices * scaling / rough_flops(parameters, batch)


def gradient_bytes(parameters, *, replicas, width=4):
    """Bytes of the gradients of all replicas in one step, with `width` bytes for each element."""
    return parameters * replicas * width


def devices_to_hold(parameters, *, memory, width=2):
    """Number of devices, each with `memory` bytes, that hold weights of `width` bytes each."""
    return ceil(parameters * width / memory)


def expert_share(total, active, *, experts, chosen=1, ep=1):
    """Parameters on each of `ep` ranks that share the experts, from the two published totals.

    A token uses `chosen` of `experts` equal experts and everything else: the difference of the
    totals is the experts that it does not use.
    """
    each = (total - active) / (experts - chosen)
    return total - each * experts * (1 - 1 / ep)
