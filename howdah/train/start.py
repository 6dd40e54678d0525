"""Checks and preparations before training starts: text, checkpoint, folder of weights.

Under `howdah train`, the launching process does this before it starts the ranks: a mistake then
gives one sentence from one process, and the ranks find the tokens built. Under torchrun the ranks
are already running: all of them prepare the tokens, and rank 0 checks the rest.
"""

from collections.abc import Iterator

from howdah.base.errors import UserError, several
from howdah.checkpoint.export import require_free
from howdah.checkpoint.folders import steps
from howdah.text.batches import order_of
from howdah.text.labelled import labels_of
from howdah.text.sources import unreadable
from howdah.text.tokenizer import extra_tokens
from howdah.text.tokens import Corpus, packed, prepare, require_samples
from howdah.train.adapted import first_adapter, needs_base
from howdah.train.console import Say, encoding_bar
from howdah.train.inputs import input_problems, require_prompt
from howdah.train.job import Job
from howdah.train.resume import check_held_out, check_match, choose
from howdah.train.run_folder import EXPORT


def require_inputs(job: Job) -> None:
    """Raises UserError with everything that keeps `job` from starting and shows without encoding
    its text: the export, and `input_problems`.
    """
    if job.train.export:
        require_free(job.folder / EXPORT)
    if problems := input_problems(
        job.data,
        shape=job.shape,
        prompt=job.train.prompt,
        init_from=job.init_from,
        folder=job.folder,
    ):
        raise UserError(several([*unreadable(job.data), *problems]))
    for problem in needs_base(job.method, job.init_from):
        raise UserError(problem)


def prepare_tokens(job: Job, say: Say, *, check: bool = True) -> Corpus:
    """The tokens of the run, from the token cache, which is built if it is missing.

    check  compare an existing cache with its checksums

    Raises UserError when the text is too short for the run, or when the prompt is longer than the
    model's context.
    """
    with encoding_bar() as progress:
        corpus = prepare(
            job.data,
            vocab=job.shape.vocab,
            cache=job.cache,
            say=say,
            progress=progress,
            check=check,
            extra=extra_tokens(job.shape),
            labels=labels_of(job.shape),
        )
    order_of(corpus, sequence=job.data.sequence_length, seed=job.seed)
    require_samples(
        corpus, sequence=job.data.sequence_length, batch=job.batch.size(job.train.steps)
    )
    for note in cut_notes(corpus, job.data.sequence_length):
        say(f"note        {note}")
    open_still = job.init_from is None and not steps(job.folder / "checkpoints")
    if open_still and (note := vocab_note(corpus.entries, job.shape.vocab)):
        say(f"note        {note}")
    if job.train.prompt:
        require_prompt(job.train.prompt, corpus.tokenizer, context=job.shape.context)
    return corpus


def cut_notes(corpus: Corpus, sequence: int) -> Iterator[str]:
    """Yields a note for each source of conversations of which some are longer than a sample."""
    for name, tokens in zip(corpus.names, corpus.sources, strict=True):
        if tokens.trained is not None and (found := packed(tokens, sequence)).cut:
            without = (
                f", and {found.without:,} left out, without an answer" if found.without else ""
            )
            yield (
                f"{found.cut:,} of {len(tokens.starts):,} conversations of {name} are longer than "
                f"{sequence + 1:,} tokens, and are cut there{without}; data.sequence_length says "
                "how long a row is"
            )


def vocab_note(entries: int, vocab: int) -> str:
    """A note for a model that has at least 1 % more rows than its tokenizer has entries, which is
    more than rounding up gives; empty for others.
    """
    if (vocab - entries) * 100 < vocab:
        return ""
    return (
        f"the tokenizer has {entries:,} entries and model.vocab is {vocab:,}: {vocab - entries:,} "
        f"rows of the embedding stand for no token; model.vocab={entries} leaves them out"
    )


def prepare_start(
    job: Job, corpus: Corpus, *, other_held_out: bool = False, parts: bool = False
) -> None:
    """Checks what the run starts from: that its newest checkpoint belongs to its text; where there
    is none, its first adapter. The caller holds the lock of the run folder. Checkpoints that are
    damaged are passed over, and told where the run begins.

    other_held_out  whether the held-out text may be other than that of the checkpoint
    parts           whether other machines of the run may have parts of the checkpoint

    Raises UserError when the run cannot start.
    """
    checkpoint = choose(job.folder / "checkpoints", lambda _: None, parts=parts)
    if checkpoint:
        check_match(checkpoint, job, corpus)
        if not other_held_out:
            check_held_out(checkpoint, corpus)
    elif job.init_from is not None and job.init_adapter is not None:
        first_adapter(job.init_adapter, job.shape, job.method, job.init_from)
