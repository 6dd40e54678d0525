"""Method: what changes the mathematics of a run, as plain data.

A Layout keeps the result; a Method is part of it. Two runs with the same model, data, seed and
Method agree on every layout; change the Method and they are different trainings.
"""

from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["float32", "bf16", "float64"]

# What each optimizer keeps for every element, in torch's words; they name checkpoint pieces too.
STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "rmsprop": ("square_avg", "momentum_buffer"),
}


@dataclass(frozen=True)
class LearningRate:
    """The learning rate over the steps of a run: a linear warm-up, then a schedule.

    peak          the highest rate
    warmup_steps  steps of linear rise from 0
    schedule      constant; linear or cosine down to min_ratio·peak at the last step; inverse_sqrt;
                  wsd (warm-up, stable, decay): constant, then linear over the last decay_steps
    min_ratio     the fraction of the peak that is left at the end
    decay_steps   steps of decay of the wsd schedule
    """

    peak: float = 1e-3
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    min_ratio: float = 0.1
    decay_steps: int = 0


@dataclass(frozen=True)
class Optimizer:
    """Which optimizer, with its constants.

    name          adamw, adam (decay as L2), sgd (momentum) or rmsprop
    betas         of the first and second moment (adam, adamw); rmsprop uses the second
    momentum      of sgd and rmsprop
    epsilon       added outside the root
    weight_decay  for the weights that the table of weights marks
    """

    name: Literal["adamw", "adam", "sgd", "rmsprop"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    @property
    def states(self) -> tuple[str, ...]:
        """What it keeps for every element; without momentum there is no momentum buffer."""
        names = STATES[self.name]
        if self.name in ("sgd", "rmsprop") and self.momentum == 0:
            return tuple(name for name in names if name != "momentum_buffer")
        return names


@dataclass(frozen=True)
class Method:
    """Precision, optimizer, learning rate, dropout, and what is added to plain cross-entropy.

    precision  of weights and compute. bf16 keeps float32 master weights, moments and gradients.
    lr         the learning rate
    grad_clip  the largest global gradient norm; 0 does not clip
    dropout    the fraction of activations set to zero, in the residual stream
    label_smoothing   ε: each label is 1 - ε of what is to be predicted, all V entries of the
                      vocabulary together are ε. The loss of a token with logits x and their
                      log-sum-exp L is L - (1 - ε)·x_label - ε/V·Σⱼ xⱼ
    z_loss            z: a token's loss has z·L² more, which holds L near zero

    Losses are summed over tokens and divided once, by the tokens of the global batch.
    """

    precision: Precision = "float32"
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr: LearningRate = field(default_factory=LearningRate)
    grad_clip: float = 1.0
    dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
