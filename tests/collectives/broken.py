"""Ways to break a program, each at one place."""

from dataclasses import replace


def with_steps(program, rank, steps):
    every = list(program.steps)
    every[rank] = tuple(steps)
    return replace(program, steps=tuple(every))


def changed(program, rank, index, **fields):
    """One step of a rank has other fields; None in place of fields: it is dropped."""
    steps = list(program.steps[rank])
    steps[index] = steps[index]._replace(**fields)
    return with_steps(program, rank, steps)


def without(program, rank, index):
    steps = list(program.steps[rank])
    del steps[index]
    return with_steps(program, rank, steps)


def ends(program):
    """((rank, index of a send), (rank, index of its receive)) of all messages."""
    sends, receives = {}, {}
    for rank, steps in enumerate(program.steps):
        for index, step in enumerate(steps):
            if step.kind == "send":
                sends.setdefault((rank, step.peer), []).append((rank, index))
            elif not step.source:
                receives.setdefault((step.peer, rank), []).append((rank, index))
    for pair, some in sends.items():
        yield from zip(some, receives[pair], strict=True)


def dropped_messages(program):
    for sender, receiver in ends(program):
        yield without(without(program, *sender), *receiver)


def dropped_steps(program):
    for rank, steps in enumerate(program.steps):
        for index in range(len(steps)):
            yield without(program, rank, index)


def other_chunks(program):
    """Both ends of a message name the chunks beside those they should."""
    for sender, receiver in ends(program):
        spans = program.steps[sender[0]][sender[1]].spans
        chunks = sorted((u + 1) % program.chunks for a, b in spans for u in range(a, b))
        moved = tuple((u, u + 1) for u in chunks)
        if program.chunks > 1 and chunks != [u for a, b in spans for u in range(a, b)]:
            yield changed(changed(program, *sender, spans=moved), *receiver, spans=moved)


def other_kinds(program):
    """What should be added is kept, and the other way round."""
    swap = {"add": "receive", "receive": "add", "copy": "reduce", "reduce": "copy"}
    for rank, steps in enumerate(program.steps):
        for index, step in enumerate(steps):
            if step.kind != "send":
                yield changed(program, rank, index, kind=swap[step.kind])


def sent_twice(program):
    for (a, i), (b, j) in ends(program):
        first = list(program.steps[a])
        second = list(program.steps[b])
        first.insert(i, first[i])
        second.insert(j, second[j])
        yield with_steps(with_steps(program, a, first), b, second)
