"""The options and the output table of `howdah bench collectives`: pure functions, without torch.

Sizes are those of nccl-tests: the bytes of the full vector, of which each rank has a share in
reduce-scatter, all-gather, gather, scatter and all-to-all. K, M and G are powers of 1024.

    8,64K,1M     these sizes           8:64M      from 8 bytes to 64 MiB, doubling
                                       8:64M:4    from 8 bytes to 64 MiB, times four

From the time t of n bytes on N ranks follow two bandwidths, with the factors of nccl-tests
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md; gather and scatter use that of its all-gather):

    algorithm    n / t
    bus          n / t · factor: the bytes that must enter (or leave) the busiest rank, per second;
                 it does not depend on the number of ranks, so it can be compared with a link's rate

Through shared memory there is less to do than through wires: ranks may read each other's tensors.
At the least, every byte of the inputs is read once and every byte of the results is written once,
and the ranks divide this work evenly. COPIES holds this work divided by n, in copies, where a copy
reads one byte and writes one. (A sum reads more than it writes, and reading is cheaper; so an
in-place reduction may be a little faster against this bound than a copy.)

    all_reduce, N ranks    reads N·n, writes N·n       (N·n + N·n) / 2 / N = n on each rank
    broadcast              reads n, writes (N - 1)·n   N·n / 2 / N = n / 2
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from howdah.base.errors import UserError, nearest

FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "reduce": lambda ranks: 1.0,
    "gather": lambda ranks: (ranks - 1) / ranks,
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
}
COPIES: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 1.0,
    "reduce_scatter": lambda ranks: (ranks + 1) / ranks / 2,
    "all_gather": lambda ranks: 1 / 2,
    "broadcast": lambda ranks: 1 / 2,
    "reduce": lambda ranks: (ranks + 1) / ranks / 2,
    "gather": lambda ranks: (ranks - 1) / ranks**2,
    "scatter": lambda ranks: (ranks - 1) / ranks**2,
    "all_to_all": lambda ranks: 1.0,
}
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
FLOATS = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
REDUCIBLE = {**FLOATS, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8}
WIDTHS = {**REDUCIBLE, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8}
TRANSPORTS = ("engine", "torch")

RANKS = 64  # the most ranks on one machine, which is also the limit of the engine
ELEMENTS = 1 << 30  # the most elements of a tensor
REPEATS = 1000  # the most blocks
HELD = 10  # the most bytes that a rank holds, in multiples of the largest tensor


@dataclass(frozen=True)
class Request:
    """The measurements that the user asked for.

    ops        names of collectives
    sizes      bytes, ascending
    dtype      the name of a torch dtype
    ranks      processes to start
    repeats    blocks for each operation and size
    transport  engine or torch; None for the best that is available
    arena      whether tensors in the engine's arena are measured too
    block      seconds that a block should take, preparations included
    algorithm  of `comm.algorithm`, such as ring or auto; empty: the direct way
    """

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    ranks: int
    repeats: int
    transport: str | None = None
    arena: bool = False
    block: float = 0.05
    algorithm: str = ""

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.dtype]


@dataclass(frozen=True)
class Row:
    """The result of one operation at one size. The time of a block is its mean time per call.

    bytes     the size of the full vector
    place     own: tensors of the process, in place where the operation can be; arena: tensors in
              the engine's arena
    seconds   time of each block on its slowest rank
    bound     times of as many blocks of the bound, which only moves the bytes that must be moved
    wrong     number of wrong elements in the results
    """

    op: str
    bytes: int
    ranks: int
    dtype: str
    transport: str
    place: str
    seconds: tuple[float, ...]
    bound: tuple[float, ...]
    wrong: int

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second of the best block."""
        return self.bytes / self.best

    @property
    def bus_bandwidth(self) -> float:
        return FACTORS[self.op](self.ranks) * self.algorithm_bandwidth

    @property
    def bound_bandwidth(self) -> float:
        """The bus bandwidth of an operation that takes as long as the best block of the bound."""
        return FACTORS[self.op](self.ranks) * self.bytes / min(self.bound)

    @property
    def share(self) -> float:
        """Speed of the best block relative to the bound: 1 is as fast as only moving the bytes."""
        return min(self.bound) / self.best


def bound_bytes(op: str, size: int, ranks: int, *, shared: bool) -> int:
    """The bytes that the bound copies on every rank (`shared`), or sends through one socket."""
    return max(1, round(size * (COPIES if shared else FACTORS)[op](ranks)))


# -- the request ----------------------------------------------------------------------


