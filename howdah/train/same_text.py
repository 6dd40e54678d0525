"""Whether all ranks train on the same tokens. Machines that share no folder each make their own, of
what is under a path there; the checksums of the tokens are compared, not names or times of files.
"""

import json
import platform
from zlib import crc32

from howdah.base.errors import UserError
from howdah.checkpoint.gather import exchange
from howdah.parallel.mesh import Mesh
from howdah.text.contents import contents
from howdah.text.sources import Data, of_each, texts
from howdah.text.tokens import Corpus


def require_same_text(mesh: Mesh, corpus: Corpus, data: Data) -> None:
    """Raises UserError unless all ranks have the same tokens; it names a machine and its text."""
    # The ranks compare 32 bits by a sum, which a float64 holds exactly for up to 2²¹ ranks: equal
    # numbers add up to a multiple of each.
    mine = float(crc32(json.dumps(tokens_of(corpus)).encode()))
    (total,) = mesh.world.sum_scalars([mine])
    if total != mine * mesh.world.size:
        raise UserError(
            f"the ranks have different text: {difference(mesh, corpus, data)}; give all machines "
            "the same files"
        )


def tokens_of(corpus: Corpus) -> list[object]:
    """What equal tokens have in common."""
    return [corpus.fingerprint, corpus.end, *corpus.checksums]


def difference(mesh: Mesh, corpus: Corpus, data: Data) -> str:
    """What another machine has otherwise than rank 0's, in words. All ranks call together."""
    names = [f"{key.partition('[')[0]} {source.path}" for key, source in texts(data)]
    mine = platform.node(), tokens_of(corpus), of_each(data, contents)
    first, *others = [json.loads(said) for said in exchange(mesh.world, json.dumps(mine))]
    rank, other = next((r, one) for r, one in enumerate(others, 1) if one[1] != first[1])
    where = f"rank {rank} on {other[0]} and rank 0 on {first[0]}"
    if other[1][0] == first[1][0]:  # the tokenizer: then checksums of tokens tell which
        parts = [*(f"data.sources {name}" for name in corpus.names), "the held-out text"]
        pairs = zip(parts, other[1][2:], first[1][2:], strict=False)
    else:
        pairs = zip(names, other[2], first[2], strict=False)
    unlike = [name for name, theirs, own in pairs if theirs != own]
    return f"{where} have other contents in {', '.join(unlike) or 'their tokenizers'}"
