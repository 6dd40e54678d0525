"""Run: one configured training as a user writes it, and how it becomes a Job.

A recipe is a TOML file. What it leaves out takes the default; the command line changes single
values by their dotted name:

    howdah train recipes/laptop.toml layout="dp2 x4" method.rate.peak=2e-3

A Run may leave things open: `dp*`, a third batch number, a preset's sizes, `device = "auto"`.
`resolve` closes them, once the number of processes is known, and refuses what cannot work. Every
table is a frozen dataclass of the floor that uses it; unknown keys are errors with a suggestion.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_type_hints

import tomli_w
from pydantic import TypeAdapter, ValidationError

from howdah.plan.batch import Batch
from howdah.plan.check import check_plan
from howdah.plan.hub_config import model_of
from howdah.plan.layout import Layout, parse_layout, resolve
from howdah.plan.method import Method, Precision
from howdah.plan.pipeline import with_schedule
from howdah.plan.plan import Plan, make_plan
from howdah.plan.presets import preset
from howdah.plan.problems import BadInput, nearest
from howdah.plan.schedule.actions import Schedule
from howdah.plan.schedule.text import parse_schedule
from howdah.plan.shapes import ModelShape
from howdah.plan.support import unsupported
from howdah.text.sources import STDLIB, Data
from howdah.train.job import Job, Pace

Table = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A training run as it was written.

    model      a ModelShape, or `preset = NAME` with the sizes that differ from it; left out,
               it is that of init_from
    layout     how it is split, such as "dp2 x4"
    schedule   a file with a pipeline schedule of one's own, in place of the layout's
    device     auto takes CUDA where there is some
    threads    of torch in each process; 0 shares the cores out
    compile    blocks through torch.compile
    folder     the run folder; None is runs/NAME
    init_from  a Hugging Face folder whose weights to start from
    """

    name: str
    model: ModelShape
    layout: str = "single"
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    compile: bool = False
    folder: Path | None = None
    init_from: Path | None = None
    schedule: Path | None = None
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    method: Method = field(default_factory=Method)
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True)
class Machine:
    """What `resolve` must know of where the run starts.

    world        processes that a launcher has started; None: the layout decides
    local_world  of those, how many on this machine
    cores        that this process may use
    cuda         CUDA devices
    cache        where tokenised text is kept
    """

    world: int | None
    local_world: int | None
    cores: int
    cuda: int
    cache: Path


# -- reading ---------------------------------------------------------------------


