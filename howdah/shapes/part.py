"""The parts of a model: what pipeline stages are cut from.

    embedding  encoder.0  encoder.1  target  layers.0  layers.1  layers.2  head

A block is a part with a layer; "target" is where a decoder's tokens enter behind an encoder.
"""

ENDS = ("embedding", "target", "head")  # the parts that are no blocks
STACKS = ("encoder", "layers")
NO_LAYER = -1


class Part(str):
    """A part: Part("layers", 7) is a block, Part("head") is none.

    stack  the stack of a block, "layers" or "encoder"; of another part its own name
    layer  the index of a block in its stack; -1 of another part

    Parts are keys of tables, are compared with names of units and appear in messages, so each is
    also its name, such as "layers.7": composed here, and read nowhere.
    """

    __slots__ = ("layer", "stack")
    stack: str
    layer: int

    def __new__(cls, stack: str, layer: int = NO_LAYER) -> "Part":
        """Raises ValueError where there is no such part."""
        is_block = layer != NO_LAYER
        if stack not in (STACKS if is_block else ENDS) or layer < NO_LAYER:
            raise ValueError(f"{stack!r} with layer {layer} is no part of a model")
        part = super().__new__(cls, f"{stack}.{layer}" if is_block else stack)
        object.__setattr__(part, "stack", stack)
        object.__setattr__(part, "layer", layer)
        return part

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a part does not change: {self}.{name}")

    def __reduce__(self) -> tuple[type["Part"], tuple[str, int]]:
        return Part, (self.stack, self.layer)

    @property
    def is_block(self) -> bool:
        """Whether the part is a block of a stack."""
        return self.layer != NO_LAYER
