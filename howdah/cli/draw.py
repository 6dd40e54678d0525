"""`howdah draw collective`: the program of a collective algorithm, as text or SVG."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from howdah.base.errors import UserError, named, shown
from howdah.base.files import read_file
from howdah.cli.plan import Svg
from howdah.collectives.registry import ALGORITHMS, build
from howdah.draw.collective import draw
from howdah.draw.collective_svg import draw_svg
from howdah.draw.experts import Heat, heat_svg, heat_text, row_of, sizes_of
from howdah.draw.pictures import put, require_svg
from howdah.train.metrics import MOST_BYTES

MOST = 64  # ranks, and pieces, of a drawing


def draw_collective(  # noqa: PLR0913, PLR0917  each is an option of the command
    name: Annotated[
        str, typer.Argument(help="such as ring or all_gather/bruck; without: all")
    ] = "",
    ranks: Annotated[int, typer.Option(help=f"1 to {MOST}")] = 4,
    root: Annotated[int | None, typer.Option(help="where a broadcast begins")] = None,
    pieces: Annotated[int | None, typer.Option(help="of a pipelined vector")] = None,
    per_node: Annotated[int | None, typer.Option(help="ranks of a node")] = None,
    dims: Annotated[str, typer.Option(help="of a torus or mesh, such as 2x4")] = "",
    svg: Svg = None,
) -> None:
    """Draw a collective algorithm: who sends what to whom, round by round."""
    require_svg(svg)
    if not name:
        print("\n".join(ALGORITHMS))
        return
    given: dict[str, Any] = {"root": root, "pieces": pieces, "per_node": per_node}
    options = {option: number for option, number in given.items() if number is not None}
    if dims:
        options["dims"] = _read_dims(dims)
    for what, number in (("--ranks", ranks), ("--pieces", 1 if pieces is None else pieces)):
        if not 1 <= number <= MOST:
            raise UserError(f"{what} is {number}; a drawing has room for 1 to {MOST}")
    program = build(name, ranks, **options)
    put(draw_svg(program) if svg else draw(program), svg)


def _read_dims(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,3}(x[0-9]{1,3}){0,7}", text):
        raise UserError(f"--dims is {shown(text)}; write sizes with x between them, such as 2x4")
    return tuple(map(int, text.split("x")))


def draw_experts(
    folder: Annotated[Path, typer.Argument(help="a run folder of a model with experts")],
    steps: Annotated[int, typer.Option(help="of the last logged steps; 0: all")] = 0,
    svg: Svg = None,
) -> None:
    """Draw how busy the experts of a run were, and where each would best be."""
    require_svg(svg)
    if steps < 0:
        raise UserError(f"--steps is {steps}; it must be at least 0, which is all")
    heat = _heat(folder, steps)
    count = max(map(len, heat.blocks.values()))
    sizes = [size for size in (2, 4, 8, 16, 32, 64) if size <= count]
    put(heat_svg(heat) if svg else heat_text(heat, sizes), svg)


def _heat(folder: Path, steps: int) -> Heat:
    """The counts in the metrics of a run. Raises UserError where there are none."""
    try:
        lines = read_file(folder / "metrics.jsonl", MOST_BYTES).splitlines()
    except OSError as error:
        raise UserError(
            f"cannot read {named(folder / 'metrics.jsonl')} ({error.strerror}); name a run folder"
        ) from None
    rows = [row for row in map(row_of, lines) if row]
    rows = [row for row in rows if sizes_of(row) == sizes_of(rows[-1])]
    rows = rows[-steps:] if steps > 0 else rows
    if not rows:
        raise UserError(f"{named(folder)} has no counts of experts: its model has none, or no step")
    blocks = {
        name: [sum(some) for some in zip(*(row["experts"][name] for row in rows), strict=True)]
        for name in rows[-1]["experts"]
    }
    return Heat(blocks, rows[0]["step"], rows[-1]["step"], len(rows))
