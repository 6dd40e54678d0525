"""A rank that makes all-reduces and prints, as JSON, the bytes that howdah counted by link.

python counted.py ELEMENTS TIMES       the launcher's variables say who the rank is
"""

import json
import sys
from collections import Counter

import torch

from howdah.comm import connect
from howdah.plan.comm import Hosts


def main() -> None:
    elements, times = map(int, sys.argv[1:])
    group = connect("torch", hosts=Hosts("gloo", "network"))
    x = torch.ones(elements)
    for _ in range(times):
        group.all_reduce(x)
    if x[0] != float(group.size) ** times:
        raise SystemExit(f"the sum is {x[0]}")
    by_link: Counter[str] = Counter()
    for traffic, count in group.counters.sent().items():
        by_link[traffic.link] += count
    group.close()
    print(json.dumps(by_link))


if __name__ == "__main__":
    main()
