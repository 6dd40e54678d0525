"""Learning rates over the steps of a run: a warm-up and then a shape.

constant    ╱▔▔▔▔▔▔▔▔      linear  ╱╲          cosine  ╱▔╲
           ╱                      ╱  ╲▁               ╱   ╲▁
inverse_sqrt  ╱╲▁          wsd    ╱▔▔▔▔╲
             ╱   ▔▔▁             ╱      ╲▁
"""

from math import cos, pi, sqrt

from howdah.plan.method import Rate


def learning_rate(rate: Rate, *, step: int, steps: int) -> float:
    """The learning rate of `step` (counted from 0) in a run of `steps`.

    The warm-up rises by peak/warmup a step and reaches the peak at step warmup - 1. Decaying
    shapes reach floor·peak at the last step. inverse_sqrt is peak·√(warmup / (step + 1))
    (Vaswani et al. 2017); wsd is the warm-up, stable, decay of https://arxiv.org/abs/2404.06395.
    """
    if step < rate.warmup:
        return rate.peak * ((step + 1) / rate.warmup)
    if rate.shape == "constant":
        return rate.peak
    if rate.shape == "inverse_sqrt":
        return rate.peak * sqrt(max(rate.warmup, 1) / (step + 1))
    begin = max(steps - rate.decay, rate.warmup) if rate.shape == "wsd" else rate.warmup
    done = min(max((step + 1 - begin) / max(steps - begin, 1), 0.0), 1.0)
    left = (1 + cos(pi * done)) / 2 if rate.shape == "cosine" else 1 - done
    return rate.peak * (rate.floor + (1 - rate.floor) * left)
