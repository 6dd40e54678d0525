"""The labels that a model gives texts, with scores, in the forms of transformers' pipeline."""

from collections.abc import Sequence
from typing import Any

from howdah.base.errors import UserError, shown
from howdah.generate.placed import PlacedModel
from howdah.model.islands import promoted
from howdah.model.transformer import Transformer
from howdah.text.labelled import last_seen


def classified(
    model: Transformer | PlacedModel,
    texts: Sequence[Sequence[int]],
    *,
    pad: int | None,
    top_k: int | str | None,
) -> list[Any]:
    """The likeliest label of each text with its score, the softmax over all labels; or a list of
    the `top_k` likeliest of each. Raises UserError.

    texts  their tokens
    pad    the token that is not looked at for the last of a text
    top_k  "": the likeliest alone; None: all
    """
    if top_k not in ("", None) and (type(top_k) is not int or top_k < 1):
        raise UserError(f"top_k is {shown(top_k)}; it must be a whole number from 1 on, or None")
    names, found = model.shape.labels, list[Any]()
    for tokens in texts:
        place = 0 if model.shape.pooler else last_seen(tokens, pad)
        (logits,) = model.scores(tokens, [place])
        shares = logits.to(promoted(logits.dtype)).softmax(-1).cpu()
        best = shares.topk(min(top_k, len(names)) if isinstance(top_k, int) else len(names))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows = [{"label": names[at], "score": score} for at, score in pairs]
        found.append(rows[0] if top_k == "" else rows)
    return found
