"""Learning rates over the steps of a run: a warm-up, then a schedule.

constant    ╱▔▔▔▔▔▔▔▔      linear  ╱╲          cosine  ╱▔╲
           ╱                      ╱  ╲▁               ╱   ╲▁
inverse_sqrt  ╱╲▁          wsd    ╱▔▔▔▔╲
             ╱   ▔▔▁             ╱      ╲▁
"""

from math import cos, pi, sqrt

from howdah.plan.method import LearningRate


def learning_rate(rate: LearningRate, *, step: int, steps: int) -> float:
    """The learning rate of `step` (counted from 0) in a run of `steps` steps.

    The warm-up rises by peak/warmup_steps a step and reaches the peak at step warmup_steps - 1.
    Decaying schedules reach min_ratio·peak at the last step, except inverse_sqrt, which is
    peak·√(warmup_steps / (step + 1)) (Vaswani et al. 2017). wsd is the warm-up, stable, decay
    schedule of https://arxiv.org/abs/2404.06395.
    """
    if step < rate.warmup_steps:
        return rate.peak * ((step + 1) / rate.warmup_steps)
    if rate.schedule == "constant":
        return rate.peak
    if rate.schedule == "inverse_sqrt":
        return rate.peak * sqrt(max(rate.warmup_steps, 1) / (step + 1))
    begin = rate.warmup_steps
    if rate.schedule == "wsd":
        begin = max(steps - rate.decay_steps, begin)
    done = min(max((step + 1 - begin) / max(steps - begin, 1), 0.0), 1.0)
    left = (1 + cos(pi * done)) / 2 if rate.schedule == "cosine" else 1 - done
    return rate.peak * (rate.min_ratio + (1 - rate.min_ratio) * left)
