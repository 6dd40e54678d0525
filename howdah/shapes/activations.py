"""What autograd keeps between the forward and the backward pass, tensor by tensor.

Which tensors those are depends on the operations more than on the model, so a list belongs to a
set of kernels:

    CLASSIC    attention as matrices, and dropout: s·b·h·(34 + 5·a·s/h) bytes for a block of GPT,
               https://arxiv.org/abs/2205.05198, section 4.1
    FLASH      flash attention (https://arxiv.org/abs/2205.14135) and a fused gate, no dropout
    howdah()   what this project's own model keeps: on a CPU, to the byte; and on a GPU, where its
               kernels are others (`model/varlen.py`, `model/feedforward.py`)

Bytes for each token of a Llama block in 16 bits, with FLASH, and what cuts them:

    attention norm input     2·h            tp with sp         feedforward norm input   2·h
    attention input          2·h            tp with sp         feedforward input        2·h
    q                        2·a·d          tp                 gate, up                 4·f
    k, v                     4·k·d          tp                 product                  2·f
    attention output         2·a·d          tp
    log-sum-exps             4·a            tp

A list does not change with the layout: `bytes_of` takes what a rank sees (`dims.RankSizes`).

Cross attention is not measured, but derived. The copies for the experts are whole on each rank of
tp; with ep they are those of evenly loaded experts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Literal

from howdah.shapes.dims import OF_SOURCE, Dim, Per, RankSizes
from howdah.shapes.kept import Kernels, Saved
from howdah.shapes.marks import unkept
from howdah.shapes.part import Part
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import part_weights

Recompute = Literal["none", "selective", "full"]
FIXED = {"float32": 4, "int64": 8, "byte": 1}

CLASSIC = Kernels((("logits", "float32"),), flash=False, dropout=True, activated=True)
FLASH = Kernels(
    (("logits", "compute"), ("logits in float32", "float32"), ("their gradient", "float32"))
)


def howdah(
    *, compute: int, dropout: bool = False, packed: bool = False, card: bool = False
) -> Kernels:
    """What howdah's own model keeps, computing in formats of `compute` bytes.

    card  on a GPU. FlashAttention takes tokens one after another and shares key-value heads, and
          the gate's activation is computed again. That is for formats of 16 bits; in wider ones
          heads are repeated, and the mask of packed rows is dense and not in the list
    """
    return Kernels(
        dropout=dropout,
        activated=not card,
        small=True,
        repeats=(compute < 4) != card,  # as `_knows_groups` in model/attention.py says
        by_head=not card,
        packed=packed,
    )


def saved(
    shape: ModelShape, part: Part, kernels: Kernels, recompute: Recompute = "none"
) -> tuple[Saved, ...]:
    """What one part keeps. Recomputation is about blocks: `selective` drops the attention core,
    `full` all but the block's input.
    """
    stack = part.stack
    if part in kernels.marks.still or (stack == "target" and "embedding" in kernels.marks.still):
        return ()
    if stack == "head":
        return _asked(_head(shape, kernels), shape, part, kernels)
    selective = recompute == "selective"
    if part.is_block and recompute == "full":
        listed = [Saved("block input", "sp_token", (_width(shape),))]
    elif part.is_block:
        whole = _block(shape, stack, part.layer, kernels, selective=selective)
        kept = _asked(whole, shape, part, kernels, selective=selective)
        listed = [one for one in kept if not (one.core and selective)]
    else:
        listed = list(_asked(_embedding(shape, kernels), shape, part, kernels))
    if (stack, part.layer) == ("encoder", shape.encoder_layers - 1) and shape.norm_at == "before":
        listed += _norm(shape, kernels, "encoder norm")
    if stack == "encoder" or (stack == "embedding" and shape.encoder_layers):
        return tuple(replace(one, per=OF_SOURCE.get(one.per, one.per)) for one in listed)
    return tuple(listed)


def _asked(
    listed: Iterable[Saved],
    shape: ModelShape,
    part: Part,
    kernels: Kernels,
    *,
    selective: bool = False,
) -> tuple[Saved, ...]:
    """What is left of a list where some weights are frozen; and what adapters keep."""
    kept, marks, apart = list(listed), kernels.marks, "attention output by head"
    if marks.frozen:
        rows = part_weights(shape, part)
        names = {row.name.removeprefix(f"{part}.").removesuffix(".weight") for row in rows}
        left = unkept(marks, part, names)
        made = apart not in {one.name for one in kept} and shape.positions != "relative"
        if made and not selective:  # then it is what the kernel itself keeps
            left -= {"attention output"}
        if shape.feedforward == "relu":  # whose gradient needs its output
            left -= {"down input", "shared down input", "expert down input"}
        alone = {"attention output"} & left  # what is by head is no copy of it then
        kept = [replace(o, copy=None) if alone and o.name == apart else o for o in kept]
        kept = [one for one in kept if one.name not in left]
    inner = (Dim("adapter", marks.rank),)
    for name in marks.adapters(part):
        read: Per = "source" if name in ("cross.k", "cross.v") else "token"
        kept.append(Saved(f"{name} adapter", read, inner))
        if marks.measures:
            per, row = _rows_of(shape, name.rpartition(".")[2])
            kept.append(Saved(f"{name} unmeasured", read if per == "token" else per, (row,)))
            kept.append(Saved(f"{name} lengths", "once", (row,)))
    return tuple(kept)


def _rows_of(shape: ModelShape, matrix: str) -> tuple[Per, Dim]:
    """What there is an output for of a matrix of a block, such as "q"; and the output's dim."""
    if matrix in ("o", "down"):  # behind the border of a sub-layer
        return "sp_token", _width(shape)
    if matrix in ("gate", "up"):
        return "token", Dim("ffn", shape.ffn_size)
    heads = shape.heads if matrix == "q" else shape.k
    return "token", Dim("query" if matrix == "q" else "key", heads * shape.d)


