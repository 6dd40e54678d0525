"""What is found before training starts: text, checkpoint, folder of weights.

Under `howdah train` the launching process does this alone, so that a mistake is one sentence from
one process, and the ranks find the tokens built. Under torchrun, which has started the ranks
already, all look for the tokens, and rank 0 alone for the rest.
"""

from howdah.base.errors import UserError
from howdah.text.batches import order_of
from howdah.text.tokenizer import prompt_ids
from howdah.text.tokens import Corpus, prepare, require_samples
from howdah.train.console import Say, encoding_bar
from howdah.train.job import Job
from howdah.train.resume import check_match, choose, read_folder


def prepare_tokens(job: Job, say: Say, *, check: bool = True) -> Corpus:
    """Builds the token cache, and with `check` compares one that is there with its checksums.

    Raises UserError when its text cannot feed the run, or the prompt is longer than the context.
    """
    with encoding_bar() as progress:
        corpus = prepare(
            job.data,
            vocab=job.shape.vocab,
            cache=job.cache,
            say=say,
            progress=progress,
            check=check,
        )
    order_of(corpus, sequence=job.data.sequence_length, seed=job.seed)
    require_samples(
        corpus, sequence=job.data.sequence_length, batch=job.batch.size(job.train.steps)
    )
    if job.train.prompt:
        tokens = len(prompt_ids(corpus.tokenizer, job.train.prompt, corpus.end))
        if tokens > job.shape.context:
            raise UserError(
                f"train.prompt has {tokens} tokens, and the model's context is "
                f"{job.shape.context}: shorten it"
            )
    return corpus


def prepare_start(job: Job, corpus: Corpus, say: Say) -> None:
    """Checks what the run starts from. Raises UserError. The caller holds the run folder."""
    checkpoint = choose(job.folder / "checkpoints", say)
    if checkpoint:
        check_match(checkpoint, job, corpus)
    elif job.init_from is not None:
        read_folder(job.init_from, job.shape)
