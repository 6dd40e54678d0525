"""The hosts of a run as `howdah doctor --hosts` judges them: their clocks, cards and links.

What was measured comes from the ranks (`comm/topology.py`); here it is decided what is wrong, as in
`doctor.py`. A finding with a lack means that a run would wait for a host, or stop.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from howdah.host.finding import Finding
from howdah.machines.topology import FULL, Topology, cards_of, levels, slow_cards

SLOW = 1.5  # times the usual seconds of a product, from which on a processor is slow
CLOCK = 2.0  # seconds by which clocks may differ: what a message's way cannot explain
MBIT = 1e6 / 8  # bytes/s


def judge_hosts(
    topology: Topology, clocks: Sequence[float], products: Sequence[float]
) -> list[Finding]:
    """The findings on hosts of a run.

    clocks    seconds by which each host's clock is ahead of the first one's
    products  seconds of a product of matrices on each
    """
    each = topology.ranks
    named = f"{len(topology.hosts)}: {' '.join(topology.hosts)}; {each} rank{'s' * (each > 1)} each"
    return [
        Finding("hosts", named),
        judge_clocks(topology.hosts, clocks),
        judge_processors(topology.hosts, products),
        *judge_cards(topology),
        judge_pairs(topology),
        judge_switches(topology),
        judge_messages(topology),
    ]


def judge_clocks(hosts: Sequence[str], clocks: Sequence[float]) -> Finding:
    """The finding on clocks. The usual one is the median of all."""
    usual = median(clocks)
    off = {host: clock - usual for host, clock in zip(hosts, clocks, strict=True)}
    value = f"within {max(clocks) - min(clocks):.1f} s"
    wrong = [
        f"{host} is {abs(seconds):,.0f} s {'ahead' if seconds > 0 else 'behind'}"
        for host, seconds in off.items()
        if abs(seconds) > CLOCK
    ]
    if not wrong:
        return Finding("clocks", value)
    lack = f"{'; '.join(wrong)}: dates of checkpoints and logs will not fit together"
    return Finding("clocks", value, f"{lack}; set the clock there (NTP)")


def judge_processors(hosts: Sequence[str], products: Sequence[float]) -> Finding:
    """The finding on processors. The usual one is the median of all."""
    usual = median(products)
    slow = [
        f"{host} takes {seconds / usual:.1f} times as long as the others"
        for host, seconds in zip(hosts, products, strict=True)
        if seconds > SLOW * usual
    ]
    value = f"within {max(products) / min(products):.1f} times"
    if not slow:
        return Finding("processors", value)
    lack = f"{'; '.join(slow)}, and all ranks wait for it: see what runs there and how it is cooled"
    return Finding("processors", value, f"{lack}, or leave it out")


def judge_cards(topology: Topology) -> Iterator[Finding]:
    """A finding on the card of each host."""
    slow = slow_cards(topology)
    for number, (host, rate) in enumerate(zip(topology.hosts, cards_of(topology), strict=True)):
        lack = None
        if number in slow:
            usual = median(cards_of(topology)) / rate
            lack = (
                f"its card is {usual:.1f} times as slow as the others, and all ranks wait for it: "
                "look at its cable, port and driver, or leave it out"
            )
        yield Finding(f"card of {host}", f"{rate / MBIT:,.0f} Mbit/s", lack)


def judge_pairs(topology: Topology) -> Finding:
    """The finding on links between hosts that are slow though both cards are not, and which no leaf
    switches explain.
    """
    hosts, cards, rates = topology.hosts, cards_of(topology), topology.rates
    if levels(topology):
        return Finding("links", "slower between leaf switches")
    slow = [
        f"{hosts[a]} to {hosts[b]} {rates[a][b] / MBIT:,.0f} Mbit/s"
        for a in range(len(hosts))
        for b in range(len(hosts))
        if 0 < rates[a][b] < FULL * min(cards[a], cards[b])
    ]
    if not slow:
        return Finding("links", "as fast as the cards")
    lack = f"{', '.join(slow)}: what is between them carries less than their cards"
    return Finding("links", f"{len(slow)} slow", f"{lack}; look at the switch, or measure again")


def judge_switches(topology: Topology) -> Finding:
    """The finding on switches."""
    found = levels(topology)
    if not found:
        return Finding("switches", "one, as it seems")
    (level,) = found
    over = f"{level.oversubscription:.1f} times what leads up"
    return Finding("switches", f"leaves of {level.nodes} hosts, whose cards carry {over}")


def judge_messages(topology: Topology) -> Finding:
    """The finding on short messages."""
    way, work = topology.latency * 1e6, topology.message * 1e6
    return Finding("messages", f"{way:,.0f} us on the way, {work:,.0f} us of a rank's work")
