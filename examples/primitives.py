"""One call of each operation of a group, on two ranks of this machine."""

import torch

from howdah import Workers
from howdah.comm.group import Group
from howdah.comm.transport import Transport


def every_operation(transport: Transport) -> list[str]:
    """Calls each operation; what this rank has found, as lines."""
    group, lines = Group(transport), []
    other, is_root = 1 - group.rank, group.rank == 0

    def show(operation: str, x: torch.Tensor) -> None:
        lines.append(f"{operation:14} {x.tolist()}")

    mine = (torch.tensor([1.0, 2.0]) + 10 * group.rank).clone  # makes [1, 2] and [11, 12]
    one, four = torch.zeros(1), torch.zeros(4)
    group.all_reduce(x := mine())
    show("all_reduce", x)
    group.reduce(x := mine(), 0, op="max")
    show("reduce", x)
    group.reduce_scatter(one, mine(), op="mean")
    show("reduce_scatter", one)
    group.all_gather(four, mine())
    show("all_gather", four)
    group.gather(four if is_root else None, mine() + 1, 0)
    show("gather", four)
    group.scatter(one, mine() if is_root else None, 0)
    show("scatter", one)
    group.broadcast(x := mine(), 1)
    show("broadcast", x)
    group.all_to_all(x := torch.zeros(2), mine())
    show("all_to_all", x)
    group.send(mine(), other) if is_root else group.receive(x, other)
    group.exchange(x, mine(), to=other, source=other)
    show("exchange", x)
    with group.together(async_op=True) as handle:
        group.all_reduce(x := mine(), op="product")
        group.broadcast(four, 0)
    handle.result()
    show("together", x)
    group.copy(shared := group.allocate((2,)), mine())
    group.signal(other) if is_root else group.wait(other)
    show("copy", shared)
    group.barrier()
    group.close()
    return lines


def main() -> None:
    """Prints what rank 0 has found."""
    with Workers(2) as workers:
        print("\n".join(workers.run(every_operation, ranks=2)[0]))


if __name__ == "__main__":
    main()
