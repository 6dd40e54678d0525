"""Everything below a folder, in an order that machines share."""

import os
from collections.abc import Iterator
from pathlib import Path

from howdah.base.errors import UserError
from howdah.base.files import kind_of

MANY_FILES = 4_000_000  # more files below a source: a whole disk rather than a folder of text
NONE: frozenset[str] = frozenset()


def walk(root: Path, without: set[str] | frozenset[str] = NONE) -> Iterator[tuple[Path, str]]:
    """Yields (path, kind) of everything below `root` that is not a folder, in sorted order.

    Hidden names and folders named in `without` are left out; links to folders are not followed.
    Raises UserError when there are more than MANY_FILES entries.
    """
    seen = 0
    for folder, folders, names in os.walk(root, onerror=unreadable_path):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in without)
        seen += len(folders) + len(names)
        if seen > MANY_FILES:
            raise UserError(
                f"{root} holds more than {MANY_FILES:,} files; name a folder of text in it"
            )
        for name in sorted(names):
            if not name.startswith("."):
                path = Path(folder, name)
                yield path, kind_of(path)


def unreadable_path(error: OSError, path: str = "") -> None:
    """Raises UserError: a folder that was silently left out would change the corpus.

    path  what was read, where the error does not say it
    """
    name = error.filename or path
    raise UserError(
        f"cannot read {name}: {error.strerror}; make it readable, or name another folder"
    ) from error
