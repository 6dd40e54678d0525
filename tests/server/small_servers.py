"""Servers with the weights of a small model, and workers whose gradients are made up.

The gradient of a worker is a function of what it has pulled, of its place and of its clock, and
every worker has another number of tokens: what is weighted, mixed up or lost changes the weights.
"""

from dataclasses import replace
from random import Random

import torch

from howdah.plan.flat_buffers import buffers
from howdah.plan.method import Method, Optimizer, Sync
from howdah.plan.worker_ranks import whole
from howdah.server.chunks import chunks_of
from howdah.server.clocks import Clocks, Update
from howdah.server.desk import Desk
from howdah.server.shard import Shard, Term
from howdah.shapes.presets import preset
from howdah.shapes.weights import weights
from howdah.verify.case import small_shape

SHAPE = replace(small_shape(preset("laptop"), context=16), vocab=20)
UNITS = buffers(weights(SHAPE))
STEPS = 4


def rate_of(clock):
    """A learning rate that says which clock it is of."""
    return 1e-2 / (1 + clock)


def method_of(sync, name="adamw"):
    return Method("float64", optimizer=Optimizer(name), sync=sync, grad_clip=0.0)


def chunks_for(servers, most=2048):
    return chunks_of([*map(whole, UNITS)], [1] * servers, element_bytes=8, most=most)


def first_weights():
    """By unit, the weights at the start."""
    made = torch.Generator().manual_seed(5)
    return {one.unit: torch.randn(one.length, generator=made, dtype=torch.float64) for one in UNITS}


def shards_of(sync, servers, name="adamw"):
    """Fresh shards of all servers."""
    first = first_weights()
    return [
        Shard(mine, [first[c.unit][c.start : c.stop].clone() for c in mine], method, rate_of)
        for method in [method_of(sync, name)]
        for mine in chunks_for(servers)
    ]


def tokens_of(worker, clock):
    return 3.0 + 2 * worker + clock % 2


def summed_gradient(worker, clock, flat):
    """A gradient, summed over the worker's tokens, of flat weights."""
    return tokens_of(worker, clock) * (flat * (1 + worker) + torch.sin(flat + clock))


def gradient(step, pulled):
    """What a worker pushes in a step: `howdah.server.ledger.Gradient`."""
    worker, _, clock = step
    tokens = tokens_of(worker, clock)
    return {at: Term(summed_gradient(worker, clock, w), tokens) for at, w in pulled.items()}


def run_in_turns(sync, servers, seed, *, name="adamw", steps=STEPS):
    """Runs workers and servers in one process, who comes next being drawn at random; the desks."""
    random, shards = Random(seed), shards_of(sync, servers, name)
    desks = [Desk(Clocks(sync, len(shard.chunks)), shard) for shard in shards]
    places = {(s, key) for s, shard in enumerate(shards) for key in range(len(shard.chunks))}
    workers = [_Worker(place, places, desks) for place in range(sync.workers)]
    while any(worker.clock < steps for worker in workers):
        worker = random.choice(workers)
        if worker.clock < steps:
            worker.go_on(random, steps)
        for server, desk in enumerate(desks):
            for answer in desk.answers():
                workers[answer.worker].take(answer, (server, answer.key))
    return desks


class _Worker:
    def __init__(self, place, places, desks):
        self.place, self.places, self.desks = place, places, desks
        self.clock, self.pulled, self.pushes, self.asked = 0, {}, {}, set()
        self.early = {}  # of the next step
        for desk in desks:
            assert desk.join(place) == (1, 0)

    def take(self, answer, at):
        """Weights have come."""
        kept = self.pulled if answer.clock == self.clock else self.early
        kept[at] = answer.weights.clone()

    def ask(self, clock, places):
        for server, key in places:
            self.asked.add((clock, server, key))
            self.desks[server].pull(self.place, 1, clock=clock, key=key)

    def go_on(self, random, steps):
        """Asks for weights, or pushes one chunk, or asks for one that it has still to push: pulls
        are short, and overtake pushes.
        """
        rest = [at for at in sorted(self.places) if (self.clock, *at) not in self.asked]
        if rest:
            self.ask(self.clock, rest)
        elif self.pushes and self.clock + 1 < steps and random.random() < 0.3:
            at = random.choice(sorted(self.pushes))
            if (self.clock + 1, *at) not in self.asked:
                self.ask(self.clock + 1, [at])
        elif self.pushes:
            server, key = at = random.choice(sorted(self.pushes))
            update = Update(self.place, 1, self.clock, key)
            assert self.desks[server].push(update, self.pushes.pop(at))
            if not self.pushes:
                self.clock, self.pulled, self.early = self.clock + 1, self.early, {}
        elif self.pulled.keys() == self.places:
            self.pushes = gradient((self.place, 1, self.clock), self.pulled)


def weights_of(shards):
    """By unit, all weights of some shards."""
    found = {one.unit: torch.full((one.length,), torch.nan, dtype=torch.float64) for one in UNITS}
    for shard in shards:
        for chunk, master in zip(shard.chunks, shard.masters, strict=True):
            found[chunk.unit][chunk.start : chunk.stop] = master
    return found


def apart(one, other):
    """How far two sets of weights are apart at most."""
    return max(float((one[unit] - other[unit]).abs().max()) for unit in one)


def plain(workers, name="adamw"):
    """The weights of all-reduce training: torch's optimizer on all gradients of a step."""
    found, settings = first_weights(), method_of(Sync(), name).optimizer
    parts = {one.unit: found[one.unit].split([one.decay_stop, one.length - one.decay_stop])
             for one in UNITS}  # fmt: skip
    groups = [
        {
            "params": [two[i] for two in parts.values()],
            "weight_decay": settings.weight_decay * (not i),
        }
        for i in (0, 1)
    ]
    makes = {
        "adamw": lambda: torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon),
        "adam": lambda: torch.optim.Adam(groups, betas=settings.betas, eps=settings.epsilon),
        "sgd": lambda: torch.optim.SGD(groups, momentum=settings.momentum),
        "rmsprop": lambda: torch.optim.RMSprop(
            groups, alpha=settings.betas[1], eps=settings.epsilon, momentum=settings.momentum
        ),
    }
    optimizer = makes[name]()
    for clock in range(STEPS):
        total = sum(tokens_of(worker, clock) for worker in range(workers))
        for one in UNITS:
            flat = found[one.unit]
            sums = [summed_gradient(worker, clock, flat) for worker in range(workers)]
            whole = torch.stack(sums).sum(0) / total
            cuts = whole.split([one.decay_stop, one.length - one.decay_stop])
            for part, cut in zip(parts[one.unit], cuts, strict=True):
                part.grad = cut.clone()
        for group in optimizer.param_groups:
            group["lr"] = rate_of(clock)
        optimizer.step()
    return found
