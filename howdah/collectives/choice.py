"""Which program a collective takes: by its operation and size, as a recipe or a caller says.

    ring                                       always
    recursive_doubling to 64 KiB, ring         the first up to so many bytes, the other above
    default to 1 MB, hierarchical pieces=4     default: the transport's own; options of an algorithm
                                               follow its name
    4x1: ring | 4x2: hierarchical              for groups of 4 hosts with one rank each, with two;
                                               others take the part without groups, or default
    auto                                       what `sim/selector.py` chooses; until then default

`program_of` is asked by the wire that runs programs (`comm/chosen.py`), and by the predictions of
bytes and times: with one answer, bytes that are predicted are those that are counted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from math import inf, prod
from typing import Any, NamedTuple

from howdah.base.errors import UserError, nearest, shown
from howdah.base.quantities import parse_quantity
from howdah.collectives.dealt import dealt
from howdah.collectives.meaning import OPERATIONS
from howdah.collectives.program import Program, split
from howdah.collectives.registry import ALGORITHMS, ALSO_CALLED, build
from howdah.plan.comm import Algorithms

DEFAULT = "default"  # the transport's own way
AUTO = "auto"  # to be chosen by price
UNSIZED = ("all_to_all", "barrier")  # ranks may have vectors of other lengths, or none
SIZED = tuple(op for op in OPERATIONS if op not in UNSIZED)
FORWARDING = ("all_to_all/bruck", "all_to_all/hierarchical")  # ranks pass on what others send


class Rule(NamedTuple):
    """One algorithm of a text.

    name     its full name; empty for the transport's own
    options  of its generator
    most     bytes of the vector up to which it is taken
    groups   hosts and ranks of each, for which it is; empty: for all others
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    most: float
    groups: str = ""

    def __str__(self) -> str:
        words = [f"{key}={_spelled(value)}" for key, value in self.options]
        return " ".join([self.name.partition("/")[2], *words])


class Chosen(NamedTuple):
    """A program, and how its algorithm is spelled."""

    program: Program
    spelled: str


def everywhere(text: str) -> Algorithms:
    """`text` for every operation that has all algorithms it names. Raises UserError."""
    if text.strip() == AUTO:
        return Algorithms(**dict.fromkeys(SIZED, AUTO))
    parts = (part.rpartition(":")[2].split() for part in re.split("[,|]", text))
    said = [part[0] for part in parts if part]
    names = [ALSO_CALLED.get(name, name).rpartition("/")[2] for name in said]
    if {*names} == {DEFAULT}:
        return Algorithms()
    having = [
        op
        for op in OPERATIONS
        if all(name == DEFAULT or f"{op}/{name}" in ALGORITHMS for name in names)
    ]
    if not names or not having:
        known = {name.partition("/")[2] for name in ALGORITHMS}
        unknown = next((name for name in names if name not in {*known, DEFAULT}), "")
        hint = nearest(unknown, known) if unknown else "; name one for each operation"
        raise UserError(f"no operation has the algorithm {shown(text)}{hint}")
    fitting = {op: text for op in having if not problem_of(op, text)}
    if not fitting:
        raise UserError(problem_of(having[0], text))
    return Algorithms(**fitting)


def passes_on(op: str, text: str) -> bool:
    """Whether ranks pass on what others send, whose sizes they must know. Raises UserError."""
    return any(rule.name in FORWARDING for rule in rules(op, text))


def problem_of(op: str, text: str) -> str:
    """Why `text` names no algorithms of an operation; empty if it does."""
    try:
        rules(op, text)
    except UserError as problem:
        return str(problem)
    return ""


@cache
def rules(op: str, text: str) -> tuple[Rule, ...]:
    """The algorithms that a text names, in the order of their sizes. Raises UserError."""
    if text.strip() == AUTO and op in SIZED:
        return (Rule("", (), inf),)
    found: dict[str, list[Rule]] = {}
    for group in text.split("|"):
        named, colon, said = group.rpartition(":")
        groups, parts = named.strip(), said.split(",")
        if colon and not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", groups):
            raise UserError(
                f"{op} {shown(groups)}: write hosts and ranks of each, such as 4x2: NAME"
            )
        if groups in found:
            raise UserError(f"{op} {shown(text)} says twice what {groups or 'all groups'} take")
        mine = [_rule(op, part, last=part is parts[-1])._replace(groups=groups) for part in parts]
        sizes = [rule.most for rule in mine]
        if sizes != sorted(set(sizes)):
            raise UserError(f"{op} {shown(text)}: sizes must rise from one algorithm to the next")
        if op in UNSIZED and len(mine) > 1:
            raise UserError(f"{op} {shown(text)}: ranks may have other sizes, so it takes one name")
        found[groups] = mine
    return tuple(rule for mine in found.values() for rule in mine)


def _rule(op: str, text: str, *, last: bool) -> Rule:
    """One part of a text."""
    what, limited, size = text.partition(" to ")
    if limited == "" and not last:
        raise UserError(f"{op} {shown(text.strip())} ends at no size; write NAME to 64 KiB, NAME")
    most = parse_quantity(size.strip(), "bytes", where=f"{op} {what.strip()} to") if size else inf
    if limited and last:
        rest = f"'{text.strip()}, {DEFAULT}'"
        raise UserError(f"{op} {shown(text.strip())} says nothing of longer vectors; write {rest}")
    name, *words = what.split() or [""]
    if name == DEFAULT and not words:
        return Rule("", (), most)
    name = ALSO_CALLED.get(name, name)
    name = name if "/" in name else f"{op}/{name}"
    if name not in ALGORITHMS or not name.startswith(f"{op}/"):
        known = {one.partition("/")[2] for one in ALGORITHMS if one.startswith(f"{op}/")}
        said = name.removeprefix(f"{op}/")
        raise UserError(f"{op} has no algorithm {shown(said)}{nearest(said, known | {DEFAULT})}")
    return Rule(name, tuple(_option(name, word) for word in words), most)


