"""Lays any torch module out over processes, in one visible order:

1. refuse what cannot be: words of the layout, the optimizer, parameters, buffers
2. connect the ranks: those of torchrun, of a given transport, or this process alone
3. make weights, buffers and states those of rank 0
4. flat units, whole or own ranges, which the weights fill; parameters become views
5. the optimizer's groups become ranges
6. connect the sums of gradients, and what brings weights

    job = howdah.distribute(model, optimizer, layout="dp2 zero2")
    for batch in batches:
        loss = job.step(lambda x, y: cross_entropy(model(x), y), batch)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from howdah.base.errors import UserError, shown
from howdah.comm.group import Group
from howdah.comm.rendezvous import join
from howdah.comm.settings import read_settings
from howdah.comm.transport import SingleRank, Transport
from howdah.foreign.elementwise import groups_of, require_elementwise
from howdah.foreign.job import Job, Laid, is_laid_out
from howdah.foreign.refusals import refuse
from howdah.foreign.states import States, agree
from howdah.foreign.statistics import Statistics, rules_of
from howdah.foreign.table import Table, table_of
from howdah.foreign.units import choose_units
from howdah.foreign.weights import Weights
from howdah.parallel.flat_params import FlatUnit, Whole, allocate, fill_masters
from howdah.parallel.mesh import Mesh, connect_mesh
from howdah.parallel.sums import connected
from howdah.parallel.zero import sharers_of
from howdah.plan.boxes import Piece
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.sharding import own_range
from howdah.plan.sums import keeps_shares

NOTHING: Mapping[str, str] = {}
WRAPPED = {
    "DistributedDataParallel": "model.module, for two would sum the gradients",
    "DataParallel": "model.module, for each process has one device",
    "FullyShardedDataParallel": "for two would share out its weights",
    "OptimizedModule": "for torch.compile has seen weights where they are not under zero3",
}


def distribute(  # noqa: PLR0913
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: str = "dp*",
    *,
    units: Sequence[str] | None = None,
    buffers: Mapping[str, str] = NOTHING,
    clip: float | None = None,
    transport: Transport | None = None,
) -> Job:
    """Lays `model` and its `optimizer` out over the processes of `layout`, all of which call it
    alike. Weights become those of process 0.

    layout     "dp2 zero2 x4": processes, ZeRO stage, micro-batches; "dp*": all that there are
    units      submodules that zero3 gathers and recompute=full computes again, by path or pattern
               ("layers.*"); None: they are chosen
    buffers    by pattern of names, what happens to module buffers: mean, rank 0, local or constant
    clip       most norm of the whole gradient; None: it is not clipped
    transport  between the processes; None: that of torchrun, or none for one process

    Raises UserError for what a foreign model cannot have, before anything is changed.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError("distribute takes a torch.nn.Module and a torch.optim.Optimizer")
    if (wrapper := type(model).__name__) in WRAPPED:
        raise UserError(
            f"the model is a {wrapper}; give the module inside of it, {WRAPPED[wrapper]}"
        )
    if not isinstance(layout, str):
        raise UserError(f'layout is {shown(layout)}; give words such as "dp2 zero2"')
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise UserError(f"clip is {shown(clip)}; give a norm above 0, or None")
    found = parse_layout(layout)  # 1
    refuse(found)
    _require_free(model)
    require_elementwise(optimizer)
    groups = groups_of(model, optimizer)
    rules_of(model, buffers)
    paths = choose_units(model, units)
    device = _device(model)
    world = transport.size if transport is not None else read_settings().world
    found = resolve(found, world or 1)
    found = replace(found, micros=found.micros or 1)
    table = table_of(model, found, paths, groups)
    if transport is None:  # 2
        transport = join(device=device) if world else SingleRank()
    mesh = connect_mesh(found, transport, device)
    try:
        _compare_settings(optimizer, clip, rules_of(model, buffers), mesh.world)
        return Job(_laid(model, optimizer, table, mesh, buffers), clip=clip)
    except BaseException as error:
        mesh.__exit__(type(error), error, None)
        raise


