"""Method: the choices that change the mathematics of a run, as plain data.

A Layout does not change the result of training; a Method does. Two runs with the same model, data,
seed and Method agree on every layout.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from howdah.base.bounds import Bound, NotNegative, Positive, Share, Steps

Precision = Literal["float32", "bf16", "float64", "fp16", "fp8", "mxfp8", "nvfp4"]
LOW: tuple[Precision, ...] = ("fp8", "mxfp8", "nvfp4")  # of linear layers; the rest is in bf16
PLANNED: tuple[Precision, ...] = ("fp16", "mxfp8", "nvfp4")  # and not run yet

SENTINELS = 100  # tokens that stand for spans, of T5's tokenizers and of those trained here

# The states that each optimizer keeps for every element, by torch's names, as in checkpoints.
STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "rmsprop": ("square_avg", "momentum_buffer"),
}
LATE = "late_gradient"  # and of an update that is one step late
AVERAGE = "average"  # and of the weights, over the updates


@dataclass(frozen=True)
class LearningRate:
    """The learning rate over the steps of a run: a linear warm-up, then a schedule.

    peak          the highest rate
    warmup_steps  steps of linear rise from 0
    schedule      constant; linear or cosine down to min_ratio·peak at the last step; inverse_sqrt;
                  wsd (warm-up, stable, decay): constant, then linear over the last decay_steps
    min_ratio     the fraction of the peak that is left at the last step
    decay_steps   steps of decay of the wsd schedule
    """

    peak: Positive = 1e-3
    warmup_steps: Steps = 0
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    min_ratio: Annotated[float, Bound(0, 1)] = 0.1
    decay_steps: Steps = 0


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its constants.

    name          adamw, adam (decay as L2), sgd (momentum) or rmsprop
    betas         decay rates of the first and second moment (adam, adamw); rmsprop uses the second
    momentum      of sgd and rmsprop
    epsilon       added outside the square root
    weight_decay  for the weights with `decay` in the table of weights (`shapes/weights.py`)
    delay         whether each update is by the gradients of the step before, so that it runs on the
                  host beside the passes: W(t+1) = update(W(t), g(t-1)), with g clipped as it was
                  computed. The first step updates nothing, nor does the one behind a norm that is
                  not finite (https://arxiv.org/abs/2101.06840, section 5.2)
    average       d: an average A of the weights W is kept, A = c·A + (1 - c)·W after each update,
                  with c = min(d, (1 + t)/(10 + t)) behind t steps, so that it forgets the start
                  (tf.train.ExponentialMovingAverage); 0: none
    """

    name: Literal["adamw", "adam", "sgd", "rmsprop"] = "adamw"
    betas: tuple[Share, Share] = (0.9, 0.95)
    momentum: Share = 0.9
    epsilon: NotNegative = 1e-8
    weight_decay: NotNegative = 0.1
    delay: bool = False
    average: Share = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        """The states that it keeps for every element; without momentum, no momentum buffer; with a
        delay, the gradient that waits; with an average, that.
        """
        names = STATES[self.name]
        if self.name in ("sgd", "rmsprop") and self.momentum == 0:
            names = tuple(name for name in names if name != "momentum_buffer")
        return (*names, *(LATE,) * self.delay, *(AVERAGE,) * (self.average > 0))


@dataclass(frozen=True)
class Routing:
    """How a mixture of experts keeps its experts evenly busy; all of it concerns training alone.

    Both losses are means over the tokens of a *sequence*, so that they do not depend on which
    sequences share a micro-batch; a sequence counts as often as it has labelled tokens. With s
    tokens, E experts and k of them chosen, f_e the share of choices that fell on expert e times
    E, and p_e the mean of its score (of sigmoids: divided by their sum):

    balance_loss  adds this times Σ_e f_e·p_e, which is 1 where all are equally busy
                  (https://arxiv.org/abs/2101.03961, eq. 4)
    z_loss        adds this times the mean of the squared log-sum-exp of the router's logits
                  (https://arxiv.org/abs/2202.08906, eq. 5)
    bias_rate     after each step, what is added to the bias of experts that were less busy than
                  the mean, and subtracted from that of the others (https://arxiv.org/abs/2408.15664)
    capacity      each expert takes at most capacity·s·k/E tokens of a sequence, the first ones; a
                  token that is dropped passes by the residual. 0: experts take all tokens
    """

    balance_loss: NotNegative = 0.0
    z_loss: NotNegative = 0.0
    bias_rate: NotNegative = 0.0
    capacity: NotNegative = 0.0

    @property
    def asks_sequences(self) -> bool:
        """Whether routers ask how often each expert was chosen in a whole sequence."""
        return self.balance_loss > 0 or self.capacity > 0

    @property
    def adds_loss(self) -> bool:
        """Whether the routers add to the loss."""
        return self.balance_loss > 0 or self.z_loss > 0


