"""What identifies the contents of a source: the token cache is named by it, and a run that goes on
must find the same.
"""

import os
from hashlib import blake2b
from pathlib import Path

from howdah.base.files import kind_of
from howdah.text import records, synthetic, tokenised
from howdah.text.sources import STDLIB, Text, files
from howdah.text.walking import unreadable_path

# Opening a corpus should be instant. Small sources are identified by their bytes, which copying
# and `touch` do not change; hashing this many bytes takes about 0.1 s. Larger sources are
# identified by file names, sizes and modification times.
SMALL = 64 << 20


def contents(source: Text) -> str:
    """A hash that changes when the documents of a source may have changed.

    It depends on paths relative to their common folder only, so a corpus may be moved.
    """
    if source.path.startswith("hf:"):
        return records.dataset_fingerprint(
            records.dataset_by_name(source.path), f"{source.field} {source.label}".strip()
        )
    if synthetic.is_synthetic(source.path):
        return f"{source.path} of {synthetic.size_of(source.path)}"
    paths = [path for file in files(source) for path in tokenised.with_index(file)]
    root = Path(os.path.commonpath([path.parent for path in paths]))
    try:
        states = [path.stat() for path in paths]
        small = source.path == STDLIB or sum(state.st_size for state in states) <= SMALL
        target = f"\0to {source.target}" if source.target else ""
        target += f"\0label {source.label}" if source.label else ""
        kind = kind_of(Path(source.path)) == "file"
        total = blake2b(f"{source.field}\0{kind}{target}".encode(), digest_size=16)
        for path, state in zip(paths, states, strict=True):
            name = os.fsencode(path.relative_to(root))  # a file name need not be UTF-8
            total.update(b"\0%b\0%d\0" % (name, state.st_size))
            total.update(_digest(path) if small else str(state.st_mtime_ns).encode())
    except OSError as error:
        unreadable_path(error, source.path)
    return total.hexdigest()


def _digest(path: Path) -> bytes:
    return blake2b(path.read_bytes(), digest_size=16).digest()