def _option(name: str, word: str) -> tuple[str, Any]:
    key, _, value = word.partition("=")
    takes = [option for option in ALGORITHMS[name].options if option != "root"]
    if key not in takes:
        raise UserError(f"{name} has no option {shown(key)}; it takes {', '.join(takes) or 'none'}")
    try:
        numbers = tuple(int(number) for number in value.split("x"))
    except ValueError:
        numbers = ()
    if not numbers or (key != "dims" and len(numbers) > 1):
        example = "dims=2x4" if key == "dims" else f"{key}=4"
        raise UserError(f"{name} {shown(word)}: write {example}")
    return key, numbers if key == "dims" else numbers[0]


def _spelled(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def program_of(  # noqa: PLR0913  what an operation and its group are
    algorithms: Algorithms,
    op: str,
    *,
    size: int,
    ranks: int,
    root: int = 0,
    per_node: int | None = None,
    order: tuple[int, ...] = (),
) -> Chosen | None:
    """The program of an operation; None for the transport's own.

    size      bytes of the whole vector, on which all ranks agree
    per_node  ranks of a node (`placement`), for algorithms that ask for it
    order     ranks, node after node; empty: they are in this order

    Raises UserError where the algorithm cannot use so many ranks.
    """
    text = getattr(algorithms, op)
    if not text or ranks == 1:
        return None
    groups = f"{ranks // per_node}x{per_node}" if per_node else ""
    mine = [rule for rule in rules(op, text) if rule.groups == groups]
    mine = mine or [rule for rule in rules(op, text) if not rule.groups]
    rule = next((rule for rule in mine if size <= rule.most), None)
    return _built(rule, ranks, root, per_node, order) if rule and rule.name else None


@cache
def _built(
    rule: Rule, ranks: int, root: int, per_node: int | None, order: tuple[int, ...] = ()
) -> Chosen:
    options, takes = dict(rule.options), ALGORITHMS[rule.name].options
    hierarchy = "per_node" in takes
    if "root" in takes:
        options["root"] = order.index(root) if order and hierarchy else root
    if per_node and 1 < per_node < ranks and hierarchy:  # else there is no hierarchy
        options.setdefault("per_node", per_node)
    shown_options = tuple((key, value) for key, value in options.items() if key != "root")
    spelled = str(rule._replace(options=shown_options))
    built = build(rule.name, ranks, **options)
    return Chosen(dealt(built, order) if order and hierarchy else built, spelled)


def unusable(algorithms: Algorithms, op: str, ranks: int) -> Iterator[str]:
    """Yields why an operation's algorithms cannot run on so many ranks."""
    text = getattr(algorithms, op)
    for rule in rules(op, text) if text and ranks > 1 else ():
        sizes = [int(size) for size in rule.groups.split("x") if size] or [ranks]
        try:
            if rule.name and prod(sizes) == ranks:
                _built(rule, ranks, 0, sizes[1] if rule.groups else None)
        except UserError as problem:
            yield str(problem)


def ranks_per_node(nodes: Sequence[int]) -> int | None:
    """Ranks of a node, where the ranks of a group fill nodes one after the other, equally.

    nodes  the node of each rank of the group

    >>> [ranks_per_node(nodes) for nodes in ([0, 0, 1, 1], [0, 1, 2], [0, 0], [0, 1, 0, 1])]
    [2, 1, 2, None]
    """
    size = next((n for n, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    blocks = [set(nodes[at : at + size]) for at in range(0, len(nodes), size or 1)]
    alike = len(nodes) % max(size, 1) == 0 and all(len(block) == 1 for block in blocks)
    apart = len(set(nodes)) == len(blocks)
    return size if alike and apart and size else None


def placement(nodes: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
    """Ranks of a node, where all nodes have as many, and the ranks in the order of nodes; empty
    where they are in it.

    nodes  the node of each rank of the group

    >>> placement([0, 1, 0, 1]), placement([0, 0, 1, 1]), placement([0, 1, 1])
    ((2, (0, 2, 1, 3)), (2, ()), (None, ()))
    """
    if each := ranks_per_node(nodes):
        return each, ()
    order = tuple(sorted(range(len(nodes)), key=lambda rank: nodes[rank]))
    each = ranks_per_node([nodes[rank] for rank in order])
    return (each, order) if each else (None, ())


# -- sizes -----------------------------------------------------------------------------


def chunk_sizes(program: Program, counts: Sequence[int]) -> list[int]:
    """Elements of each chunk.

    counts  elements of each block of the operation: of each rank's; in an all-to-all of each
            pair's, the sender first; of the whole vector where there are no blocks
    """
    each = program.chunks // len(counts)
    return [size for count in counts for size in split(int(count), each)]


def sent_to(program: Program, rank: int, sizes: Sequence[int]) -> Counter[int]:
    """Elements that `rank` sends to each of the others.

    sizes  of the chunks
    """
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    sent: Counter[int] = Counter()
    for step in program.steps[rank]:
        if step.kind == "send":
            sent[step.peer] += sum(bounds[stop] - bounds[start] for start, stop in step.spans)
    return sent