def made_again(
    shape: ModelShape, part: Part, kernels: Kernels, recompute: Recompute
) -> tuple[Saved, ...]:
    """What the second run of one part makes, beside what was kept: it is there until the part's
    backward pass is done.
    """
    if recompute == "none" or not part.is_block:
        return ()
    whole = saved(shape, part, kernels)
    if recompute == "selective":
        return tuple(one for one in whole if one.core or one.again)
    block_input = "attention norm input" if shape.norm_at == "before" else "attention input"
    return tuple(one for one in whole if one.name not in (block_input, "encoder norm input"))


def shared(shape: ModelShape, kernels: Kernels, *, source: bool = True) -> tuple[Saved, ...]:
    """What the blocks of one pipeline stage keep once, together.

    source  whether a gradient needs what an encoder has made
    """
    kept = []
    if kernels.small and shape.positions == "rotary":
        turned = shape.latent.qk_rope_size if shape.latent else shape.d
        angles = (Dim("cosine and sine", 2), Dim("head", turned // 2))
        kept.append(Saved("rotary angles", "token", angles, "wide"))
    if shape.family == "encoder-decoder" and source:
        kept.append(Saved("encoder output", "sp_source", (_width(shape),)))
    return tuple(kept)


def bytes_of(kept: Iterable[Saved], of: RankSizes, *, compute: int = 2) -> int:
    """Bytes on the rank `of`, computing in a format of `compute` bytes."""
    size = {"compute": compute, "wide": max(compute, 4), **FIXED}
    return sum(
        of.counts[one.per] * prod(of.size(dim) for dim in one.dims) * size[one.kind]
        for one in kept
        if one.copy is None or of.size(one.copy) > 1
    )


# -- the lists -----------------------------------------------------------------


def _width(shape: ModelShape) -> Dim:
    return Dim("width", shape.width)


def _block(
    shape: ModelShape, stack: str, layer: int, kernels: Kernels, *, selective: bool
) -> Iterator[Saved]:
    """Norms in front keep their sub-layer's input as output, norms behind the block's input."""
    gathered = replace(kernels, gathered=kernels.gathered or shape.latent is not None)
    yield from _sublayer(shape, gathered, "attention")
    if shape.latent:
        yield from _latent(shape, kernels, selective=selective)
    else:
        yield from _attention(shape, kernels, selective=selective)
    if stack == "layers" and shape.family == "encoder-decoder":
        yield from _sublayer(shape, kernels, "cross")
        yield from _cross(shape, kernels, selective=selective)
    sparse = stack == "layers" and shape.sparse(layer)
    gathered = replace(kernels, gathered=kernels.gathered or sparse)
    yield from _sublayer(shape, gathered, "feedforward")
    if sparse:
        yield from _experts(shape, kernels)
    else:
        yield from _inner(shape, kernels, Dim("ffn", shape.ffn_size))


def _sublayer(shape: ModelShape, kernels: Kernels, name: str) -> Iterator[Saved]:
    """What surrounds a sub-layer: its norm, its input, its dropout."""
    yield from _norm(shape, kernels, f"{name} norm")
    yield Saved(f"{name} input", "token" if kernels.gathered else "sp_token", (_width(shape),))
    if kernels.dropout:
        yield Saved(f"{name} dropout", "sp_token", (_width(shape),), "byte")


def _norm(shape: ModelShape, kernels: Kernels, name: str) -> Iterator[Saved]:
    yield Saved(f"{name} input", "sp_token", (_width(shape),))
    if kernels.small:
        yield Saved(f"{name} scale", "sp_token", (), "wide")
        if shape.norm == "layernorm":
            yield Saved(f"{name} mean", "sp_token", (), "wide")


def _attention(shape: ModelShape, kernels: Kernels, *, selective: bool) -> Iterator[Saved]:
    """Keys and values that are repeated, packed or traded are kept so, and only so, unless they are
    made again; queries that are traded too.
    """
    query, key = Dim("query", shape.heads * shape.d), Dim("key", shape.k * shape.d)
    wide = shape.d_taken if kernels.small else shape.d  # ALiBi is inside of howdah's heads
    if shape.qk_norm:
        yield Saved("q norm input", "token", (query,))
        yield Saved("k norm input", "token", (key,))
        if kernels.small:
            yield Saved("q norm scale", "token", (Dim("heads", shape.heads),), "wide")
            yield Saved("k norm scale", "token", (Dim("kv_heads", shape.k),), "wide")
    output, query, key = query, Dim("query", shape.heads * wide), Dim("key", shape.k * wide)
    repeated = kernels.repeats and shape.k < shape.heads and not kernels.rings
    yield from _copied("q", query, query, kernels, kernels.core[1] != "", selective)
    for name in "kv":
        inside, copied = query if repeated else key, repeated or kernels.context != ""
        yield from _copied(name, key, inside, kernels, copied, selective)
    yield from _core(shape, kernels, output, query)


def _copied(  # noqa: PLR0917
    name: str, given: Dim, inside: Dim, kernels: Kernels, copied: bool, selective: bool
) -> Iterator[Saved]:
    """An input of attention: the copy that it keeps, or what it was given."""
    per, of = kernels.core
    if copied:
        yield Saved(f"{name} copied", per, (Dim(of + inside.name, inside.size),), core=True)
    if selective or not copied:
        yield Saved(name, "token", (given,))


def _cross(shape: ModelShape, kernels: Kernels, *, selective: bool) -> Iterator[Saved]:
    """Cross attention: keys and values are of the source, pairs of a target and a source token."""
    for one in _attention(shape, kernels, selective=selective):
        elsewhere: dict[Per, Per] = {"pair": "cross_pair"}
        if one.name[0] in "kv":
            elsewhere["token"] = "source"
        yield replace(one, name=f"cross {one.name}", per=elsewhere.get(one.per, one.per))


def _latent(shape: ModelShape, kernels: Kernels, *, selective: bool) -> Iterator[Saved]:
    """Keys and values unfolded; the latents pass a norm (https://arxiv.org/abs/2405.04434)."""
    latent = shape.latent
    assert latent is not None
    if latent.query_rank:
        yield Saved("q latent norm input", "token", (Dim("rank", latent.query_rank),))
        yield Saved("q latent", "token", (Dim("rank", latent.query_rank),))
    # the rotary key is made by the same product, and is beside
    down = Dim("rank", latent.kv_rank + latent.qk_rope_size)
    yield Saved("kv latent norm input", "token", (down,))
    yield Saved("kv latent", "token", (Dim("rank", latent.kv_rank),))
    if kernels.small:
        for name in ("q", "kv") if latent.query_rank else ("kv",):
            yield Saved(f"{name} latent norm scale", "token", (), "wide")
    query, value = Dim("query", shape.heads * shape.d), Dim("query", shape.heads * latent.v_size)
    wide = query if kernels.small and shape.d > latent.v_size else value  # zeros behind values
    # a ring sends what is there, and what is cut from the unfolded latent keeps all of it
    unfolded = Dim("query", shape.heads * (latent.qk_nope_size + latent.v_size))
    kernel = value if kernels.rings else wide
    for name, given, inside in (("q", query, query), ("k", query, query), ("v", unfolded, kernel)):
        copied = kernels.core[1] != "" or (kernels.context != "" and name != "q")
        yield from _copied(name, given if copied else inside, inside, kernels, copied, selective)
    for one in _core(shape, kernels, value, kernel):
        # before heads are traded back, the zeros are dropped
        traded = one.name == "attention output" and kernels.core[1] != ""
        yield replace(one, again=True) if traded else one


def _core(shape: ModelShape, kernels: Kernels, output: Dim, made: Dim) -> Iterator[Saved]:
    """`made` is what the kernel puts out, `output` what is left of it behind it."""
    (per, of), less = kernels.core, made.size > output.size
    heads = (Dim(f"{of}heads", shape.heads),)
    # torch's CPU kernel lays its output like q. Rotated and packed ones lie head by head, and the
    # projection keeps a copy that is laid out token by token; so does what is left of wider heads.
    by_head = kernels.by_head and (shape.positions == "rotary" or kernels.packed)
    by_head = (by_head and not kernels.context) or less
    # howdah's is of matrices then, unless it is computed again block by block
    biased = kernels.small and shape.positions == "relative" and not kernels.rings
    flash = kernels.flash and not biased
    if flash:
        if by_head or of:
            # documents are joined, and what is traded is brought back
            one = None if kernels.packed or of or less else Dim("heads", shape.heads)
            inside = (Dim(of + made.name, made.size),)
            yield Saved("attention output by head", per, inside, core=True, copy=one)
        yield Saved("log-sum-exps", per, heads, "wide", core=True)
    else:
        pair: Per = "traded_pair" if of else "pair"
        yield Saved("probabilities", pair, heads, core=True)
        # howdah's are matrices where they are dropped, and of a bias
        drops = not kernels.flash if biased else kernels.dropout or kernels.small
        if drops:
            yield Saved("probabilities dropout", pair, heads, "byte", core=True)
        if kernels.dropout and not kernels.small:
            yield Saved("probabilities dropped", pair, heads, core=True)
    yield Saved("attention output", "token", (output,), again=flash and not by_head)


def _inner(shape: ModelShape, kernels: Kernels, inner: Dim, prefix: str = "") -> Iterator[Saved]:
    """Between the matrices of a feed-forward. The gradient of ReLU needs its output alone."""
    names = ["down input"] if shape.feedforward == "relu" else ["up", "down input"]
    if shape.gated:
        activated = kernels.activated or (kernels.small and shape.feedforward == "geglu")
        names += ["gate", "activated gate"] if activated else ["gate"]
    for name in names:
        yield Saved(f"{prefix}{name}", "token", (inner,))


def _experts(shape: ModelShape, kernels: Kernels) -> Iterator[Saved]:
    """The router's choice, a copy of each token for each expert it goes to, and their outputs,
    which are kept for the gradient of the weights that add them up. All tp ranks route all tokens.
    """
    experts, width = shape.experts, _width(shape)
    assert experts is not None
    every, chosen = Dim("choice", experts.count), Dim("chosen", experts.top_k)
    if experts.shared:
        yield from _inner(shape, kernels, Dim("shared_ffn", experts.shared), "shared ")
    if experts.shared_gate:
        yield Saved("shared output", "token", (width,))
        yield Saved("shared gate", "token")
    if kernels.balanced:
        yield Saved("gradient of the routers' loss", "token", (every,), "wide")
    yield Saved("router scores", "token", (every,), "wide")
    yield Saved("chosen numbers", "token", (chosen,), "int64")
    if experts.normalise and kernels.small:
        yield Saved("chosen scores", "token", (chosen,), "wide")
        yield Saved("sum of the chosen scores", "token", (), "wide")
    yield Saved("chosen weights", "token", (chosen,), "wide")
    if kernels.small:
        yield Saved("places at experts", "token", (chosen,), "int64")
    yield Saved("expert input", "taken_row", (width,))
    for one in _inner(shape, kernels, Dim("expert_ffn", experts.ffn_size), "expert "):
        yield replace(one, per="taken_row")
    yield Saved("expert output", "expert_row", (width,))


def _embedding(shape: ModelShape, kernels: Kernels) -> Iterator[Saved]:
    named = {"positions": shape.positions == "learned", "token types": shape.token_types > 0}
    for name in ("tokens", *(one for one, has in named.items() if has)) if kernels.small else ():
        yield Saved(name, "token", (), "int64")
    if shape.embedding_norm:
        yield from _norm(shape, kernels, "embedding norm")
    if kernels.dropout:
        yield Saved("embedding dropout", "sp_token", (_width(shape),), "byte")


def _head(shape: ModelShape, kernels: Kernels) -> Iterator[Saved]:
    width, vocab = _width(shape), Dim("label" if shape.labels else "vocab", shape.outputs)
    if shape.norm_at == "before":
        yield from _norm(shape, kernels, "final norm")
    if shape.pooler:  # whose output is the head's input, unless that is another tensor
        names = ("pooler input", *["pooler output"] * (kernels.gathered or kernels.dropout))
        yield from (Saved(name, "sp_token", (width,)) for name in names)
        if kernels.dropout:
            yield Saved("pooler dropout", "sp_token", (width,), "byte")
    if shape.transform:
        yield Saved("transform input", "sp_token", (width,))
        if shape.feedforward != "relu":  # whose gradient needs its output, the norm's input
            yield Saved("transform output", "sp_token", (width,))
        yield from _norm(shape, kernels, "transform norm")
    yield Saved("head input", "token" if kernels.gathered else "sp_token", (width,))
    for name, kind in kernels.logits:
        yield Saved(name, "token", (vocab,), kind)
    if not kernels.logits:
        yield Saved("labels", "token", (), "int64")
        yield Saved("log-sum-exps", "token", (), "wide")
        yield Saved("gradient of the last chunk's logits", "chunk", (vocab,))
