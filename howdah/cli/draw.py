"""`howdah draw collective`: the program of a collective algorithm, as text or SVG."""

import re
from typing import Annotated, Any

import typer

from howdah.base.errors import UserError, shown
from howdah.cli.plan import Svg
from howdah.collectives.registry import ALGORITHMS, build
from howdah.draw.collective import draw
from howdah.draw.collective_svg import draw_svg
from howdah.draw.pictures import put, require_place

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
    require_place(svg)
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
