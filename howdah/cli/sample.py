"""`howdah sample`: text from a model, drawn or searched, on this process or on several. A decoder
continues a prompt; behind an encoder it writes what belongs to the prompt.

Everything that can be wrong is looked at before a process is started: the prompts, the settings,
and whether the layout fits the model.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from howdah.base.errors import UserError
from howdah.base.output import lasting_output
from howdah.base.signals import listen
from howdah.cli.environment import ready_torch
from howdah.host.facts import usable_cores

if TYPE_CHECKING:
    from howdah.comm.launch import Seat
    from howdah.generate.beams import Beams
    from howdah.generate.draw import Draw
    from howdah.generate.predictor import Predictor
    from howdah.tasks.opened import OpenedModel

TEMPERATURE = 0.8
STOPPING: dict[str, bool | Literal["never"]] = {"true": True, "false": False, "never": "never"}


@dataclass(frozen=True)
class Wanted:
    """What is asked of a model.

    folder  a run folder or a Hugging Face folder
    how     a draw or a search
    chat    whether each prompt is what a user says
    """

    folder: Path
    prompts: tuple[str, ...]
    length: int
    how: "Draw | Beams"
    chat: bool = False

    def tokens(self, opened: "OpenedModel") -> list[list[int]]:
        """The tokens that each text follows. Raises UserError."""
        from howdah.text.tokenizer import as_utf8

        if not self.chat:
            return [opened.prompt(prompt) for prompt in self.prompts]
        said = ({"role": "user", "content": as_utf8(prompt)} for prompt in self.prompts)
        return [opened.prompt([message]) for message in said]


def sample(  # noqa: PLR0913, PLR0917  each is an option of the command
    folder: Annotated[Path, typer.Argument(help="a run folder, or a Hugging Face folder")],
    prompts: Annotated[
        list[str], typer.Argument(help="what each text begins with, or what an encoder reads")
    ],
    length: Annotated[int, typer.Option(help="tokens to add")] = 200,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; 0.8 if not given")
    ] = None,
    top_k: Annotated[int, typer.Option(help="the k likeliest tokens only; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="the likeliest tokens that hold this share")] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="above 1: tokens that are there are less likely")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="names the draw")] = 0,
    beams: Annotated[int, typer.Option(help="search with so many beams; 0: draw")] = 0,
    length_penalty: Annotated[
        float, typer.Option(help="of beams: above 0, long texts are preferred")
    ] = 1.0,
    early_stopping: Annotated[
        str, typer.Option(help="of beams: true, false or never, as in transformers")
    ] = "false",
    layout: Annotated[
        str, typer.Option(help='on several processes, such as "tp2" or "pp2 tp2"')
    ] = "single",
    chat: Annotated[
        bool, typer.Option("--chat", help="answer each prompt, by the model's chat template")
    ] = False,
) -> None:
    """Continue each of PROMPTS with the newest checkpoint of a run; or, with an encoder-decoder,
    write what belongs to it.
    """
    if early_stopping not in STOPPING:
        raise UserError(f"--early-stopping is {early_stopping!r}; give true, false or never")
    if beams and (temperature is not None or top_k or top_p != 1 or seed):
        raise UserError(
            "--beams searches for the likeliest text and draws nothing; leave --temperature, "
            "--top-k, --top-p and --seed out"
        )
    if not beams and (length_penalty != 1 or early_stopping != "false"):
        raise UserError("--length-penalty and --early-stopping are of a search; give --beams, too")
    ready_torch()
    from howdah.generate.beams import Beams, check_beams
    from howdah.generate.draw import Draw, check_draw
    from howdah.generate.placed import decoding_plan
    from howdah.generate.predictor import check_prompt
    from howdah.plan.layout import parse_layout
    from howdah.tasks.opened import open_model

    opened = open_model(folder, say=_say)
    if beams:
        stop = STOPPING[early_stopping]
        search = Beams(beams, length_penalty, stop, repetition_penalty)
        check_beams(search, vocab=opened.shape.vocab)
        how: Draw | Beams = search
    else:
        wanted = TEMPERATURE if temperature is None else temperature
        how = Draw(wanted, top_k, top_p, seed, repetition_penalty)
        check_draw(how)
    asked = Wanted(folder.absolute(), tuple(prompts), length, how, chat)
    tokens = asked.tokens(opened)
    for prompt in tokens:
        check_prompt(opened.shape, prompt, length=length)
    plan = decoding_plan(opened.shape, parse_layout(layout))
    room = opened.shape.context - max(map(len, tokens))
    if opened.start is None and length > room:
        _say(f"note: {room} tokens are added at most: {opened.shape.context} are the context")
    if plan.layout.world > 1:
        sys.exit(_launched(asked, plan.layout.world, str(plan.layout)))
    write(opened.predictor(opened.model(), tokens), opened, asked)


def write(model: "Predictor", opened: "OpenedModel", asked: Wanted, *, first: bool = True) -> None:
    """Prints the texts that follow the prompts: one alone piece by piece, several each as a whole.

    first  whether this rank prints; all ranks decode
    """
    from howdah.generate.beams import Beams, beam_search
    from howdah.generate.draw import listed
    from howdah.generate.rows import generate, generate_rows
    from howdah.generate.texts import decode

    prompts = opened.texts(asked.tokens(opened))
    shown = opened.start is None and not asked.chat
    ends, length, how = opened.ends, asked.length, asked.how
    if isinstance(how, Beams):
        found = beam_search(model, prompts, length=length, beams=how, ends=ends)
        texts = [_without(best.tokens, ends) for best, *_ in found]
    elif len(prompts) == 1 and opened.start is None:
        parts = decode(
            opened.tokenizer,
            generate(model, prompts[0], length=length, draw=how, ends=ends),
        )
        _tell(asked.prompts[0] if first and shown else "")
        for part in parts:
            _tell(part if first else "")
        return _tell("\n" if first else "")
    else:
        steps = generate_rows(model, prompts, length=length, draw=how, ends=ends)
        texts = listed(steps, len(prompts))
    for prompt, tokens in zip(asked.prompts, texts, strict=True):
        if first:
            print((prompt if shown else "") + opened.decoded(tokens))
    return None


def _without(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens of a text that was found, without the one that ended it."""
    return [token for token in tokens if token not in ends]