def _laid(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    table: Table,
    mesh: Mesh,
    rules: Mapping[str, str],
) -> Laid:
    named = {name: p for name, p in model.named_parameters() if name in table.groups}
    _compare(model, table, mesh.world)
    statistics = Statistics(model, rules, mesh.world)  # 3
    for parameter in model.parameters():
        _from_first(parameter, mesh.world)
    statistics.share()
    agree(optimizer, mesh.world)
    units = _filled(table, mesh, named)  # 4
    states = States(optimizer, table, units, named)  # 5
    sums = connected(table.sums(mesh.rank), mesh, units, slots=table.slots(mesh.rank))  # 6
    sharers = sharers_of(units, table, mesh)
    weights = Weights(model, table, units, mesh, sharers)
    return Laid(model, table, mesh, units, sharers, sums, weights, states, statistics)


def _filled(table: Table, mesh: Mesh, named: Mapping[str, Tensor]) -> dict[str, FlatUnit]:
    """The flat units with the values of the parameters, which become views of whole weights."""
    layout = table.layout
    whole = layout.zero < 3 or mesh.shard.size == 1
    units: dict[str, FlatUnit] = {}
    for dtype, buffers in table.buffers.items():
        units |= allocate(
            buffers,
            dtype=dtype,
            device=mesh.device,
            own=lambda buffer: own_range(buffer, layout, mesh.rank),
            whole=lambda buffer: Whole(not keeps_shares(table, buffer.unit), whole),
        )

    def fill(piece: Piece, out: Tensor) -> None:
        out.copy_(named[piece.name].detach().reshape(-1)[piece.start : piece.stop])

    fill_masters(units, fill)
    for unit in units.values():
        views = {} if unit.shared_out else unit.views(unit.weights)
        for name in unit.buffer.names:
            if unit.summed.dtype != named[name].dtype:
                named[name].grad_dtype = unit.summed.dtype
            if name in views:
                named[name].data = views[name]
    return units


def _device(model: nn.Module) -> torch.device:
    """The one device of a model. Raises UserError for several, and for a model without weights."""
    devices = {x.device: name for name, x in chain(model.named_parameters(), model.named_buffers())}
    if len(devices) != 1:
        there = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise UserError(f"the model is on several devices: {there}; call model.to(DEVICE)")
    (device,) = devices
    if device.type == "meta":
        raise UserError(
            "the model is on the meta device and has no weights; build it on process 0 at least"
        )
    return device


def _from_first(parameter: Tensor, world: Group) -> None:
    """Makes a parameter that of rank 0."""
    if world.size > 1 and parameter.numel():
        flat = parameter.detach().contiguous().reshape(-1)
        world.broadcast(flat, 0)
        parameter.data.copy_(flat.view(parameter.shape))


def _compare(model: nn.Module, table: Table, world: Group) -> None:
    """Raises UserError when the processes have other models."""
    told = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    rows = f"{told} {sorted(table.unit_of.items())} {table.layout} {sorted(table.groups.items())}"
    if other := _other(rows, world):
        raise UserError(
            f"process {other} has another model, layout, units or groups of the optimizer than "
            "process 0: names, shapes and dtypes of all parameters must be alike"
        )


def _compare_settings(
    optimizer: torch.optim.Optimizer, clip: float | None, rules: Mapping[str, str], world: Group
) -> None:
    """Raises UserError when the processes have other settings."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    if other := _other(f"{type(optimizer).__name__} {groups} {clip} {rules}", world):
        raise UserError(
            f"process {other} has another optimizer than process 0, another rate or other setting "
            "of it, another clip or other rules for buffers; all have to be alike"
        )


def _other(told: str, world: Group) -> int:
    """The first rank whose value differs from that of rank 0; 0 if none does."""
    mine = [0.0] * world.size
    mine[world.rank] = float(crc32(told.encode()))
    numbers = world.sum_scalars(mine)
    return next((rank for rank, number in enumerate(numbers) if number != numbers[0]), 0)


def _require_free(model: nn.Module) -> None:
    """Raises UserError for a model that is another job's, was under zero3, or has lazy weights."""
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(one, UninitializedParameter | UninitializedBuffer):
            raise UserError(
                f"{name} is lazy and has no shape yet; run the model once on a batch, on all "
                "processes, then build the optimizer and call howdah.distribute"
            )
    for name, parameter in model.named_parameters():
        if is_laid_out(parameter):
            raise UserError(f"another job trains {name}; close that job, or build another model")
        if any(
            n > 1 and not step for n, step in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            raise UserError(
                f"elements of {name} share memory, as those of a closed zero3 job do; build the "
                "model again, and load what job.state() returned"
            )