def read_request(
    op: str, sizes: str, *, dtype: str, ranks: int, repeats: int, transport: str | None = None
) -> Request:
    """The request that the texts of the command's options describe. Raises UserError."""
    ops = read_ops(op)
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype)
    if dtype not in WIDTHS:
        raise UserError(f"--dtype: there is no dtype {dtype!r}{nearest(dtype, WIDTHS)}")
    for name in ops:
        if name in REDUCING and dtype not in REDUCIBLE:
            raise UserError(f"--dtype: {dtype} cannot be reduced, as {name} does; take float32")
    if transport is not None and transport not in TRANSPORTS:
        close = nearest(transport, TRANSPORTS)
        raise UserError(f"--transport: there is no transport {transport!r}{close}")
    if not 2 <= ranks <= RANKS:
        raise UserError(f"--ranks {ranks}: collectives are measured on 2 to {RANKS} ranks")
    if not 1 <= repeats <= REPEATS:
        raise UserError(f"--repeats {repeats}: take 1 to {REPEATS} blocks")
    found = read_sizes(sizes)
    for size in found:
        if size % WIDTHS[dtype]:
            raise UserError(
                f"--sizes: {size} bytes are no whole number of {dtype} elements, which have "
                f"{WIDTHS[dtype]}"
            )
        if size // WIDTHS[dtype] > ELEMENTS:
            raise UserError(f"--sizes: {size} bytes are over {ELEMENTS} elements of {dtype}")
    return Request(ops, found, dtype, ranks, repeats, transport)


def read_ops(text: str) -> tuple[str, ...]:
    """The operations of "all_reduce,broadcast", or of "all". Raises UserError."""
    if text == "all":
        return tuple(FACTORS)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in FACTORS:
            raise UserError(f"--op: there is no collective {name!r}{nearest(name, FACTORS)}")
    return names


def read_sizes(text: str) -> tuple[int, ...]:
    """Bytes, ascending, of a list or a range.

    >>> read_sizes("64K,8")
    (8, 65536)
    >>> read_sizes("8:1K:4")
    (8, 32, 128, 512)
    """
    if ":" not in text:
        return tuple(sorted({_size(word) for word in text.split(",")}))
    first, last, *by = text.split(":")
    factor = by[0] if by else "2"
    if len(by) > 1 or not re.fullmatch(r"[0-9]{1,4}", factor) or int(factor) < 2:
        raise UserError(f"--sizes {text!r}: write a range as FIRST:LAST or FIRST:LAST:FACTOR")
    size, end, found = _size(first), _size(last), []
    if size > end:
        raise UserError(f"--sizes {text!r}: the first size is larger than the last")
    while size <= end:
        found.append(size)
        size *= int(factor)
    return tuple(found)


def _size(word: str) -> int:
    match = re.fullmatch(r"\s*([0-9]{1,15})([KMG]?)(?:i?B)?\s*", word, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UserError(f"--sizes: {word!r} is no size; write it like 8, 64K, 16M or 1G (of 1024)")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def check_memory(request: Request, free: int | None) -> None:
    """Raises UserError if the ranks would hold more than `free` bytes; None: it is not known."""
    needed = HELD * request.ranks * request.sizes[-1]
    if free is not None and needed > free:
        raise UserError(
            f"--sizes: {request.sizes[-1]} bytes on {request.ranks} ranks need up to "
            f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free: take smaller sizes or "
            "fewer ranks"
        )


# -- the table ------------------------------------------------------------------------

FORM = "{:<14} {:>11} {:>6} {:>11} {:>11} {:>9} {:>9} {:>8} {:>7}"
COLUMNS = ("op", "bytes", "place", "best us", "median us", "alg GB/s", "bus GB/s", "bound %")


def heading(row: Row) -> Iterator[str]:
    """The lines above the table."""
    bound = "a copy in memory on all ranks at once"
    if row.transport == "torch":
        bound = "one message through a TCP socket"
    blocks = counted(len(row.seconds), "block")
    yield f"{row.ranks} ranks, {row.transport}, {row.dtype}; {blocks}; bound: {bound}"
    yield FORM.format(*COLUMNS, "wrong")


def line(row: Row) -> str:
    """One line of the table."""
    times = (f"{1e6 * seconds:.2f}" for seconds in (row.best, median(row.seconds)))
    speeds = (f"{speed / 1e9:.4f}" for speed in (row.algorithm_bandwidth, row.bus_bandwidth))
    share = f"{100 * row.share:.1f}"
    return FORM.format(row.op, row.bytes, row.place, *times, *speeds, share, row.wrong)


def verdict(rows: Sequence[Row]) -> str:
    """The line below the table."""
    wrong = sum(row.wrong for row in rows)
    if not wrong:
        return "every element was what it must be"
    return f"{counted(wrong, 'element')} wrong: the times of such a row mean nothing"


def counted(number: int, what: str) -> str:
    """A number and a noun, in the plural where the number is not 1.

    >>> counted(1, "block"), counted(3, "block")
    ('1 block', '3 blocks')
    """
    return f"{number} {what}" + "s" * (number != 1)
