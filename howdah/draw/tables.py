"""A prediction as lines of text, and as plain data for other programs.

Text has units chosen by size, and leaves out what is less than a thousandth of its sum: scalars
that are sent, rounding errors of a wait. `--why` and the plain data have everything.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from howdah.base.quantities import spell
from howdah.draw.columns import columns
from howdah.draw.mesh import stage_labels
from howdah.draw.traffic import sums
from howdah.machines.cluster import expected
from howdah.plan.plan import Plan
from howdah.plan.recording import TCP
from howdah.plan.trained import told
from howdah.shapes.parameters import parameters
from howdah.shapes.products import conventions
from howdah.shapes.shape import ModelShape
from howdah.sim.cost import YEARS, Cost
from howdah.sim.memory import Held, peak
from howdah.sim.predict import Prediction
from howdah.sim.step_time import StepTime

K = TypeVar("K")

NOTHING = 1e-3  # of a sum: a smaller term is left out of the text
SIZES = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
DAYS = {"days": 1.0, "hours": 1 / 24, "minutes": 1 / 1440, "seconds": 1 / 86400}
KWH = {"GWh": 1e6, "MWh": 1e3, "kWh": 1.0, "Wh": 1e-3}
TONNES = {"t": 1.0, "kg": 1e-3, "g": 1e-6}
CAUSES = {"memory": "memory-bound"}  # what the text calls a cause of time, if not by its key


# -- text ------------------------------------------------------------------------------


def show_model(name: str, shape: ModelShape, sequence: int) -> list[str]:
    """The parameters of a model, and its flops per token by three conventions, as lines."""
    count, flops = parameters(shape), conventions(shape, sequence)
    active = f", {short_count(count.active)} active" if count.active != count.total else ""
    about = f" ({short_count(count.total)}{active})" if count.total >= 1e6 else ""
    return [
        f"{name}: {count.total:,} parameters{about}",
        f"flops per token, forward and backward, sequences of {sequence:,}: "
        f"6N {flops.by_parameters:.3g}, all pairs {flops.model:.3g}, "
        f"causal {flops.causal_model:.3g}",
    ]


def show_prediction(
    prediction: Prediction, *, why: bool = False, notes: Sequence[str] = ()
) -> list[str]:
    """The prediction as lines of text.

    why    adds all stages and small terms, and the source of each number
    notes  what the user should know about the plan; a line for each
    """
    plan = prediction.plan
    lines = [
        f"layout  {plan.layout} on {_devices(prediction)}",
        f"batch   {plan.batch.global_batch:,} x {plan.sequence:,} tokens a step, "
        f"micro-batches of {plan.micro_batch}",
        *_trained(plan),
        *_memory(prediction, why=why),
        *_traffic(prediction, why=why),
    ]
    if prediction.time:
        lines += _time(prediction, why=why)
    if prediction.cost:
        lines.append(_run(prediction.cost))
    return [*lines, *show_notes(notes)]


def _trained(plan: Plan) -> Iterator[str]:
    """How much is trained, and the operations of that; nothing where all weights are."""
    if said := told(plan.shape, plan.method):
        flops = conventions(plan.shape, plan.sequence, marks=plan.marks)
        yield (
            f"trained {said}; flops per token: all pairs {flops.model:.3g}, "
            f"causal {flops.causal_model:.3g}"
        )


def show_notes(notes: Sequence[str]) -> list[str]:
    """A line for each note."""
    return [f"note    {note}" for note in notes]


def _devices(prediction: Prediction) -> str:
    world = prediction.plan.layout.world
    if prediction.cluster:
        return f"{world:,} x {prediction.cluster.device.name}"
    return "1 device" if world == 1 else f"{world:,} devices"


def _memory(prediction: Prediction, *, why: bool) -> Iterator[str]:
    """All numbers in the unit of the largest, so that they can be compared."""
    unit = _unit(prediction.peak, SIZES)
    yield f"memory  {_in(unit, prediction.peak)} {unit} a device{_fit(prediction, unit)}"
    plan = prediction.plan
    stages, labels = plan.stages, [*stage_labels(plan), "servers"]
    for rank, held in enumerate(prediction.memory):
        if rank and not why and len(prediction.memory) > 4 and rank < len(prediction.memory) - 1:
            continue
        parts = sum(
            len(names)
            for names, home in zip(stages.parts, stages.where, strict=True)
            if home == rank
        )
        rows = large(_by_component(held, " on "), why=why).items()
        listed = ", ".join(f"{name} {_in(unit, count)}" for name, count in rows)
        held_parts = f"{parts} part{'s' * (parts != 1)}"
        if rank == plan.layout.pp:
            replicas = plan.method.sync.replicas if plan.method.sync else 0
            ranges = f"{1 + replicas} ranges" if replicas else "a range"
            held_parts = f"{plan.layout.server} with {ranges} of every part"
            held_parts += ", the fullest" * bool(plan.comm.server_shares)
        yield f"  {labels[rank]}, {held_parts}: {_in(unit, peak(held))} = {listed}"


def _fit(prediction: Prediction, unit: str) -> str:
    capacity = prediction.capacity
    if capacity is None:
        return ""
    verdict = "fits" if prediction.peak <= capacity else "DOES NOT FIT"
    own = _unit(capacity, SIZES)
    return f" of {_in(own, capacity)}{'' if own == unit else f' {own}'}: {verdict}"


def _traffic(prediction: Prediction, *, why: bool) -> list[str]:
    """The traffic of the stage that sends most."""
    rows = max(prediction.traffic, key=lambda sent: sum(sent.values()))
    if not rows:
        return ["traffic none: one process"]
    shown = sorted(large(rows, why=why).items(), key=lambda item: -item[1])
    unknown = None if prediction.cluster else TCP.inside  # the links of no cluster
    cells = [
        (row.axis, row.operation, "" if row.link == unknown else row.link, size_of(count))
        for row, count in shown
    ]
    lines = [f"  {line}" for line in columns(cells, "<<<<")]
    if why and prediction.padding:
        lines.append(f"  of it {size_of(prediction.padding)} of padding, which makes shares equal")
    return [f"traffic {size_of(sum(rows.values()))} sent by a rank in a step", *lines]


def spell_basis(time: StepTime) -> str:
    """The interval of a step's seconds, and the profile that they come from."""
    between = ""
    if time.interval:
        low, high = (spell(end, "seconds") for end in time.interval)
        between = f" ({low} to {high} in four of five runs)"
    return f"{between}, profile {time.profile.name}"


