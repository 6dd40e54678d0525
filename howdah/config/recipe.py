"""Run: one configured training as the user writes it, and how it becomes a Job.

A recipe is a TOML file. Values that it leaves out have their defaults; the command line changes
single values by their dotted names:

    howdah train recipes/laptop.toml layout="dp2 x4" method.lr.peak=2e-3

A Run may leave values open: `dp*`, the third batch number, `device = "auto"`. `resolve_run` fills
them in, or refuses. Every table is a frozen dataclass of its floor; unknown keys are errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from howdah.base.bounds import Bound
from howdah.base.errors import UserError, named, several, shown
from howdah.base.files import kind_of, parse_toml, path_problem, read_text
from howdah.base.tables import out_of_bounds, read_table, with_new_names
from howdah.config.models import model_of
from howdah.config.overrides import Table, changed, with_key
from howdah.config.shipped import RUN, found, hidden_by, meant
from howdah.config.texts import absolute, with_texts
from howdah.plan.batch import Batch, resolve_batch
from howdah.plan.check import check_plan
from howdah.plan.comm import Comm
from howdah.plan.layout import Layout, parse_layout, resolve
from howdah.plan.method import Method, Sync
from howdah.plan.plan import Plan, for_gpus, make_plan
from howdah.plan.program import with_schedule
from howdah.plan.schedule.text import read_schedule
from howdah.plan.storage import Storage, settled
from howdah.plan.support import unsupported
from howdah.shapes.huggingface_written import kind as exported_as
from howdah.shapes.presets import preset
from howdah.shapes.shape import RENAMED as RENAMED_SIZES
from howdah.shapes.shape import ModelShape
from howdah.sim.chosen import choice_misfits, choice_problems, cuda_problem
from howdah.text.labels import label_problems
from howdah.text.sources import Data, check_sources
from howdah.train.inputs import lacking_tokenizer, text_of
from howdah.train.job import Job, Training
from howdah.train.length import LENGTHS, in_steps, is_length, read_length

LARGEST_TOML = 256 << 10  # bytes; the TOML parser needs a second for a few times as many
RENAMED = {  # keys of older recipes, and their names now
    **RENAMED_SIZES,
    "pace": "train",
    "train.keep": "train.keep_last",
    "data.sequence": "data.sequence_length",
    "data.held_out": "data.validation_share",
    "method.rate": "method.lr",
    "method.lr.warmup": "method.lr.warmup_steps",
    "method.lr.shape": "method.lr.schedule",
    "method.lr.floor": "method.lr.min_ratio",
    "method.lr.decay": "method.lr.decay_steps",
    "method.optimizer.decay": "method.optimizer.weight_decay",
    "method.optimizer.clip": "method.grad_clip",
}
AUTO = "auto"  # the layout that is searched for (`config/auto.py`)
MOST_HERE = 512  # processes that one command starts on one machine
MOST_THREADS = 8  # of one process, for each core of the machine


@dataclass(frozen=True)
class Run:
    """A training run as the user wrote it.

    name       of the run, and of its folder; by default that of the file
    model      in a recipe, the sizes of a ModelShape, or `preset = NAME` with the sizes that
               differ from it; if left out, the model is that of init_from
    seed       of weights, dropout, and the order of samples
    layout     how the run is split, such as "dp2 x4"
    cluster    the machines that a run is for: layout=auto finds the fastest layout for them, and
               `howdah check` compares it with them; None: this machine
    schedule   a file with the user's own pipeline schedule, in place of the layout's
    device     auto takes CUDA if every process has a device
    threads    of torch in each process; 0: the cores, divided by the processes
    compile    whether blocks go through torch.compile
    folder     the run folder; None: runs/NAME
    init_from  a Hugging Face folder that holds the initial weights
    init_adapter  a folder of PEFT's that holds the initial adapter, with method.adapter
    """

    name: str
    model: ModelShape
    layout: str = "single"
    cluster: str | None = None
    seed: Annotated[int, Bound(-(2**63), 2**63 - 1)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Bound(0, 1024, means="which shares the cores out")] = 0
    compile: bool = False
    folder: Path | None = None
    init_from: Path | None = None
    init_adapter: Path | None = None
    schedule: Path | None = None
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    method: Method = field(default_factory=Method)
    train: Training = field(default_factory=Training)
    comm: Comm = field(default_factory=Comm)
    storage: Storage = field(default_factory=Storage)


class WrongRun(UserError):
    """Everything that is wrong with a run, in one sentence.

    run    what can be read of it
    meant  whether its model, data and batch are those that were written
    """

    def __init__(self, problems: Sequence[str], run: Run, *, meant: bool = True) -> None:
        self.problems, self.run, self.meant = [*dict.fromkeys(problems)], run, meant
        super().__init__(several(self.problems))


@dataclass(frozen=True)
class Machine:
    """What `resolve_run` must know of the machine on which a run starts.

    world        number of processes that a launcher has started; None: the layout decides
    local_world  number of those processes on this machine
    cores        number of cores that this process may use
    cuda         number of CUDA devices
    cache        the folder for tokenised text
    no_cuda      why there are none, and what to do, where more is known than that
    """

    world: int | None
    local_world: int | None
    cores: int
    cuda: int
    cache: Path
    no_cuda: str = ""


# -- reading ---------------------------------------------------------------------


def load_run(recipe: Path | str, overrides: Sequence[str] = ()) -> Run:
    """The run of a recipe, of a run folder that holds a run.toml, or of a shipped recipe that
    `recipe` names; with overrides applied.

    Raises UserError, which names the file, or every key and value that is wrong.
    """
    recipe = found(Path(recipe))
    in_folder = kind_of(recipe) == "folder"
    path = recipe / RUN if in_folder else recipe
    try:
        table = parse_toml(read_text(path, LARGEST_TOML))
    except OSError as error:
        hint = meant(recipe) if kind_of(path) != "file" else "; make it readable"
        why = f"cannot read the recipe {named(path)}: {error.strerror}{hint}"
        raise UserError(why) from error
    except ValueError as error:
        hint = "" if path.suffix == ".toml" else "; a file of text is named in data.sources"
        hint = hidden_by(path) or hint
        raise UserError(f"{named(path)} is not TOML: {error}{hint}") from error
    table.setdefault("name", path.stem)
    if in_folder:  # which an older version may have written
        table = dict(with_new_names(table, RENAMED)[0])
        table["folder"] = str(recipe)  # a folder that was moved is resumed where it is now
        if any(one.startswith("init_from=") for one in overrides):
            _without_tokenizer_of_base(table)
    if isinstance(train := table.get("train"), dict) and any(map(is_length, overrides)):
        table["train"] = {key: train[key] for key in train if key not in LENGTHS}
    table, problems = changed(table, overrides, Run)
    return parse_run(table, problems=problems)


def _without_tokenizer_of_base(table: Table) -> None:
    """Takes the tokenizer out of a run's table if it is that of the folder `init_from`: one that
    was moved has taken its tokenizer along.
    """
    data = table.get("data")
    if isinstance(data, dict) and data.get("tokenizer") == table.get("init_from"):
        data.pop("tokenizer", None)


def parse_run(table: Table, *, whole: bool = True, problems: Sequence[str] = ()) -> Run:
    """A Run from nested tables. Raises WrongRun with every key and value that cannot be read, and
    every value that can be read but is wrong by itself or beside the others.

    whole     whether the table is a recipe, and not a model whose layout and batch are still open
    problems  of the table that are known already
    """
    newer, old = with_new_names(table, RENAMED)
    table, more = _filled(newer)
    more += [f"unknown key {name!r}; it is called {RENAMED[name]!r} now" for name in old]
    read = read_table(Run, table, also={"model.": ("preset",)})
    wrong = [*problems, *more, *(with_key(problem, table, Run) for problem in read.problems)]
    if wrong:
        rest = {**table, "name": "run", "model": preset("laptop")}
        partly = read.value or read_table(Run, rest).value
        kinds = {"model": ModelShape, "data": Data, "batch": Batch}
        sound = {name for name, kind in kinds.items() if not more and _is_sound(table, name, kind)}
        synced = _is_sound(table.get("method"), "sync", Sync)  # what a layout is depends on it
        wrong += _further(partly, sound, whole=whole) if synced else _check_each(partly)
        raise WrongRun(wrong, partly, meant=len(sound) == len(kinds))
    run: Run = read.value
    return run


def _is_sound(table: object, name: str, kind: type) -> bool:
    inner = table.get(name, {}) if isinstance(table, dict) else {}
    return isinstance(inner, dict) and not read_table(kind, inner).problems


def _further(partly: Run, sound: set[str], *, whole: bool) -> Iterator[str]:
    """The problems of what could be read of a recipe: of model, layout and batch together as far as
    their tables are `sound`, for a default is not what was meant, and the number of ranks is known.
    """
    try:
        layout = parse_layout("dp*" if partly.layout == AUTO else partly.layout)
    except UserError as problem:
        yield str(problem)
    else:
        if whole and layout.dp and len(sound) == 3:
            yield from problems_of(partly, None)
            return
        if sound >= {"model", "data"}:
            known, one = replace(layout, dp=layout.dp or layout.shard or 1), Batch(micro_batch=1)
            sequence = partly.data.sequence_length if whole else 1
            yield from check_plan(partly.model, known, one, partly.method, sequence=sequence)
    yield from _check_each(partly)


def _filled(table: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """The table with its short forms written out, and the problems that this finds.

    The short forms are a preset instead of its sizes, and a path instead of a source.
    """
    table, problems = with_texts(dict(table)), []
    try:
        table["model"] = model_of(table)
    except UserError as problem:
        table["model"], problems = preset("laptop"), [str(problem)]
    if isinstance(train := table.get("train"), dict):
        table["train"], more = read_length(train)
        problems += more
    return table, problems


# -- resolving -------------------------------------------------------------------


def check_run(run: Run, layout: Layout) -> list[str]:
    """Everything that keeps `run` from starting on any machine, as sentences."""
    sequence, precision, compiled = run.data.sequence_length, run.method.precision, run.compile
    fit = check_plan(run.model, layout, run.batch, run.method, sequence=sequence)
    here = unsupported(run.model, layout, precision=precision, compiled=compiled)
    if run.train.export and not fit and not here:
        try:
            exported_as(run.model)
        except UserError as problem:
            here = [f"train.export is true, but {problem}; use train.export=false"]
    if run.train.profile and not fit:
        try:
            in_steps(run.train, resolve_batch(run.batch, layout)[0], sequence)
        except UserError as problem:
            here = [*here, str(problem)]
    if (run.comm.is_chosen or run.comm.server_shares) and not (fit or here):
        here = choice_misfits(plan_of(run, layout))
    return [*dict.fromkeys([*fit, *_check_each(run), *here])]


def plan_of(run: Run, layout: Layout) -> Plan:
    """The plan of `run` on a layout whose dp is known. Raises UserError."""
    sequence = run.data.sequence_length
    made = make_plan(run.model, layout, run.batch, sequence=sequence, method=run.method)
    plan = replace(made, comm=run.comm, storage=settled(run.storage, layout, folder_of(run)))
    return with_schedule(plan, read_schedule(run.schedule)) if run.schedule else plan


def problems_of(run: Run, world: int | None) -> list[str]:
    """Everything that keeps `run` from starting on `world` processes, as sentences."""
    try:
        layout = resolve(parse_layout(run.layout), world)
    except UserError as problem:
        return [str(problem), *_check_each(run)]
    return check_run(run, layout)


def _check_each(run: Run) -> Iterator[str]:
    """The problems of single values, which do not depend on other values."""
    yield from out_of_bounds(run)
    yield from check_sources(text_of(run.data, run.init_from))
    yield from label_problems(run.data, run.model)
    if not run.layout.strip():
        yield "layout is empty; write single for one process"
    if run.name in ("", ".", "..") or "/" in run.name or path_problem(run.name):
        yield f"name is {shown(run.name)}; it must be able to name a folder, such as tour"
    yield from lacking_tokenizer(run.data, run.init_from)
    if run.init_adapter and run.method.adapter is None:
        yield "init_adapter is given, and method.adapter is not; write its rank, alpha and targets"
    if run.train.expert_placement == "load" and run.model.experts is None:
        yield "train.expert_placement is load, and the model has no experts; use number"
    yield from choice_problems(run.comm.algorithm)
    served = "tls", "push_order", "push_window", "push_chunk", "server_shares"
    for key in served if not run.method.sync else ():
        if getattr(run.comm, key) != getattr(Comm(), key):
            yield f"comm.{key} is for servers and workers of method.sync, not given; drop it"


def lacks_of(machine: Machine, run: Run) -> Iterator[str]:
    """Yields a sentence for each setting of `run` that `machine` cannot serve."""
    if run.device == "cuda" and not machine.cuda:
        why = machine.no_cuda or "torch sees no CUDA device here; use device=cpu"
        yield f"device is cuda, but {why}"
    if run.threads > MOST_THREADS * machine.cores:
        yield (
            f"threads is {run.threads}, over {MOST_THREADS} for each core of this machine "
            f"({machine.cores}): they would wait for each other; threads=0 shares the cores out"
        )


def folder_of(run: Run) -> Path:
    """The run folder; relative to the folder in which the command runs."""
    return run.folder or Path("runs") / run.name


def resolve_run(run: Run, machine: Machine) -> Job:
    """The Job of `run` on `machine`. Raises WrongRun with every problem, a sentence each."""
    if problems := [*problems_of(run, machine.world), *lacks_of(machine, run)]:
        raise WrongRun(problems, run)
    layout = resolve(parse_layout(run.layout), machine.world)
    local = machine.local_world or run.method.processes(layout.workers, layout.server)
    if local > MOST_HERE:
        raise UserError(
            f"layout '{layout}' would start {local:,} processes on this machine; start it on "
            f"several, or use at most {MOST_HERE}"
        )
    on_cuda = run.device == "cuda" or (run.device == "auto" and machine.cuda >= local)
    made = plan_of(run, layout)
    if on_cuda and (problem := cuda_problem(made)):
        raise UserError(problem)
    return Job(
        name=run.name,
        folder=folder_of(run).absolute(),
        cache=machine.cache,
        plan=for_gpus(made) if on_cuda else made,
        data=text_of(run.data, run.init_from),
        train=in_steps(run.train, made.batch, made.sequence),
        seed=run.seed,
        device="cuda" if on_cuda else "cpu",
        threads=run.threads or max(machine.cores // local, 1),
        init_from=run.init_from.absolute() if run.init_from else None,
        init_adapter=run.init_adapter.absolute() if run.init_adapter else None,
        compile=run.compile,
    )


def resolved(run: Run, job: Job) -> Run:
    """`run` with the decisions of its job, as the run folder stores it to resume from anywhere.

    Paths are absolute. Device, threads and micro-batch stay as the user wrote them: they depend on
    the machine, and the run may be resumed on another one.
    """
    return replace(
        run,
        layout=str(job.layout),
        batch=replace(run.batch, global_batch=job.batch.global_batch),
        folder=job.folder,
        train=job.train,
        init_from=job.init_from,
        init_adapter=job.init_adapter,
        schedule=run.schedule.absolute() if run.schedule else None,
        data=absolute(job.data),
    )
