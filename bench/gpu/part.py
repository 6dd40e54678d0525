"""Runs one part in this process; `run.py` starts it.

python bench/gpu/part.py A --out FILE --seconds 60 [--cpu] [--site FOLDER]
"""

import argparse
import sys
import warnings
from importlib import import_module
from pathlib import Path
from time import monotonic

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the package of this checkout, installed or not
sys.path.insert(0, str(HERE))

MODULES = {
    "A": "ceilings",
    "B": "parity",
    "C": "lanes",
    "D": "shared",
    "E": "native",
    "F": "speed",
    "G": "peers",
    "H": "experts",
    "I": "tiers",
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("letter", choices=MODULES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--site", help="a folder of packages that this Python may lack")
    given = parser.parse_args(words)
    until = monotonic() + given.seconds
    if given.site:
        sys.path.append(given.site)  # behind what is installed

    import torch
    from rows import Place, Report

    warnings.simplefilter("ignore")
    torch.set_num_threads(1 if given.cpu else torch.get_num_threads())
    device = torch.device("cpu") if given.cpu else torch.device("cuda", 0)
    if not given.cpu:
        torch.cuda.set_device(device)
    place, module = Place(device, until), import_module(MODULES[given.letter])
    module.measure(place, Report(given.out, module.ROWS, place))


if __name__ == "__main__":
    main()