@dataclass(frozen=True)
class Masking:
    """Which tokens an encoder learns to predict (https://arxiv.org/abs/1810.04805, section 3.1).

    share   of all tokens; which ones is a function of seed, sample and position
    masked  of these, the share in whose place the mask token stands
    random  of these, the share in whose place a random token stands; the others stay
    """

    share: Annotated[float, Bound(0, 1, above=True)] = 0.15
    masked: Annotated[float, Bound(0, 1)] = 0.8
    random: Annotated[float, Bound(0, 1)] = 0.1


@dataclass(frozen=True)
class Spans:
    """Which tokens of a text a decoder behind an encoder learns to fill in
    (https://arxiv.org/abs/1910.10683, section 3.3.4).

    share   of all tokens; which ones is a function of seed and sample
    length  mean number of neighbouring tokens that are left out together
    """

    share: Annotated[float, Bound(0, 1, above=True, below=True)] = 0.15
    length: Annotated[float, Bound(1, 1000)] = 3.0


@dataclass(frozen=True)
class Sync:
    """How workers keep step with the parameter servers of the layout (`server/clocks.py`).

    kind     bsp: a step awaits all workers; ssp: the fastest is at most bound + 1 steps ahead;
             asp: nobody waits
    bound    of ssp
    workers  how many train; the layout describes one of them
    rate     staleness: an update by weights that are τ versions old has the rate divided by 1 + τ
    compensation  λ: adds λ·g²·(w - w at the pull) to a gradient g, which corrects for its delay
    replicas  other servers that have a copy of each server's state, so that as many may die
    """

    kind: Literal["bsp", "ssp", "asp"] = "bsp"
    bound: Annotated[int, Bound(0, 1 << 16)] = 0
    workers: Annotated[int, Bound(1, 1024)] = 1
    rate: Literal["plain", "staleness"] = "plain"
    compensation: NotNegative = 0.0
    replicas: Annotated[int, Bound(0, 16)] = 0

    @property
    def barrier(self) -> bool:
        """Whether the updates of a step are applied together, so that what a pull brings does not
        depend on when it is answered.
        """
        return self.kind == "bsp" or (self.kind == "ssp" and self.bound == 0)

    def begins(self, told: Iterable[int]) -> int:
        """The clock at which a worker begins, whose place has come so far on each server. One that
        died in a step may have pushed all of it to one server, and not to another: under asp that
        step is done again. Under the others servers have gone on without it, some further.
        """
        return min(told) if self.kind == "asp" else max(told)


@dataclass(frozen=True)
class Spike:
    """What is done about a step whose loss is far above those before.

    action      skip: its update is left out; rollback: the run goes back to its newest checkpoint,
                and the samples since then are left out (https://arxiv.org/abs/2204.02311, section
                5.1); before the first checkpoint its update is left out
    deviations  a loss is a spike above mean + deviations·(standard deviation) of the losses in the
                window; 0: it is not asked
    ratio       a loss is a spike above ratio·mean; 0: it is not asked. One of both is enough
    window      how many losses before it are looked at, spikes among them; nothing is decided until
                half of them are there
    most        how often a run goes back to one checkpoint
    """

    action: Literal["skip", "rollback"] = "skip"
    deviations: NotNegative = 6.0
    ratio: NotNegative = 0.0
    window: Annotated[int, Bound(4, 1000)] = 128
    most: Annotated[int, Bound(1, 1000)] = 3