def _time(prediction: Prediction, *, why: bool) -> Iterator[str]:
    time, cluster = prediction.time, prediction.cluster
    assert time is not None and cluster is not None
    parts = spell_causes(time.breakdown)
    yield f"time    {spell(time.seconds, 'seconds')} a step{spell_basis(time)}: {parts}"
    yield (
        f"        {_figure(time.tokens_per_second)} tokens/s, {_mfu(prediction)}, "
        f"bubble {time.bubble:.1%}"
    )
    if why:
        measured = dict(cluster.measured)
        for name, share, value in expected(cluster):
            source = "measured" if name in measured else f"{share:.0%} of the data sheet, assumed"
            yield f"        {name} {measured.get(name, value):.4g}: {source}"


def spell_causes(breakdown: Mapping[str, float]) -> str:
    """The seconds of a step by cause, as text."""
    shown = large(breakdown).items()
    return ", ".join(f"{CAUSES.get(name, name)} {spell(s, 'seconds')}" for name, s in shown)


def _mfu(prediction: Prediction) -> str:
    """Model flops over the dense peak, by both conventions; never over 100 %.

    The time counts only the pairs of tokens that a causal mask leaves. Flops of all pairs in this
    time would exceed the peak where sequences are long, which says nothing of the device.
    """
    assert prediction.time is not None
    both, causal = prediction.time.mfu, _causal_mfu(prediction)
    if causal == both:
        return f"mfu {both:.1%}"
    if both > 1:
        return f"mfu {causal:.1%} (causal)"
    return f"mfu {both:.1%} (all pairs), {causal:.1%} (causal)"


def _causal_mfu(prediction: Prediction) -> float:
    assert prediction.time is not None
    plan = prediction.plan
    flops = conventions(plan.shape, plan.sequence, marks=plan.marks)
    return prediction.time.mfu * flops.causal_model / flops.model


def _run(cost: Cost) -> str:
    prices = [
        f"{_small(money)} USD ({basis})"
        for money, basis in (
            (cost.purchase, f"purchase over {YEARS:g} years"),
            (cost.rent, "rent"),
        )
        if money is not None
    ]
    return "run     " + ", ".join(
        [
            _scaled(cost.days, DAYS, digits=2),
            f"{_small(cost.device_hours)} device-hours",
            *(prices or ["price not stated"]),
            "energy not stated" if cost.kwh is None else _scaled(cost.kwh, KWH),
            *([] if cost.tonnes is None else [f"{_scaled(cost.tonnes, TONNES)} CO2eq"]),
        ]
    )


