"""The run's secret: bytes that only the processes of one run have, so that no stranger joins them.

    several machines   the file that HOWDAH_SECRET_FILE names on each of them, with equal contents:
                       the user puts it there, or what starts the run
    one machine        random bytes in the process that starts the run, which its children inherit
                       (`fork_server.py`, `train/serving.py`)

It goes through no store, no command line and no value of the environment, and no message contains
it: processes prove that they have it (`handshake.py`). Without one, processes on several machines
are connected only where the user trusts their network (`comm.trust = "network"`), and every process
proves its possession of the empty secret, which anybody has.
"""

import os
import stat
from pathlib import Path

from howdah.base.errors import UserError, named
from howdah.comm.settings import Settings

LEAST, MOST = 32, 1024  # bytes of a secret: less could be guessed, more is another file
TRUSTS = ("secret", "network")  # what `comm.trust` may be
NOBODY = b""  # the secret of those who trust their network
NO_SECRET = (
    "processes on several machines join by a secret: write it on one (head -c 32 /dev/urandom "
    ">secret; chmod 600 secret), copy it to the others, and name it as HOWDAH_SECRET_FILE on each; "
    "or, on a network where you trust everybody, take comm.trust=network"
)


def secret_of(settings: Settings, trust: str) -> bytes:
    """The secret of this run, for processes on several machines. Raises UserError if it has none,
    and `trust` is not "network".

    trust  one of TRUSTS; with "network" a secret is used where there is one
    """
    if settings.secret is not None:
        return read_secret(settings.secret)
    if trust == "network":
        return NOBODY
    raise UserError(NO_SECRET)


def read_secret(path: Path) -> bytes:
    """The bytes of a secret's file. Raises UserError unless it is a file of this user, closed to
    all others, of LEAST to MOST bytes.
    """
    said = f"the secret {named(path)} (HOWDAH_SECRET_FILE)"
    secret = read_own(path, said, MOST + 1)
    if not LEAST <= len(secret) <= MOST:
        length = f"over {MOST}" if len(secret) > MOST else len(secret)
        raise UserError(
            f"{said} has {length} bytes: it needs {LEAST} to {MOST}, and random ones (head -c 32 "
            "/dev/urandom)"
        )
    return secret


def read_own(path: Path, said: str, most: int) -> bytes:
    """At most so many bytes of a file. Raises UserError, in which it is called `said`, unless it is
    a file of this user, closed to all others.
    """
    try:
        # The file that is checked is the one that is read. A pipe without a writer must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{said} cannot be read: {why}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{said} is no file: write {LEAST} random bytes to one, and name it")
        if found.st_uid != os.geteuid():
            raise UserError(
                f"{said} belongs to user {found.st_uid} and not to user {os.geteuid()}, who runs "
                "this: take a copy of your own"
            )
        if found.st_mode & 0o177:
            raise UserError(
                f"{said} has mode {stat.S_IMODE(found.st_mode):04o}, so that others may have read "
                "it: make a new one (chmod 600, then write it)"
            )
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)