@dataclass(frozen=True)
class Adapter:
    """Matrices of low rank that are trained beside frozen ones (https://arxiv.org/abs/2106.09685):
    y = W·x + alpha/rank · B·(A·x). With DoRA (https://arxiv.org/abs/2402.09353) the lengths of the
    rows of W + alpha/rank · B·A are trained apart from their directions.

    rank     rows of A and columns of B
    alpha    what their product is multiplied by, times the rank
    targets  the matrices of blocks that get one: q, k, v, o, gate, up, down, or patterns of names,
             such as "layers.3.attention.*.weight"
    kind     lora; dora: with a length for each row of a target
    """

    rank: Annotated[int, Bound(1, 1 << 14)] = 8
    alpha: Positive = 16.0
    targets: tuple[str, ...] = ("q", "v")
    kind: Literal["lora", "dora"] = "lora"

    @property
    def measures(self) -> bool:
        """Whether the lengths of rows are trained, too."""
        return self.kind == "dora"

    @property
    def scale(self) -> float:
        """What B·(A·x) is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Method:
    """Precision, optimizer, learning rate, dropout, and the terms added to plain cross-entropy.

    precision  of weights and compute. bf16 and fp16 keep float32 master weights, moments and
               gradients; under fp8, mxfp8 and nvfp4 the products of linear layers alone are in
               8 or 4 bits, and the rest is as under bf16
    lr         the learning rate
    grad_clip  the largest global gradient norm; 0: no clipping
    dropout    the fraction of activations set to zero, in the residual stream
    attention_dropout  the fraction of attention's probabilities set to zero; they are all kept then
    label_smoothing   ε: the target distribution is 1 - ε on the label, plus ε spread evenly over
                      the V entries of the vocabulary. The loss of a token with logits x and their
                      log-sum-exp L is L - (1 - ε)·x_label - ε/V·Σⱼ xⱼ
    z_loss            z: adds z·L² to a token's loss, which keeps L near zero
    routing           of a mixture of experts
    masking           of an encoder
    spans             of an encoder with a decoder behind it, which is trained on texts
    gradient_dtype    what gradients are sent as: bf16 halves the bytes of float32, and rounds each
                      rank's term and the sum; int4: in 4 bits, with a scale for each block of 256,
                      under zero2 and zero3 (`plan/quantised.py`); full: as they are kept
    gradient_feedback of int4: what was rounded away is added to what is sent of the same gradient
                      the next time
    gather_dtype      what zero3 gathers weights as: int8 has a scale for each block of 256, and all
                      ranks multiply with the rounded weights (`model/blockwise.py`), while masters
                      stay as they are; full: as they are kept
    sync              how workers and parameter servers keep step; None: all ranks make one step
    loss              a function of the user's own in place of cross-entropy, FILE.py:FUNCTION: of
                      logits [n, V] and labels [n], n losses
    spike             what is done about a step whose loss is far above those before; None: nothing
    train             the weights that are trained, as patterns of their names, such as "head.*", or
                      with a factor of the learning rate, "head.*=0.1"; the last that matches a
                      weight counts, and what none matches is frozen. Empty: all are trained
    adapter           low-rank matrices that are trained beside frozen ones (LoRA, DoRA)

    Losses are summed over tokens and divided once, by the number of tokens of the global batch.
    """

    precision: Precision = "float32"
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr: LearningRate = field(default_factory=LearningRate)
    grad_clip: NotNegative = 1.0
    dropout: Share = 0.0
    attention_dropout: Share = 0.0
    label_smoothing: Share = 0.0
    z_loss: NotNegative = 0.0
    routing: Routing = field(default_factory=Routing)
    masking: Masking = field(default_factory=Masking)
    spans: Spans = field(default_factory=Spans)
    gradient_dtype: Literal["full", "bf16", "int4"] = "full"
    gradient_feedback: bool = False
    gather_dtype: Literal["full", "int8"] = "full"
    sync: Sync | None = None
    loss: str = ""
    spike: Spike | None = None
    train: tuple[str, ...] = ()
    adapter: Adapter | None = None

    @property
    def compute(self) -> Precision:
        """The precision of what is no linear layer."""
        return "bf16" if self.precision in LOW else self.precision

    def processes(self, ranks: int, servers: int) -> int:
        """Number of processes of a run whose layout has so many ranks that compute, and servers."""
        return (self.sync.workers if self.sync else 1) * ranks + servers
