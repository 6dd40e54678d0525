"""Run folders that machines do not share: each keeps what its own ranks write.

    runs/two on machine a             runs/two on machine b
      run.toml, tokenizer.json          run.toml, tokenizer.json
      log.txt, metrics.jsonl            checkpoints/step-00000100/
      checkpoints/step-00000100/          index.json
        index.json                        rank-00002.safetensors
        rank-00000.safetensors            rank-00003.safetensors
        rank-00001.safetensors
      export/

Whether they share it is found out when the run starts. A resume brings each machine the files that
its ranks need; the end of a run brings all to rank 0's, which exports.
"""

import platform
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from howdah.base.atomic import write_text
from howdah.base.errors import UserError
from howdah.base.files import read_text
from howdah.base.quantities import spell
from howdah.checkpoint.facts import facts
from howdah.checkpoint.folders import INDEX, step_folder
from howdah.checkpoint.gather import bring, choose_apart, held, needed, tell
from howdah.checkpoint.load import Checkpoint
from howdah.checkpoint.sites import Board, Team, find_sites, one_site
from howdah.parallel.mesh import Mesh
from howdah.plan.boxes import Box
from howdah.plan.flat_buffers import Orders, boxes
from howdah.plan.sharding import local_buffers
from howdah.train.console import Say
from howdah.train.job import Job
from howdah.train.run_folder import LOCK, clean_run, lock

RUN = "run.toml"


def team_of(job: Job, mesh: Mesh, stack: ExitStack, say: Say) -> Team:
    """Finds which ranks share the run folder, which rank 0 has locked; `stack` keeps the locks of
    the others' own folders. All ranks call together. Raises UserError.
    """
    with mesh.counters.aside():
        sites = find_sites(job.folder / LOCK, mesh.world, mesh.wires.nodes)
        store = mesh.among.aside
        if not any(sites) or store is None:
            return one_site(mesh.rank, mesh.layout.world)
        team = Team(mesh.rank, sites, Board(store), platform.node())
        say(f"folders     {len(team.leaders)} machines keep what their own ranks write")
        mine = job.folder / RUN
        text = read_text(mine) if mesh.rank == 0 and mine.is_file() else ""
        text = tell(mesh.world, text, 0)
    if team.leads and mesh.rank:
        stack.enter_context(lock(job.folder))
        if text:
            write_text(mine, text)
    return team


def find_apart(job: Job, mesh: Mesh, team: Team, say: Say) -> int | None:
    """The step to go on from, of which this machine then has all that its ranks need; None: no
    machine has a checkpoint. All ranks call together. Raises UserError.
    """
    folder = job.folder / "checkpoints"
    if team.leads:
        clean_run(job.folder)
    with mesh.counters.aside():
        found = choose_apart(folder, mesh.world, team, say)
        if found is None:
            return None
        wanted: dict[int, set[str]] = {leader: set() for leader in team.leaders}
        checkpoint = Checkpoint(step_folder(folder, found.index.step), found.index)
        by = job.orders(facts(checkpoint).routed.by_block)
        for rank, leader in enumerate(team.sites):
            wanted[leader] |= needed(found.index, _boxes(job, rank, by))
        _told(bring(folder, found, mesh.world, team, wanted), "the others' machines", say)
    return found.index.step


def bring_home(folder: Path, step: int, mesh: Mesh, team: Team, say: Say) -> None:
    """Brings all files of a checkpoint to rank 0's machine. All ranks call together."""
    if team.board is None:
        return
    with mesh.counters.aside():
        path = step_folder(folder, step) / INDEX
        text = tell(mesh.world, path.read_text("utf-8") if mesh.rank == 0 else "", 0)
        found = held(folder, text, mesh.world, team)
        if lost := [file.name for file in found.index.files if not found.holders[file.name]]:
            raise UserError(f"{lost[0]} of step {step} is damaged on the machine that wrote it")
        every = {0: [file.name for file in found.index.files]}
        _told(bring(folder, found, mesh.world, team, every), "rank 0's machine", say)


def _told(sent: int, to: str, say: Say) -> None:
    if sent:
        say(f"brought     {spell(sent, 'bytes')} of checkpoint files to {to}")


def _boxes(job: Job, rank: int, by: Orders) -> Iterator[tuple[str, Box]]:
    """The boxes of the weights that a rank holds, with their names."""
    for buffer in local_buffers(job.plan, rank, by):
        for segment in buffer.segments:
            yield from ((segment.name, box) for box, _ in boxes(segment))
