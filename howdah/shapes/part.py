"""The parts of a model: what pipeline stages are cut from.

    embedding  encoder.0  encoder.1  target  layers.0  layers.1  layers.2  head

A block is a part with a layer; "target" is where a decoder's tokens enter behind an encoder.
"""


class Part(str):
    """The name of a part. Parts are keys of tables and appear in messages, so they are strings."""

    @property
    def is_block(self) -> bool:
        """Whether the part is a block of a stack."""
        return self.partition(".")[2].isdecimal()

    @property
    def stack(self) -> str:
        """The stack of a block, "layers" or "encoder"; of another part its own name."""
        return self.partition(".")[0] if self.is_block else str(self)

    @property
    def layer(self) -> int:
        """The index of a block in its stack."""
        return int(self.partition(".")[2])


def block(stack: str, layer: int) -> Part:
    """The part that a layer of a stack is, such as layers.7."""
    return Part(f"{stack}.{layer}")
