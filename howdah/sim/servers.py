"""What parameter servers can gain on links of one speed: bounds, for deciding how many to add.

Jiang et al. 2020 (https://www.usenix.org/conference/osdi20/presentation/jiang): n workers with k
machines beside them that only sum, M bytes of gradients, B bytes/s in each direction, where workers
may serve, too:

    t = 2n(n - 1)·M / ((n² + kn - 2k)·B)       k = 0: a ring's 2(n - 1)/n·M/B       k = n: M/B

Servers of a layout (`dp4 server2`) are alone with what they serve: their busier end moves n/k
times what a worker does. So they are faster than a ring from k > n²/(2(n - 1)) on, and more than n
of them wait for workers. With others on the workers' machines (`best_shares`) all links are busy.
"""


def bound(workers: int, servers: int, *, size: float, bandwidth: float) -> float:
    """The least seconds in which `workers` can sum `size` bytes, with servers beside them."""
    n, k = workers, min(servers, workers)
    if n == 1:
        return size / bandwidth if k else 0.0
    return 2 * n * (n - 1) * size / ((n * n + k * n - 2 * k) * bandwidth)


def best_shares(workers: int, servers: int) -> list[int]:
    """How much each server should keep, beside the others, with which `bound` is reached: first
    those that are alone on their machines, k of them, then one on each worker's machine.

    >>> best_shares(4, 1)
    [6, 3, 3, 3, 3]
    """
    n, k = workers, min(servers, workers)
    return [2 * (n - 1)] * k + [n - k] * n * (k < n)


def alone(workers: int, servers: int, *, size: float, bandwidth: float) -> float:
    """The least seconds in which `workers` push `size` bytes each to servers that do nothing else,
    while weights of as many bytes come back.
    """
    return max(1.0, workers / servers) * size / bandwidth


def least_paying(workers: int) -> int:
    """The fewest servers of a layout with which it is faster than a ring, on links of one speed;
    0 if no number of them is.
    """
    found = (
        k
        for k in range(1, workers + 1)
        if alone(workers, k, size=1, bandwidth=1) < bound(workers, 0, size=1, bandwidth=1)
    )
    return next(found, 0)
