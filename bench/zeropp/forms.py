"""The forms that are compared: the three parts of ZeRO++ alone and together, beside plain zero3."""

from dataclasses import dataclass, replace

from howdah.plan.comm import Algorithms
from howdah.plan.method import Method

RANKS, NODE = 4, 2


@dataclass(frozen=True)
class Form:
    """A layout of four ranks on two nodes, and how it sends.

    words     of the layout, without micro-batches
    gathers   method.gather_dtype
    sums      method.gradient_dtype
    algorithm of gathers and sums; empty: every rank sends to every other
    feedback  method.gradient_feedback
    """

    words: str = "dp4 zero3"
    gathers: str = "full"
    sums: str = "full"
    algorithm: str = ""
    feedback: bool = False

    @property
    def keys(self) -> list[str]:
        """The same as changes of a recipe."""
        given = {"gather_dtype": self.gathers, "gradient_dtype": self.sums}
        changes = [f"method.{key}={value}" for key, value in given.items() if value != "full"]
        changes += ["method.gradient_feedback=true"] * self.feedback
        return [f"layout={self.words}", *changes]

    @property
    def algorithms(self) -> Algorithms:
        return Algorithms(reduce_scatter=self.algorithm, all_gather=self.algorithm)

    def of(self, method: Method) -> Method:
        return replace(method, gather_dtype=self.gathers, gradient_dtype=self.sums)  # type: ignore


PLAIN, COPIED, WHOLE = "zero3", "zero3 hpz2", "zero3 hpz2, int8, int4"
FORMS = {
    PLAIN: Form(),
    COPIED: Form("dp4 zero3 hpz2"),
    "zero3, int8": Form(gathers="int8"),
    "zero3, int4": Form(sums="int4"),
    WHOLE: Form("dp4 zero3 hpz2", "int8", "int4"),
}
# What is sent is the same: of these, only losses are compared.
FED_BACK = {
    "zero3, int4 with feedback": Form(sums="int4", feedback=True),
    "zero3 hpz2, int8, int4 with feedback": Form("dp4 zero3 hpz2", "int8", "int4", feedback=True),
}
# What makes plain zero3 itself send less: the paper's gradients have 16 bits, and a hierarchy sends
# each share to the other host once.
OTHERS = {
    "zero3, gradients in bf16": Form(sums="bf16"),
    "zero3, hierarchical": Form(algorithm="hierarchical pieces=4"),
}
