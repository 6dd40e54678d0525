"""What a run costs: days, device-hours, money, energy and carbon, from a throughput.

    tokens / (tokens/s)            seconds
    seconds · devices / 3600       device-hours    x  USD/h                     money
                                                   x  watts x PUE               energy
                                                   x  kg/kWh                    carbon

The throughput is an input; this module does not predict it. Energy and carbon are computed as in
the model cards of Llama (arXiv 2302.13971, 2307.09288): a device at its full board power, times
the power usage effectiveness of the site (1.1), times the grid's carbon (0.385 kg/kWh). Hosts,
switches and failed runs are left out, as in those model cards.
"""

from dataclasses import dataclass

from howdah.machines.cluster import Cluster

HOURS_OF_A_YEAR = 8766.0
YEARS = 5.0  # over which the price of a bought device is spread


@dataclass(frozen=True)
class Rates:
    """The power, prices and carbon of one device while it runs.

    watts     average power of the device; None if its power is not published
    purchase  USD per hour: the price of the device, spread over years; None if not known
    rent      USD per hour; None if not known
    pue       power of the whole site / power of its devices
    carbon    kg of CO2 equivalent per kWh
    """

    watts: float | None
    purchase: float | None
    rent: float | None
    pue: float
    carbon: float


@dataclass(frozen=True)
class Cost:
    """The time, money, energy and carbon of a run; None for numbers that the cluster lacks.

    days          duration of the run
    device_hours  hours, summed over all devices
    purchase      USD, if the devices are bought
    rent          USD, if they are rented
    kwh           energy in kWh
    tonnes        tonnes of CO2 equivalent
    """

    days: float
    device_hours: float
    purchase: float | None
    rent: float | None
    kwh: float | None
    tonnes: float | None


def hourly(
    cluster: Cluster, *, use: float = 1.0, years: float = YEARS, rent: float | None = None
) -> Rates:
    """The rates of a cluster's devices.

    use    average power of a run, as a fraction of the range from idle (0) to full power (1);
           model cards assume 1
    years  years over which the price of a bought device is spread
    rent   USD per device and hour, in place of the cluster's own
    """
    device = cluster.device
    return Rates(
        watts=None if device.watts is None else device.idle + use * (device.watts - device.idle),
        purchase=None if device.price is None else device.price / (years * HOURS_OF_A_YEAR),
        rent=cluster.rent_of_device if rent is None else rent,
        pue=cluster.pue,
        carbon=cluster.carbon,
    )


def cost(device_hours: float, *, devices: int, rates: Rates) -> Cost:
    """The cost of `device_hours` on `devices` devices that run in parallel."""
    kwh = None if rates.watts is None else device_hours * rates.watts * rates.pue / 1000
    return Cost(
        days=device_hours / devices / 24,
        device_hours=device_hours,
        purchase=None if rates.purchase is None else device_hours * rates.purchase,
        rent=None if rates.rent is None else device_hours * rates.rent,
        kwh=kwh,
        tonnes=None if kwh is None else kwh * rates.carbon / 1000,
    )


def run_cost(tokens: float, *, tokens_per_second: float, devices: int, rates: Rates) -> Cost:
    """The cost of training on `tokens` tokens, at `tokens_per_second` of all devices together."""
    hours = tokens / tokens_per_second / 3600
    return cost(hours * devices, devices=devices, rates=rates)