# -- data ------------------------------------------------------------------------------


def model_data(shape: ModelShape, sequence: int) -> dict[str, Any]:
    """The numbers that depend on the model and the sequence alone."""
    count, flops = parameters(shape), conventions(shape, sequence)
    return {
        "parameters": count.total,
        "active_parameters": count.active,
        "sequence": sequence,
        "flops_per_token": {
            "6N": flops.by_parameters,
            "all_pairs": flops.model,
            "causal": flops.causal_model,
        },
    }


def prediction_data(prediction: Prediction, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The whole prediction, in bytes and seconds; `notes` as in `show_prediction`.

    Lists have an entry for each pipeline rank, but `stages` one for each stage.
    """
    plan, time, cost = prediction.plan, prediction.time, prediction.cost
    data = {
        **model_data(plan.shape, plan.sequence),
        "layout": str(plan.layout),
        "devices": plan.layout.world,
        "global_batch": plan.batch.global_batch,
        "micro_batch": plan.micro_batch,
        "memory_bytes": [
            {**_by_component(held, "@"), "peak": peak(held)} for held in prediction.memory
        ],
        "traffic_bytes": _axes(prediction),
        "padding_bytes": prediction.padding,
        "traffic": [
            [{**row._asdict(), "bytes": count} for row, count in sent.items()]
            for sent in prediction.traffic
        ],
        "stages": _stages(plan),
        "notes": list(notes),
    }
    if prediction.capacity is not None:
        data["fits"] = prediction.peak <= prediction.capacity
    if time:
        data |= {
            "step_seconds": time.seconds,
            "step_seconds_80": list(time.interval) if time.interval else None,
            "profile": time.profile.name,
            "tokens_per_second": time.tokens_per_second,
            "mfu": time.mfu,
            "mfu_causal": _causal_mfu(prediction),
            "bubble": time.bubble,
            "breakdown_seconds": time.breakdown,
        }
    if cost:
        data["run"] = {
            "days": cost.days,
            "device_hours": cost.device_hours,
            "usd_purchase": cost.purchase,
            "usd_rent": cost.rent,
            "kwh": cost.kwh,
            "tonnes_co2eq": cost.tonnes,
        }
    return data


def _by_component(held: Iterable[Held], at: str) -> Counter[str]:
    """Bytes by component; off the device, its name has `at` and the home behind it."""
    return sums(
        (row.component if row.home == "device" else f"{row.component}{at}{row.home}", row.bytes)
        for row in held
    )


def _axes(prediction: Prediction) -> dict[str, int]:
    """For each axis, the bytes of the rank that sends most on it."""
    total: dict[str, int] = {}
    for sent in prediction.traffic:
        for name, count in sums((row.axis, count) for row, count in sent.items()).items():
            total[name] = max(total.get(name, 0), count)
    return total


def _stages(plan: Plan) -> list[dict[str, Any]]:
    pairs = zip(plan.stages.parts, plan.stages.where, strict=True)
    return [{"rank": home, "parts": list(names)} for names, home in pairs]


# -- numbers ---------------------------------------------------------------------------


def large(terms: Mapping[K, float], *, why: bool = False) -> dict[K, float]:
    """The terms that are at least a thousandth of their sum; with `why`, all that are not zero."""
    least = 0.0 if why else NOTHING * sum(terms.values())
    return {name: value for name, value in terms.items() if value and value >= least}


def size_of(count: float) -> str:
    """Bytes as text.

    >>> size_of(5.37e8)
    '537 MB'
    """
    unit = _unit(count, SIZES)
    return f"{_in(unit, count)} {unit}"


def _unit(value: float, units: Mapping[str, float]) -> str:
    """The largest unit of which `value` has at least one, else the smallest unit."""
    return next((unit for unit, size in units.items() if value >= size), [*units][-1])


def _in(unit: str, count: float) -> str:
    return _figure(count / SIZES[unit])


def _figure(number: float) -> str:
    """Three digits, or all those of a large number; never an exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number >= 1e-3 or not number else "under 0.001"


def _small(number: float) -> str:
    """A number whose hundredths are of no interest once it has three digits before them."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.2f}" if number >= 0.01 else "under 0.01"


def _scaled(value: float, units: Mapping[str, float], *, digits: int = 1) -> str:
    unit = _unit(value, units)
    return f"{value / units[unit]:,.{digits}f} {unit}"


def short_count(number: int) -> str:
    """Four digits of a count, such as 6.738B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return str(number)
