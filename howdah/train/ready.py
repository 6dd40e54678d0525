"""What is found before any process is started: text, folder, checkpoint.

The launching process does this alone, so that a mistake is a sentence from one process, and
the ranks find the tokens built.
"""

from howdah.checkpoint.load import newest
from howdah.train.batches import order_of
from howdah.train.folder import hold
from howdah.train.job import Job
from howdah.train.resume import check_match, read_folder
from howdah.train.show import Say
from howdah.train.tokens import prepare, require_samples


def make_ready(job: Job, say: Say) -> None:
    """Builds the token cache and checks everything that a rank would stumble over.

    Raises BadInput with what is wrong.
    """
    with hold(job.folder):
        corpus = prepare(job.data, vocab=job.shape.vocab, cache=job.cache, say=say)
        order_of(corpus, sequence=job.data.sequence, seed=job.seed)
        require_samples(corpus, sequence=job.data.sequence, batch=job.batch.size(job.pace.steps))
        checkpoint = newest(job.folder / "checkpoints", say)
        if checkpoint:
            check_match(checkpoint, shape=job.shape, fingerprint=corpus.fingerprint)
        elif job.init_from is not None:
            read_folder(job.init_from, job.shape)
