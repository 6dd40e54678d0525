"""Workers with something broken in them, which a verification has to notice."""

from howdah.verify.evidence import gather


def gather_broken(transport, broken, *arguments):
    """`gather`, with something broken for as long as it runs."""
    with broken():
        return gather(transport, *arguments)


class Broken:
    """Workers on which every rank has the same break.

    broken  returns the context of the break; a function of a module, or a partial of one, because
            it is sent to the ranks
    """

    def __init__(self, workers, broken):
        self._workers, self._broken = workers, broken

    def run(self, function, *arguments, ranks=None, transport=None):
        assert function is gather
        return self._workers.run(gather_broken, self._broken, *arguments, ranks=ranks)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass  # the shared workers live on
