"""Texts from a model: drawn token after token, for one prompt or for several together.

    prompts → model → logits of the next tokens → draw → model → ...

The prompts pass through the model once, which stores their keys and values in a cache. After that,
each new token is one row. A text ends after `length` tokens, at an end token, or at the model's
context length: there are no learned positions beyond it, and rotary ones were never trained there.
It then leaves the batch.
"""

from collections.abc import Iterator, Sequence
from itertools import count

import torch

from howdah.generate.draw import Draw, Repeated, check_draw, choose_each
from howdah.generate.predictor import Predictor, check_prompt, padded, together

Step = list[tuple[int, int]]  # (number of the prompt, its next token)


def generate(
    model: Predictor, tokens: Sequence[int], *, length: int, draw: Draw, ends: Sequence[int]
) -> Iterator[int]:
    """Yields the tokens that follow `tokens`, one by one; the arguments are those of
    `generate_rows`.
    """
    steps = generate_rows(model, [tokens], length=length, draw=draw, ends=ends)
    return (token for step in steps for _, token in step)


def generate_rows(
    model: Predictor,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    draw: Draw,
    ends: Sequence[int],
) -> Iterator[Step]:
    """Yields, step by step, (number of the prompt, its next token) for those that go on.

    length  most tokens to add to each prompt
    ends    tokens that end a text; they are not yielded

    Raises UserError at the call when a setting is out of range, or a prompt is empty, too long, or
    has tokens outside of the vocabulary.
    """
    check_draw(draw)
    for prompt in prompts:
        check_prompt(model.shape, prompt, length=length)
    return _all_rows(model, prompts, length=length, draw=draw, ends=ends)


def _all_rows(
    model: Predictor,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    draw: Draw,
    ends: Sequence[int],
) -> Iterator[Step]:
    room = {n: min(length, model.shape.context - len(p)) for n, p in enumerate(prompts)}
    for numbers in together(model.shape, len(prompts)):
        some = {number: prompts[number] for number in numbers if room[number] > 0}
        if some:
            yield from _rows(model, some, room, draw=draw, ends=ends)


def _rows(
    model: Predictor,
    prompts: dict[int, Sequence[int]],
    room: dict[int, int],
    *,
    draw: Draw,
    ends: Sequence[int],
) -> Iterator[Step]:
    """`room` is how many tokens each prompt takes; at least one."""
    going = [*prompts]
    repeated = Repeated(
        [*prompts.values()], vocab=model.shape.vocab, penalty=draw.repetition_penalty
    )
    tokens, positions, cache = padded([*prompts.values()], model.device)
    for done in count(1):
        logits = repeated.lower(model.next_logits(tokens, positions, cache))
        drawn = choose_each(logits, draw, [len(prompts[n]) + done - 1 for n in going])
        step = [(n, token) for n, token in zip(going, drawn, strict=True) if token not in ends]
        yield step
        on = [at for at, n in enumerate(going) if drawn[at] not in ends and done < room[n]]
        if not on:
            return
        if len(on) < len(going):
            rows = torch.tensor(on)
            cache.keep(rows.to(model.device))
            repeated.keep(rows)
            positions = positions.index_select(0, rows.to(model.device))
            going, drawn = [going[at] for at in on], [drawn[at] for at in on]
        repeated.add(drawn)
        tokens = torch.tensor(drawn)[:, None].to(model.device)
        positions = positions[:, -1:] + 1
