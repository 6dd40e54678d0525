"""Context parallelism: the ranks of cp share the tokens of each sample.

Each rank has an early and a late chunk of every sequence (`plan/sharding.py`, `chunks`), and all
that works token by token works on these alone. Attention is what crosses them, and it is replaced
here by another core:

    context=ring         keys and values go round (`context_ring.py`)
    context=all-to-all   sequence is traded for heads (`context_trade.py`)
    context=both         that inside of groups, and a ring of the groups

Tokens, labels, positions and noise of the rank's chunks are cut from the whole samples
(`train/feed.py`); documents stay those of whole samples, for both cores ask where they end.
"""

from howdah.model.latent import LatentAttention
from howdah.model.transformer import Transformer
from howdah.parallel.context_ring import Ring
from howdah.parallel.context_trade import Trade
from howdah.parallel.mesh import Mesh
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan

__all__ = ["Ring", "Trade", "share_sequences"]


def share_sequences(model: Transformer, plan: Plan, mesh: Mesh) -> Ring | Trade:
    """Gives the blocks of `model` an attention core over the ranks of cp, which is returned."""
    model.length = plan.sequence
    ring = Ring(plan, mesh) if axis(plan.layout, "ring").size > 1 else None
    if ring:
        model.cut = ring.cut
    core = ring if ring and plan.layout.trading == 1 else Trade(plan, mesh, ring)
    for block in model.blocks:
        block.attention.core = core
        if block.crosses:
            block.cross.core = core
        if isinstance(block.attention, LatentAttention):
            block.attention.pads = False
    return core
