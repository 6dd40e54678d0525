"""The documents of a micro-batch, as attention takes them.

Several documents are packed into a row, and a token attends only to earlier tokens of its own
document. Two rows of 8 tokens, of which the second holds documents of 5 and 3:

    numbers  0 0 0 0 0 0 0 0          starts   0 8 13 16: where documents begin among the 16 tokens,
             1 1 1 1 1 2 2 2                   and where the last ends

The same rows of documents have four forms:

    Spans   on a CPU: numbers of Python. Attention calls a kernel for each document, so pairs of
            tokens that the mask drops are not computed (49 ms instead of 201 at 2048 tokens)
    Cuts    `starts` as a tensor, for kernels of GPUs that take documents of any lengths, and for
            compiled blocks: a block is compiled once, however its rows are cut
    dense   a mask [b, 1, s, s], for kernels that know neither
    Blocks  where a rank has some of the tokens of each row (`parallel/context_ring.py`)

Where every row is one document, there is no mask at all (None): attention is causal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from howdah.model.islands import Drop
from howdah.model.relative import Seen


@dataclass(frozen=True)
class Spans:
    """Groups of neighbouring rows whose documents have equal lengths.

    rows     number of rows of each group
    lengths  lengths of the documents in a row, for each group

    For example, rows of 8 tokens, of which only row 3 holds two documents:

    rows     3     1       2
    lengths  (8,)  (5, 3)  (8,)
    """

    rows: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]


class Cuts(NamedTuple):
    """Documents as a tensor.

    starts  [n + 1] int32: where each document begins among the b·s tokens of the micro-batch, row
            after row, and b·s
    length  positions of a row: no document is longer
    """

    starts: Tensor
    length: int


class Rectangle(NamedTuple):
    """Queries of some rows, and keys to which they attend. `asking` and `asked` take them from
    tensors [b, heads, s, …].
    """

    rows: slice
    queries: slice
    keys: slice

    @property
    def asking(self) -> tuple[slice, slice, slice]:
        return self.rows, slice(None), self.queries

    @property
    def asked(self) -> tuple[slice, slice, slice]:
        return self.rows, slice(None), self.keys


@dataclass(frozen=True)
class Blocks:
    """What a rank's queries attend to, where the tokens of each row are on several ranks.

    squares  the documents of its own tokens: queries and keys are the same
    others   by rank, what they attend to of its tokens; of its own index, nothing
    """

    squares: tuple[Rectangle, ...]
    others: tuple[tuple[Rectangle, ...], ...]


class Dropping(NamedTuple):
    """Documents, for attention that drops some of its probabilities (`model/unfused.py`).

    mask   dense [b, 1, s, s], or what the stacks of an encoder-decoder see; None: every row is one
           document
    drop   of the queries
    first  the number of the first head that is here
    heads  of the whole model
    """

    mask: "Tensor | Seen | None"
    drop: Drop
    first: int
    heads: int


Mask = Spans | Cuts | Blocks | Dropping | Seen | Tensor | None


def one_document_each(documents: Tensor | npt.NDArray[np.int32]) -> bool:
    """Whether every row of document numbers [b, s], which ascend and are on the CPU, is one
    document.
    """
    first, last = documents[:, 0], documents[:, -1]
    return not bool((first - last).any())


def document_starts(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The `starts` of Cuts for document numbers [b, s]; a row begins a document of its own."""
    new = np.ones(documents.shape, bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return np.append(np.flatnonzero(new), documents.size).astype(np.int32)


def cut_documents(documents: Tensor, device: torch.device, length: int) -> Mask:
    """The attention mask of a micro-batch on `device`, whose rows have `length` positions.

    documents  [b, s] document numbers, ascending in a row, on the CPU or on `device`; or [n + 1]
               the `starts` of Cuts, on `device`. What is on another device than the CPU is not
               looked at: the host would wait for it

    Returns None for plain causal attention over whole rows, Spans on a CPU, else Cuts.
    """
    if documents.ndim == 1:
        return Cuts(documents, length)
    if not documents.is_cpu:
        return dense_mask(documents)
    if one_document_each(documents):
        return None
    starts = document_starts(documents.numpy())
    if device.type != "cpu":
        return Cuts(torch.from_numpy(starts).to(device), length)
    return spans_of(starts.tolist(), length)


def cut_to_tensors(documents: Tensor, device: torch.device, length: int) -> Mask:
    """As `cut_documents`, with Cuts on a CPU, too: for compiled blocks. torch.compile is told that
    the number of documents varies, or it would compile once for the first number and once more.
    """
    if documents.ndim > 1 and documents.is_cpu and not one_document_each(documents):
        documents = torch.from_numpy(document_starts(documents.numpy())).to(device)
    mask = cut_documents(documents, device, length)
    if isinstance(mask, Cuts):
        torch._dynamo.mark_dynamic(mask.starts, 0)
    return mask


def spans_of(starts: Sequence[int], length: int) -> Spans:
    """Cuts as Spans: `starts` as numbers of the host, and positions of a row."""
    by_row = groupby(pairwise(starts), key=lambda span: span[0] // length)
    lengths = [tuple(stop - start for start, stop in spans) for _, spans in by_row]
    alike = [(len(list(rows)), cut) for cut, rows in groupby(lengths)]
    return Spans(tuple(rows for rows, _ in alike), tuple(cut for _, cut in alike))


def document_numbers(cuts: Cuts, rows: int) -> Tensor:
    """Document numbers [rows, s], made on the device of `cuts`."""
    tokens = torch.arange(rows * cuts.length, device=cuts.starts.device, dtype=torch.int32)
    return torch.bucketize(tokens, cuts.starts, right=True).view(rows, cuts.length)


def dense_mask(documents: Tensor) -> Tensor:
    """A mask [b, 1, s, s] that is True where a query (row) may attend to a key (column)."""
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()
