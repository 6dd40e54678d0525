"""How the tokens here lie in their sequences, for what routers count of whole sequences.

whole sequences                  one run of tokens each, and nothing before it
sequences that ranks share       a few runs of each; how often an expert was chosen in the others
                                 comes from the other ranks (`parallel/context_counts.py`)
"""

import torch
from torch import Tensor


class Sequences:
    """Sequences that are here as a whole."""

    shared = False

    def length(self, here: int) -> int:
        """Tokens of a whole sequence, of which so many are here."""
        return here

    def runs(self, here: int) -> tuple[int, ...]:
        """The lengths of the runs of neighbouring tokens, of which so many are here in all."""
        return (here,)

    def hear(self, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Of how often each expert was chosen in each run, [n, b, E]: how often before each run of
        its sequence, [n, b, E], and in whole sequences, [b, E].
        """
        return torch.zeros_like(runs), runs[0]


WHOLE_SEQUENCES = Sequences()
