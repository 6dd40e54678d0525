"""A prediction as lines of text, and as plain data for other programs."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from howdah.base.quantities import spell
from howdah.draw.mesh import stage_labels
from howdah.draw.traffic import sums
from howdah.machines.cluster import expected
from howdah.plan.plan import Plan
from howdah.shapes.parameters import parameters
from howdah.shapes.products import conventions
from howdah.shapes.shape import ModelShape
from howdah.sim.cost import hourly
from howdah.sim.memory import Held, peak
from howdah.sim.predict import Prediction

GB = 1e9


# -- text ------------------------------------------------------------------------------


def show_model(name: str, shape: ModelShape, sequence: int) -> list[str]:
    """The parameters of a model, and its flops per token by three conventions, as lines."""
    count, flops = parameters(shape), conventions(shape, sequence)
    active = f", {_count(count.active)} active" if count.active != count.total else ""
    about = f" ({_count(count.total)}{active})" if count.total >= 1e6 else ""
    return [
        f"{name}: {count.total:,} parameters{about}",
        f"flops per token, forward and backward, sequences of {sequence:,}: "
        f"6N {flops.by_parameters:.3g}, all pairs {flops.model:.3g}, "
        f"causal {flops.causal_model:.3g}",
    ]


def show_prediction(prediction: Prediction, *, why: bool = False) -> list[str]:
    """The prediction as lines of text; `why` adds all stages and the source of each number."""
    plan = prediction.plan
    lines = [
        f"layout  {plan.layout} on {plan.layout.world:,} {_devices(prediction)}",
        f"batch   {plan.batch.global_batch:,} x {plan.sequence:,} tokens a step, "
        f"micro-batches of {plan.micro_batch}",
        *_memory(prediction, why=why),
        *_traffic(prediction),
    ]
    if prediction.time:
        lines += _time(prediction, why=why)
    return lines


def _devices(prediction: Prediction) -> str:
    if prediction.cluster:
        return prediction.cluster.device.name
    return "device" if prediction.plan.layout.world == 1 else "devices"


def _memory(prediction: Prediction, *, why: bool) -> Iterator[str]:
    yield f"memory  {_gb(prediction.peak)} GB a device{_fit(prediction)}"
    stages, labels = prediction.plan.stages, stage_labels(prediction.plan)
    for rank, held in enumerate(prediction.memory):
        if rank and not why and len(prediction.memory) > 4 and rank < len(prediction.memory) - 1:
            continue
        parts = sum(
            len(names)
            for names, home in zip(stages.parts, stages.where, strict=True)
            if home == rank
        )
        rows = _by_component(held, " on ").items()
        listed = ", ".join(f"{name} {_gb(count)}" for name, count in rows)
        yield f"  {labels[rank]}, {parts} parts: {_gb(peak(held))} = {listed}"


def _fit(prediction: Prediction) -> str:
    capacity = prediction.capacity
    if capacity is None:
        return ""
    verdict = "fits" if prediction.peak <= capacity else "DOES NOT FIT"
    return f" of {_gb(capacity)}: {verdict}"


def _traffic(prediction: Prediction) -> Iterator[str]:
    """The traffic of the stage that sends most."""
    rows = max(prediction.traffic, key=lambda sent: sum(sent.values()))
    if not rows:
        yield "traffic none: one process"
        return
    yield f"traffic {_gb(sum(rows.values()))} GB sent by a rank in a step"
    for row, count in sorted(rows.items(), key=lambda item: -item[1]):
        yield f"  {row.axis:5s} {row.operation:14s} {row.link:10s} {_gb(count)}"


def _time(prediction: Prediction, *, why: bool) -> Iterator[str]:
    time, cluster = prediction.time, prediction.cluster
    assert time is not None and cluster is not None
    parts = ", ".join(
        f"{name} {spell(s, 'seconds')}" for name, s in time.breakdown.items() if s > 0
    )
    yield f"time    {spell(time.seconds, 'seconds')} a step, from stated efficiencies: {parts}"
    yield (
        f"        {time.tokens_per_second:,.0f} tokens/s, mfu {time.mfu:.1%} (all pairs), "
        f"bubble {time.timeline.bubble:.1%}"
    )
    if why:
        measured = dict(cluster.measured)
        for name, share, value in expected(cluster):
            source = "measured" if name in measured else f"{share:.0%} of the data sheet, assumed"
            yield f"        {name} {measured.get(name, value):.4g}: {source}"
    if cost := prediction.cost:
        basis = hourly(cluster).basis
        money = f"price {basis}" if cost.money is None else f"{cost.money:,.0f} USD ({basis})"
        energy = "unknown energy" if cost.kwh is None else f"{cost.kwh / 1000:,.1f} MWh"
        carbon = "" if cost.tonnes is None else f", {cost.tonnes:,.1f} t CO2eq"
        yield (
            f"run     {cost.days:,.2f} days, {cost.device_hours:,.0f} device-hours, "
            f"{money}, {energy}{carbon}"
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


def prediction_data(prediction: Prediction) -> dict[str, Any]:
    """The whole prediction, in bytes and seconds.

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
        "traffic": [
            [{**row._asdict(), "bytes": count} for row, count in sent.items()]
            for sent in prediction.traffic
        ],
        "stages": _stages(plan),
    }
    if prediction.capacity is not None:
        data["fits"] = prediction.peak <= prediction.capacity
    if time:
        data |= {
            "step_seconds": time.seconds,
            "step_seconds_from": "stated efficiencies",
            "tokens_per_second": time.tokens_per_second,
            "mfu": time.mfu,
            "bubble": time.timeline.bubble,
            "breakdown_seconds": time.breakdown,
        }
    if cost:
        data["run"] = {
            "days": cost.days,
            "device_hours": cost.device_hours,
            "usd": cost.money,
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


def _gb(count: float) -> str:
    return f"{count / GB:.3g}" if count < 100 * GB else f"{count / GB:,.0f}"


def _count(number: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return str(number)
