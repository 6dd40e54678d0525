"""`howdah init`: five questions, and a recipe that `howdah check` finds sound."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from howdah.base.atomic import write_text
from howdah.base.errors import UserError, named, pasted, shown
from howdah.cli.asking import answer
from howdah.cli.auto import cluster_of, machine_for, settled
from howdah.cli.check import sound
from howdah.cli.environment import cluster_named
from howdah.config.new_recipe import (
    PURPOSES,
    Answers,
    check_purpose,
    read_length,
    read_model,
    read_purpose,
    recipe_table,
    recipe_text,
    shown_purposes,
    usual_purpose,
    with_length,
)
from howdah.config.recipe import parse_run, plan_of
from howdah.draw.pictures import require_place
from howdah.host.facts import bf16_instructions
from howdah.machines.cluster import Cluster
from howdah.plan.layout import parse_layout
from howdah.sim.measured import profile_for
from howdah.sim.step_time import step_time
from howdah.text.sources import Data, Source, files, on_disk, unreadable

HERE = "here"
MODEL = "what model? a preset (howdah presets), or a folder of Hugging Face"
DATA = "what data? a file or folder of text, stdlib, hf:NAME, synthetic:4MB"
MACHINE = "what machine? here, or a cluster (howdah cluster list)"
USUAL_LENGTH = "500 steps"
LENGTH = "how long? such as '500 steps', '1B tokens', '2 epochs', '30 minutes'"


def init(  # noqa: PLR0913, PLR0917
    file: Annotated[Path, typer.Argument(help="the recipe to write, such as mine.toml")],
    model: Annotated[str, typer.Option(help="a preset, or a folder of Hugging Face")] = "",
    data: Annotated[str, typer.Option(help="a file or folder, stdlib, hf:NAME")] = "",
    machine: Annotated[str, typer.Option(help="here, or a cluster by its name or file")] = "",
    length: Annotated[str, typer.Option(help="such as '500 steps' or '30 minutes'")] = "",
    purpose: Annotated[str, typer.Option("--for", help=", ".join(PURPOSES))] = "",
    force: Annotated[bool, typer.Option(help="write over a file that is there")] = False,
) -> None:
    """Write a recipe from five answers. What no option says is asked on a terminal."""
    if file.suffix != ".toml":
        raise UserError(f"{named(file)} is no name of a recipe; it must end in .toml")
    require_place(file)
    if file.exists() and not force:
        raise UserError(f"{named(file)} is there already; give another name, or --force")
    asked = {"model": model, "data": data, "machine": machine, "length": length, "for": purpose}
    model = answer("model", model, MODEL, "laptop", read_model)
    data = answer("data", data, DATA, "stdlib", _read_data)
    cluster = answer("machine", machine, MACHINE, HERE, _read_machine)
    how_long = answer("length", length, LENGTH, USUAL_LENGTH, read_length)
    for_what = answer(
        "for",
        purpose,
        f"what for? {', '.join(shown_purposes())}",
        usual_purpose(model),
        lambda said: check_purpose(read_purpose(said), model),
    )
    if not sys.stdin.isatty() and not all(asked.values()):
        usual = model, data, HERE, USUAL_LENGTH, for_what
        each = zip(asked.items(), usual, strict=True)
        taken = [f"--{name} {shown(one)}" for (name, said), one in each if not said]
        print(f"no terminal to ask on, so as usual: {' '.join(taken)}")
    draft = {"name": file.stem, "model": {"preset": "laptop"}}
    machine_here = machine_for(parse_run(draft))
    found = cluster or cluster_of(parse_run(draft), machine_here)[0]
    precision = "bf16" if _has_bf16(found, here=not cluster) else "float32"
    answers = Answers(
        *(model, data, how_long, for_what), bool(found.device.cuda_names), found.devices, precision
    )
    table = recipe_table(answers)
    _require_enough(data, table["data"]["sequence_length"])
    run = parse_run({"name": file.stem, **table})
    if cluster:
        run = replace(run, cluster=machine)
    chosen = settled(run, machine_here)
    run = chosen.run
    plan = plan_of(run, parse_layout(run.layout))
    seconds = step_time(plan, found, profile_for(found, run.method)).seconds
    _write(file, recipe_text(with_length(table, answers, seconds=seconds), run, chosen.told))
    print(f"written {file}: howdah train {pasted(file)}")


def _write(file: Path, text: str) -> None:
    """Writes a recipe if it is sound. Raises UserError."""
    draft = file.with_name(f".{file.name}")
    if draft.exists():
        raise UserError(f"{named(draft)} is there already, and is written first; remove it")
    try:
        write_text(draft, text)
        lines = sound(draft, [f"name={file.stem}"], force=False)
        draft.replace(file)
    except OSError as error:
        raise UserError(f"cannot write {named(file)}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    print("\n".join(line.removeprefix(f"{draft}: ") for line in lines))


def _read_data(said: str) -> str:
    for problem in unreadable(Data(sources=(Source(path=said),)), opened=False):
        raise UserError(problem.replace("data.sources", "--data"))
    return said


def _require_enough(said: str, sequence: int) -> None:
    """Raises UserError for files too small for one sample: a token takes a byte at least."""
    source = Source(path=said)
    size = sum(path.stat().st_size for path in files(source)) if on_disk(source) else sequence + 1
    if size <= sequence:
        raise UserError(
            f"--data {shown(said)} holds {size:,} bytes, and one sample of this recipe has "
            f"{sequence:,} tokens; give more text, or a larger file"
        )


def _has_bf16(cluster: Cluster, *, here: bool) -> bool:
    """Whether the devices of a cluster, or of this machine, have arithmetic in bf16."""
    if here and not cluster.device.cuda_names:
        return bf16_instructions() != []
    return cluster.device.flops.bf16 is not None


def _read_machine(said: str) -> Cluster | None:
    """The cluster of a name; None for this machine."""
    return None if said == HERE else cluster_named(said)
