"""Cases to verify: the forms that models come in, at sizes that take milliseconds; and a proof."""

from dataclasses import replace

from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.shapes.presets import preset
from howdah.verify.case import Case, small_shape
from howdah.verify.verify import report, verify

LAPTOP = small_shape(preset("laptop"), context=16)  # grouped queries, RMSNorm, SwiGLU, tied
FORMS = {
    "laptop": LAPTOP,
    "gpt2": small_shape(preset("gpt2-124m"), context=16),  # LayerNorm, learned, biases, GELU
    "qwen3": small_shape(preset("qwen3-8b"), context=16),  # norms of queries and keys, untied
    "norm after": replace(LAPTOP, norm_at="after"),
    "untied": replace(LAPTOP, tie_embeddings=False),
    "stretched": small_shape(preset("llama3-8b"), context=16),  # scaled rotary positions
}


def case_of(layout, *, form="laptop", precision="float64", steps=2, dropout=0.0):
    """A case whose last micro-batch is short by one sample: a row of padding on the last rank."""
    resolved = parse_layout(layout)
    rows = 2 * resolved.readers * (resolved.micros or 1)
    return Case(
        shape=FORMS[form],
        layout=resolved,
        method=Method(precision, dropout=dropout),
        samples=rows - 1,
        micro=2,
        sequence=16,
        steps=steps,
        seed=3,
    )


def prove(case, workers, *, controls=False, transport=None):
    """Raises with the whole report if the layout is not proved, or a control not noticed; returns
    the verdict.
    """
    verdict = verify(case, workers, controls=controls, transport=transport)
    assert verdict.proved, "\n".join(report(verdict))
    return verdict
