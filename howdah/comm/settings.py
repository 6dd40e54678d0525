"""What the collectives take from the environment: the compiler and the folder for its products.

`howdah.comm` is also used alone, under other people's programs, where no command of howdah has
read the environment before. This is the one place of the floor that does.

    CC                             the C compiler, `cc` unless it is set; may carry flags
    HOWDAH_CACHE, XDG_CACHE_HOME   where the cache folder `howdah` lies, in order of preference
    TORCHELASTIC_RESTART_COUNT     how often torchrun has started these ranks again
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """compiler  the command, as words; cache  the folder, which need not exist yet; restart  how
    often the ranks were started before, as text.
    """

    compiler: tuple[str, ...]
    cache: Path
    restart: str = "0"


def read_settings() -> Settings:
    """The settings of this process' environment."""
    compiler = tuple(shlex.split(os.environ.get("CC", ""))) or ("cc",)
    cache = os.environ.get("HOWDAH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folder = (Path(cache) if cache else Path.home() / ".cache") / "howdah"
    return Settings(compiler, folder, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
