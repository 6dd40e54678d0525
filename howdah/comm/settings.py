"""The environment variables of the collectives: the compiler, and the folder of its output.

`howdah.comm` is also used without the rest of howdah, in programs where no command of howdah has
read the environment. Only this module of the package reads it.

    CC                             the C compiler, `cc` by default; may contain flags
    HOWDAH_CACHE, XDG_CACHE_HOME   the folder that contains the cache folder `howdah`; the first
                                   one that is set is used
    TORCHELASTIC_RESTART_COUNT     how often torchrun has started these ranks again
    HOWDAH_SECRET_FILE             the file of the run's secret (`secret.py`)
    MASTER_ADDR                    the machine that keeps the launcher's store
    WORLD_SIZE                     how many ranks the launcher has started
    TORCHELASTIC_USE_AGENT_STORE   whether torchrun keeps the store itself
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from howdah.base.errors import UserError, shown


@dataclass(frozen=True)
class Settings:
    """The settings of the collectives.

    compiler  the command and its flags
    cache     the cache folder, which may not exist yet
    restart   how often these ranks were started again, as text
    secret    the file of the run's secret; None: it has none
    head      the name or address of the machine that keeps the launcher's store; may be empty
    world     how many ranks a launcher has started; None: there is no launcher
    """

    compiler: tuple[str, ...]
    cache: Path
    restart: str = "0"
    secret: Path | None = None
    head: str = ""
    world: int | None = None
    agent: bool = False


def read_settings() -> Settings:
    """The settings in the environment of this process. Raises UserError."""
    compiler = os.environ.get("CC", "")
    try:
        words = tuple(shlex.split(compiler)) or ("cc",)
    except ValueError as error:
        raise UserError(
            f"CC is {shown(compiler)}, which is no command ({error}); it names the C compiler, and "
            "may be left out"
        ) from None
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    secret = os.environ.get("HOWDAH_SECRET_FILE")
    head = os.environ.get("MASTER_ADDR", "")
    ranks = os.environ.get("WORLD_SIZE", "")
    world = int(ranks[:9]) if ranks.isdecimal() else None
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    file = Path(secret) if secret else None
    return Settings(words, cache_folder(), restart, file, head, world, agent)


def cache_folder() -> Path:
    """howdah's cache folder of this user, whether it is there or not. Raises UserError."""
    base = os.environ.get("HOWDAH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "howdah"
    except RuntimeError:  # a container's user who has no name
        raise UserError(
            "there is no home folder for the cache: HOME is not set, and the system does not know "
            f"user {os.geteuid()}; name a folder as HOWDAH_CACHE"
        ) from None
