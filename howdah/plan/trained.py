"""Which weights a Method trains: THE table with marks, and the rows of adapters.

    method.train = ["layers.3.*", "head.*=0.1"]      what the first pattern names is trained; what
                                                     the second names too, at a tenth of the rate;
                                                     all else is frozen
    method.adapter.rank = 8                          all is frozen but two matrices of rank 8 beside
                                                     each target (LoRA), and what method.train names

A pattern is one of fnmatch, over the names of weights as checkpoints show them; of several that
match a weight the last one counts. A rate of 0 freezes.

    row                                 dims             cut by tp as    starts from
    layers.0.attention.q.weight         query, width     query           the base
    layers.0.attention.q.lora_a.weight  adapter, width   whole           ±1/√width, as PEFT's
    layers.0.attention.q.lora_b.weight  query, adapter   query           0
    layers.0.attention.o.weight         width, query     query           the base
    layers.0.attention.o.lora_a.weight  adapter, query   query           ±1/√query
    layers.0.attention.o.lora_b.weight  width, adapter   whole           0
    … kind = "dora", which trains the lengths of rows too:
    layers.0.attention.q.lora_magnitude.weight  query    query           the base's
    layers.0.attention.o.lora_magnitude.weight  width    whole           the base's

What a rank holds whole of an adapter it uses for its own columns, so its gradients are terms of a
sum over tp. The forward pass sends nothing more: behind a matrix that is cut by rows of its input,
W·x + s·B·(A·x) of each rank is a term of the same sum, because B is the same on all of them.
Lengths of its rows are used behind that sum, as a bias is, and their gradients are summed like a
bias's. To measure these rows is one sum more over tp in a forward pass, of a number for each row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import isfinite, sqrt

from howdah.base.errors import UserError, nearest, shown
from howdah.plan.layout import Layout
from howdah.plan.method import Adapter, Method
from howdah.shapes.marks import ALL, Marks
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import FROZEN, Weight, parts, parts_of, weights

Pattern = tuple[str, float]  # and what it multiplies the learning rate by
MOST = 1e6  # of these factors
TARGETS = (  # matrices that can have adapters
    *("q", "k", "v", "o", "gate", "up", "down"),
    *("q_down", "q_up", "kv_down", "kv_up"),  # of latent attention
)
OF_BLOCKS = ("attention", "cross", "feedforward")
MAGNITUDE = ".lora_magnitude.weight"


def read_pattern(text: str) -> Pattern:
    """A pattern of names, and its factor of the learning rate. Raises UserError."""
    pattern, equals, factor = text.partition("=")
    try:
        rate = float(factor) if equals else 1.0
    except ValueError:
        rate = -1.0
    if not pattern.strip() or not isfinite(rate) or not 0 <= rate <= MOST:
        raise UserError(
            f"method.train has {shown(text)}; write a pattern of names such as layers.3.*, or one "
            f"with a factor of the learning rate from 0 to {MOST:g}, such as head.*=0.1"
        )
    return pattern.strip(), rate


@lru_cache(8)
def table_of(shape: ModelShape, method: Method) -> tuple[Weight, ...]:
    """THE table as a method trains it: with rates, with frozen units, with rows of adapters.

    Raises UserError where a pattern names no weight.
    """
    rows = weights(shape)
    if not method.train and method.adapter is None:
        return rows
    rows = tuple(_with_adapters(rows, method.adapter)) if method.adapter else rows
    rates = dict.fromkeys((row.name for row in rows), 0.0)
    if method.adapter:
        heads = ("head.", "pooler.") if shape.labels else ()  # which begin with fresh weights
        own = [row.name for row in rows if is_adapter(row.name) or row.name.startswith(heads)]
        rates |= dict.fromkeys(own, 1.0)
    for text in method.train:
        pattern, rate = read_pattern(text)
        found = [name for name in rates if fnmatchcase(name, pattern)]
        if not found:
            raise UserError(f"method.train: no weight is called {_nearest(pattern, rates)}")
        rates |= dict.fromkeys(found, rate)
    return tuple(_marked(row, rates[row.name]) for row in rows)


def _nearest(pattern: str, names: Iterable[str]) -> str:
    return f"{shown(pattern)}{nearest(pattern, names)}"


def _marked(row: Weight, rate: float) -> Weight:
    return replace(row, rate=rate) if rate else replace(row, rate=0.0, unit=FROZEN + row.unit)


@lru_cache(8)
def marks_of(shape: ModelShape, method: Method) -> Marks:
    """What a method trains of a model. Raises UserError as `table_of` does."""
    rows = table_of(shape, method)
    frozen = frozenset(row.name for row in rows if not row.rate)
    if not frozen:
        return ALL
    units = {row.unit for row in rows if row.rate}
    used = {part for unit in units for part in parts_of(unit, shape)}
    still = []
    for part in parts(shape):
        if part in used:
            break
        still.append(part)
    adapted = frozenset(base_of(row.name) for row in rows if is_adapter(row.name))
    if method.adapter is None:
        return Marks(frozen, frozenset(still))
    return Marks(
        frozen, frozenset(still), adapted, method.adapter.rank, measures=method.adapter.measures
    )


def told(shape: ModelShape, method: Method) -> str:
    """How much of a model is trained, in words; empty where all of it is."""
    rows = table_of(shape, method)
    own, every = (sum(row.elements for row in rows if row.rate or whole) for whole in (False, True))
    return f"{own:,} of {every:,} parameters ({own / every:.2%})" if own < every else ""


# -- adapters ------------------------------------------------------------------


def is_adapter(name: str) -> bool:
    """Whether a weight is one of an adapter."""
    return name.endswith((".lora_a.weight", ".lora_b.weight", MAGNITUDE))


def is_magnitude(name: str) -> bool:
    """Whether a weight is the lengths of the rows of a matrix."""
    return name.endswith(MAGNITUDE)


def base_of(name: str) -> str:
    """The weight beside which an adapter's is: layers.0.attention.q.lora_a.weight's is
    layers.0.attention.q.weight.
    """
    return f"{name.rsplit('.', 2)[0]}.weight"


def is_target(row: Weight) -> bool:
    """Whether a matrix can have an adapter."""
    path = row.name.split(".")
    return len(path) == 5 and path[2] in OF_BLOCKS and path[3] in TARGETS and path[4] == "weight"


def targets_of(rows: Iterable[Weight], adapter: Adapter) -> dict[str, Weight]:
    """The matrices with an adapter, by name. Raises UserError for a target that is none."""
    table = {row.name: row for row in rows}
    found: dict[str, Weight] = {}
    if not adapter.targets:
        raise UserError(
            "method.adapter.targets is empty, so that nothing has an adapter; name matrices of "
            f"blocks, {', '.join(TARGETS)}"
        )
    for target in adapter.targets:
        pattern = f"*.{target}.weight" if target in TARGETS else target
        hit = [row for name, row in table.items() if fnmatchcase(name, pattern)]
        if not hit:
            raise UserError(
                "method.adapter.targets: no weight is called "
                f"{_nearest(target, [*table, *TARGETS])}"
            )
        if inside := [row.name for row in hit if ".experts." in row.name or ".shared." in row.name]:
            raise UserError(
                f"method.adapter.targets {shown(target)} names {inside[0]}, and matrices of "
                "experts have no adapters yet; name those of attention, such as o, or a dense "
                "block's, such as layers.0.feedforward.up.weight"
            )
        if wrong := [row.name for row in hit if not is_target(row)]:
            raise UserError(
                f"method.adapter.targets {shown(target)} names {wrong[0]}, which cannot have an "
                f"adapter: name matrices of blocks, {', '.join(TARGETS)}; other weights are "
                "trained whole by method.train"
            )
        found |= {row.name: row for row in hit}
    for name, row in found.items():
        if adapter.rank > min(row.shape):
            raise UserError(
                f"method.adapter.rank {adapter.rank} is larger than {name}, which is "
                f"{row.shape[0]} x {row.shape[1]}; use method.adapter.rank={min(row.shape)} at most"
            )
    return found


def _with_adapters(rows: Iterable[Weight], adapter: Adapter) -> Iterator[Weight]:
    """The rows, and behind each target those of its adapter."""
    rows = tuple(rows)
    found = targets_of(rows, adapter)
    for row in rows:
        yield row
        if row.name in found:
            path = row.name.removesuffix(".weight")
            (out, inner), (columns, width) = row.dims, row.shape
            size = ("adapter", adapter.rank)
            a = replace(row, name=f"{path}.lora_a.weight", dims=(size[0], inner), mean=0.0)
            yield replace(a, shape=(size[1], width), spread=1 / sqrt(width), even=True)
            b = replace(row, name=f"{path}.lora_b.weight", dims=(out, size[0]), mean=0.0)
            yield replace(b, shape=(columns, size[1]), spread=0.0)
            if adapter.measures:  # of a base that is drawn, about the lengths of its rows
                m = replace(row, name=f"{path}{MAGNITUDE}", dims=(out,), shape=(columns,))
                yield replace(m, mean=row.spread * sqrt(width), spread=0.0, decay=False)


# -- problems ------------------------------------------------------------------


def train_problems(shape: ModelShape, layout: Layout, method: Method) -> Iterator[str]:
    """Why a method cannot train a part of a model on a layout, as sentences."""
    if not method.train and method.adapter is None:
        return
    what = "method.adapter" if method.adapter else "method.train"
    if shape.latent and method.adapter and method.adapter.measures:
        yield (
            "method.adapter.kind=dora is not there yet for latent attention: tp would measure its "
            "rows in part; use method.adapter.kind=lora"
        )
    yield from _of_names(shape, method)
    if method.precision not in ("float32", "bf16", "float64"):
        yield f"{what} with method.precision={method.precision} is not there yet; use bf16"
    if layout.server:
        yield f"{what} with server{layout.server} is not there yet; use zero1 to zero3"


def _of_names(shape: ModelShape, method: Method) -> Iterator[str]:
    """Why a method's patterns do not fit the weights of a model."""
    try:
        rows = table_of(shape, method)
    except UserError as problem:
        yield str(problem)
        return
    if not any(row.rate for row in rows):
        yield (
            "method.train freezes every weight, so that nothing is trained; name one that is to be "
            "trained, such as head.*"
        )