def _tell(text: str) -> None:
    print(text, end="", flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _launched(asked: Wanted, ranks: int, layout: str) -> int:
    """Decodes in processes that are started on this machine; returns their exit code."""
    from howdah.comm.launch import Terms, launch

    terms = Terms(ranks=ranks, save_seconds=1, preload=["howdah.generate.placed"])
    threads = max(usable_cores() // ranks, 1)
    with listen(patient=True):
        ending = launch(decode_rank, [asked, layout, threads], terms, say=_say)
    if ending.why:
        _say(f"howdah: {ending.why.rstrip()}")
    return ending.code


def decode_rank(seat: "Seat", asked: Wanted, layout: str, threads: int) -> int:
    """Decodes as a rank that this program has started; returns the rank's exit code."""
    import torch

    from howdah.comm.rendezvous import choose
    from howdah.generate.placed import decoding_plan, place
    from howdah.parallel.mesh import connect_mesh
    from howdah.plan.layout import parse_layout
    from howdah.tasks.opened import open_model

    lasting_output()
    torch.set_num_threads(threads)
    with listen(last=True):
        device = torch.device("cpu")
        opened = open_model(asked.folder, say=lambda line: None)
        plan = decoding_plan(opened.shape, parse_layout(layout))
        met = choose(seat.store, rank=seat.rank, size=seat.size, device=device)
        with closing(met) as transport, connect_mesh(plan.layout, transport, device) as mesh:
            placed = place(plan, mesh, opened.fill, dtype=torch.float32)
            model = opened.predictor(placed, asked.tokens(opened))
            write(model, opened, asked, first=seat.rank == 0)
    return 0
