"""The border of a sub-layer inside of which a layout may have only a part of each matrix.

    x ── enter ── matrices, of which this rank has some columns or heads ── leave ── out

A plain model has all of them, and nothing happens at the border. Latent attention and experts have
a border as a whole, because some of their matrices are whole on every rank, inside.
"""

from torch import Tensor


class Region:
    """The border of a sub-layer that is whole.

    first  whether this rank adds what all ranks inside the border would add alike
    """

    first = True

    def enter(self, x: Tensor) -> Tensor:
        """What the matrices take, [b, S, h], from x [b, s, h]."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """What the sub-layer gives, [b, s, h], from this rank's term of it, x [b, S, h]."""
        return x


WHOLE = Region()