def load_run(recipe: Path, overrides: Sequence[str] = ()) -> Run:
    """The run of a recipe, or of a run folder that holds a run.toml, with overrides applied.

    Raises BadInput naming the file, key or value that is wrong.
    """
    path = recipe / "run.toml" if recipe.is_dir() else recipe
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read the recipe {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from error
    table.setdefault("name", path.stem)
    if recipe.is_dir():
        table["folder"] = str(recipe)  # a folder that was moved goes on where it is now
    for override in overrides:
        _override(table, override)
    return parse_run(table)


def parse_run(table: Table) -> Run:
    """A Run from nested tables. Raises BadInput."""
    table = {**table, "model": _model(table)}
    data = table.get("data", {})
    if isinstance(data, dict) and isinstance(data.get("sources"), list):
        sources = [{"path": s} if isinstance(s, str) else s for s in data["sources"]]
        table["data"] = {**data, "sources": sources}
    _refuse_unknown(Run, table, "")
    try:
        return _ADAPTER.validate_python(table)
    except ValidationError as error:
        raise BadInput(_sentence(error)) from None


def _override(table: Table, override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals:
        raise BadInput(f"{override!r} changes nothing; write key=value, such as seed=1")
    *path, last = name.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise BadInput(f"{name}: {part} is a single value, not a table")
    try:
        table[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[last] = text  # a bare word is a string


def _model(table: Table) -> object:
    """The sizes: those of the [model] table, or those of the folder that the run starts from."""
    if "model" not in table and isinstance(table.get("init_from"), str):
        from howdah.model.hub import read_hub

        return asdict(read_hub(Path(table["init_from"]))[0])
    model = table.get("model", {})
    if not isinstance(model, dict) or "preset" not in model:
        return model
    rest = {name: size for name, size in model.items() if name != "preset"}
    return {**asdict(preset(str(model["preset"]))), **rest}


def _refuse_unknown(kind: type, table: object, path: str) -> None:
    if not isinstance(table, Mapping):
        return
    hints = get_type_hints(kind)
    for name, value in table.items():
        if name not in hints:
            known = [*hints, "preset"] if kind is ModelShape else hints
            raise BadInput(f"unknown key {path + name!r}{_suggestion(name, known)}")
        inner = _table_in(hints[name])
        if inner and isinstance(value, list):
            for number, row in enumerate(value):
                _refuse_unknown(inner, row, f"{path}{name}[{number}].")
        elif inner:
            _refuse_unknown(inner, value, f"{path}{name}.")


def _table_in(hint: object) -> type | None:
    """The dataclass that a key holds: one, none or many of it."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and is_dataclass(kind):
            return kind
    return None


def _suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest key of the same table; else the same key of another table."""
    suggestion = nearest(name, known)
    elsewhere = [path for path in _paths(Run, "") if path.rpartition(".")[2] == name]
    if "did you mean" in suggestion or not elsewhere:
        return suggestion
    return f"; did you mean {elsewhere[0]!r}?"


def _paths(kind: type, prefix: str) -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        yield prefix + name
        if inner := _table_in(hint):
            yield from _paths(inner, f"{prefix}{name}.")


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{where} is missing"
    given = "" if isinstance(first["input"], dict) else f", not {first['input']!r}"
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}{given}"


_ADAPTER = TypeAdapter(Run)


# -- writing ---------------------------------------------------------------------


def save_run(run: Run, path: Path) -> None:
    """Writes a run as a recipe that `load_run` reads back."""
    path.write_text(tomli_w.dumps(_plain(asdict(run))), "utf-8")


def _plain(value: Any) -> Any:
    """Values that TOML has; open ones (None) are left out."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# -- planning --------------------------------------------------------------------

LONGEST = 8192  # tokens of a sample where nobody says: contexts of 131072 are for reading


@dataclass(frozen=True)
class Draft:
    """What a user says of a plan; what is empty or 0 follows from the model or the recipe."""

    layout: str = ""
    sequence: int = 0
    micro_batch: int = 0
    global_batch: int = 0
    precision: str = ""


@dataclass(frozen=True)
class Drafted:
    """A model with a name, and its plan where enough was said for one."""

    name: str
    shape: ModelShape
    sequence: int
    plan: Plan | None


def draft(model: str | Run, wanted: Draft, *, devices: int | None) -> Drafted:
    """The plan of `model` (a preset, recipe, config.json, or a Run) on so many devices.

    A model alone, without a layout and without devices, has no plan. Raises BadInput.
    """
    if isinstance(model, str):
        path = Path(model)
        if path.suffix == ".toml" or (path / "run.toml").is_file():
            model = load_run(path)
        elif path.suffix == ".json" or path.is_dir():
            return _drafted(path.name, model_of(path), wanted, devices)
        else:
            return _drafted(model, preset(model), wanted, devices)
    layout, method = wanted.layout or model.layout, model.method
    if wanted.precision:
        method = replace(method, precision=_precision(wanted.precision))
    batch = replace(
        model.batch,
        micro_batch=wanted.micro_batch or model.batch.micro_batch,
        global_batch=wanted.global_batch or model.batch.global_batch,
    )
    sequence = wanted.sequence or model.data.sequence
    changed = replace(
        model, batch=batch, method=method, data=replace(model.data, sequence=sequence)
    )
    plan = plan_of(changed, resolve(parse_layout(layout), devices))
    return Drafted(model.name, model.model, sequence, plan)


def _drafted(name: str, shape: ModelShape, wanted: Draft, devices: int | None) -> Drafted:
    sequence = wanted.sequence or min(shape.context, LONGEST)
    if not wanted.layout and devices is None:
        return Drafted(name, shape, sequence, None)
    layout = resolve(parse_layout(wanted.layout or "dp*"), devices)
    batch = Batch(wanted.global_batch or None, wanted.micro_batch or None)
    if batch.micro_batch is None and (batch.global_batch is None or layout.micros is None):
        batch = replace(batch, micro_batch=1)
    method = Method(precision=_precision(wanted.precision or "bf16"))
    plan = make_plan(shape, layout, batch, sequence=sequence, method=method)
    return Drafted(name, shape, sequence, plan)


def _precision(word: str) -> Precision:
    known = get_args(Precision)
    if word not in known:
        raise BadInput(f"precision {word!r} is unknown{nearest(word, known)}")
    return cast(Precision, word)


# -- resolving -------------------------------------------------------------------


def check_run(run: Run, layout: Layout) -> list[str]:
    """Everything that keeps `run` from starting on any machine, as sentences."""
    sequence = run.data.sequence
    problems = check_plan(run.model, layout, run.batch, run.method, sequence=sequence)
    return [*problems, *_check_pace(run.pace), *unsupported(run.model, layout)]


def plan_of(run: Run, layout: Layout) -> Plan:
    """The plan of `run` on a layout whose dp is known. Raises BadInput."""
    sequence = run.data.sequence
    plan = make_plan(run.model, layout, run.batch, sequence=sequence, method=run.method)
    return with_schedule(plan, read_schedule(run.schedule)) if run.schedule else plan


def read_schedule(path: Path) -> Schedule:
    """A schedule of one's own from a file. Raises BadInput."""
    try:
        return parse_schedule(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"schedule {path} cannot be read: {error}; give a text file") from None


def resolve_run(run: Run, machine: Machine) -> Job:
    """The Job of `run` on `machine`. Raises BadInput with every problem, a sentence each."""
    layout = resolve(parse_layout(run.layout), machine.world)
    problems = check_run(run, layout)
    if run.device == "cuda" and not machine.cuda:
        problems.append("device is cuda, but torch sees no CUDA device here; use device=cpu")
    local = machine.local_world or layout.world
    if problems:
        raise BadInput("; ".join(problems))
    on_cuda = run.device == "cuda" or (run.device == "auto" and machine.cuda >= local)
    return Job(
        name=run.name,
        folder=(run.folder or Path("runs") / run.name).absolute(),
        cache=machine.cache,
        plan=plan_of(run, layout),
        data=run.data,
        pace=run.pace,
        seed=run.seed,
        device="cuda" if on_cuda else "cpu",
        threads=run.threads or max(machine.cores // local, 1),
        init_from=run.init_from.absolute() if run.init_from else None,
        compile=run.compile,
    )


def resolved(run: Run, job: Job) -> Run:
    """The run with what its job has decided, as the run folder keeps it to go on from anywhere.

    Paths no longer depend on the current folder. Device, threads and micro-batch stay as they
    were written: they belong to the machine, and the next one may be another.
    """
    tokenizer = run.data.tokenizer
    sources = tuple(replace(s, path=_absolute(s.path)) for s in run.data.sources)
    return replace(
        run,
        layout=str(job.layout),
        batch=replace(run.batch, global_batch=job.batch.global_batch),
        folder=job.folder,
        init_from=job.init_from,
        schedule=run.schedule.absolute() if run.schedule else None,
        data=replace(
            run.data, sources=sources, tokenizer=_absolute(tokenizer) if tokenizer else None
        ),
    )


def _absolute(name: str) -> str:
    """A path made absolute; a name that is no path stays."""
    return str(Path(name).absolute()) if name != STDLIB and Path(name).exists() else name


def _check_pace(pace: Pace) -> list[str]:
    problems = [
        f"pace.{f.name} is {number}; it must not be negative"
        for f in fields(pace)
        if isinstance(number := getattr(pace, f.name), int) and number < 0
    ]
    for name in ("steps", "log_every", "keep"):
        if getattr(pace, name) == 0:
            problems.append(f"pace.{name} is 0; it must be at least 1")
    return problems
