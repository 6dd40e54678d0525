"""Output of drawings and traces: to the screen, or to the file that a user names.

Whether the file can be written is checked first. A simulation may take a while, and the user should
not learn only after it that the folder does not exist.
"""

import os
from pathlib import Path

from howdah.base.errors import UserError, named
from howdah.base.files import kind_of, path_problem


def require_place(file: Path | None) -> None:
    """Raises UserError if `file` cannot be written.

    For instance, its folder does not exist, or it is a folder itself. None, the screen, is valid.
    """
    if file is None:
        return
    if problem := path_problem(str(file)):
        raise UserError(f"cannot write {named(file)}: {problem}")
    if kind_of(file) == "folder":
        raise UserError(f"cannot write {named(file)}: it is a folder; name a file in it")
    if (kind := kind_of(file.parent)) != "folder":
        what = "is a file, and no folder" if kind == "file" else f"{kind}; make it first"
        raise UserError(f"cannot write {named(file)}: {named(file.parent)} {what}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"cannot write {named(file)}: you may not; name a file elsewhere")


def require_svg(file: Path | None) -> None:
    """Raises UserError if a drawing cannot be written to `file`, or its name is that of another
    format.
    """
    require_place(file)
    if file is not None and file.suffix.lower() not in ("", ".svg"):
        better = named(file.with_suffix(".svg"))
        raise UserError(f"cannot write {named(file)}: drawings are SVG; name it {better}")


def put(drawn: str, file: Path | None, *, told: bool = True) -> None:
    """Prints a drawing, or writes it to `file`, and tells so. Raises UserError if that is
    impossible.
    """
    if file is None:
        print(drawn)
        return
    require_place(file)
    try:
        # O_NONBLOCK: opening a pipe that no process reads is an error at once, and does not block.
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
        with open(handle, "w", encoding="utf-8") as stream:
            os.set_blocking(handle, True)
            stream.write(drawn)
    except OSError as error:
        raise UserError(
            f"cannot write {named(file)}: {error.strerror}; name a file elsewhere"
        ) from error
    if told and kind_of(file) == "file":
        print(f"written {file}")
