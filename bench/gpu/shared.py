"""D: two and four ranks on one card, through pinned memory of the host: `verify` on each layout."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parity import METHODS, PROVED, case_of, proved
from rows import Place, Report, Unavailable

from howdah.comm.spawn import Workers
from howdah.comm.transport import Transport

LAYOUTS = (
    "dp2 x2",
    "dp4 zero1 x2",
    "dp2 zero2 x2",
    "dp2 zero3 x2",
    "tp2 sp x2",
    "pp2 1f1b x4",
    "pp2 zb-h1 x4",
    "dp2 tp2 x2",
    "dp2 pp2 zero1 x4",
)
WIRES = ("engine", "torch")  # of the host
ROWS = {
    **{f"{words}, {wire}": PROVED for wire in WIRES for words in LAYOUTS},
    "CUDA memory shared by processes": ("equal",),
}


def measure(place: Place, report: Report) -> None:
    with Workers(4, device=place.device.type) as four:
        for wire in WIRES:
            for words in LAYOUTS:
                case = case_of(words, method=METHODS["float64"], device=place.device, steps=1)
                skip = place.cpu and (wire, words) > (WIRES[1], LAYOUTS[0])  # CI has seen them
                work = missing if skip else partial(proved, case, four, transport=wire)
                report.measure(f"{words}, {wire}", work)
    report.measure("CUDA memory shared by processes", partial(ipc, place))


def missing() -> dict[str, Any]:
    raise Unavailable("without a GPU the tests of the layouts do this")


def ipc(place: Place) -> dict[str, Any]:
    """Whether one process can read the memory of another on this card."""
    if place.cpu:
        raise Unavailable("there is no memory of a card")
    with tempfile.TemporaryDirectory() as folder, Workers(2, device="cuda") as two:
        answers = two.run(lend, Path(folder) / "handle")
    return {"equal": answers[1]}


def lend(transport: Transport, path: Path) -> bool:
    """For workers: rank 0 lends a tensor, and rank 1 reads it."""
    x = torch.arange(1000.0, device="cuda")
    if transport.rank == 0:
        torch.cuda.synchronize()
        handle = x.untyped_storage()._share_cuda_()
        path.write_text(json.dumps([v.hex() if isinstance(v, bytes) else v for v in handle]))
    transport.barrier()
    equal = True
    if transport.rank == 1:
        device, *rest = json.loads(path.read_text())
        parts = [bytes.fromhex(v) if isinstance(v, str) else v for v in rest]
        storage = torch.UntypedStorage._new_shared_cuda(device, *parts)
        theirs = torch.empty(0, device="cuda").set_(storage, 0, (1000,))
        equal = torch.equal(theirs, x)
    transport.barrier()
    return equal
