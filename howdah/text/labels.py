"""The labels of a run's rows: which there are, and rows whose label the model does not have."""

from collections.abc import Iterable, Iterator

from howdah.base.errors import UserError, shown
from howdah.shapes.shape import ModelShape
from howdah.text.labelled import Places
from howdah.text.records import PAIR
from howdah.text.sources import RECORDS, STDLIB, Data, Text, documents, nothing_in, texts
from howdah.text.synthetic import is_synthetic
from howdah.text.tokenised import ENDING

MOST = 1000  # labels of a model, as many as a list of a recipe has items
LONG = 1000  # digits of a label that is no number: int() reads some 4,000


def label_problems(data: Data, shape: ModelShape | None = None) -> Iterator[str]:
    """Yields what is wrong with the fields of labels, for a model. The disk is not read."""
    if not data.labelled and not any(one.label for one in data.validation):
        if shape is not None and shape.labels:
            yield (
                "model.labels tells texts apart, and data.sources name no label; give the field "
                "that holds it, as data.sources.label=FIELD"
            )
        return
    for key, one in texts(data):
        if not one.label:
            yield f"{key} has no label, and others have one; train on labelled texts or on none"
        elif one.target:
            yield f"{key} has a target and a label; a text has one of them"
        elif one.path == STDLIB or is_synthetic(one.path) or one.path.endswith(ENDING):
            yield (
                f"{key}.label is a field, and {key}.path is {shown(one.path)}, which has none; "
                f"name files of {', '.join(end for end in RECORDS if end != ENDING)}"
            )
        elif one.label == one.field:
            yield f"{key}.label and {key}.field are both {shown(one.label)}; name two fields"
    if data.chat != "none":
        yield "data.chat makes texts of conversations, and a text with a label is one; leave it out"
    if data.rows != "packed":
        yield "data.rows is of texts, and one with a label has a row of its own; leave it out"
    if data.mask_token is not None:
        yield (
            "data.mask_token hides tokens that an encoder is to find, and here it is to find "
            "labels; leave it out"
        )


def label_names(data: Data) -> tuple[str, ...]:
    """The names of the labels of data.sources: sorted, and as numbers where all are.

    Raises UserError for a row without a text or a label, by its file and line, and where there are
    fewer labels than two, or more than a model can have.
    """
    rows, found = 0, set[str]()
    for label, _ in _labels(data, data.sources):
        rows += 1
        found.add(label)
    if len(found) == 1:
        raise UserError(
            f"data.sources: of {rows} rows all have the label {shown(*found)}; two labels at least "
            "can be told apart"
        )
    if len(found) > MOST:
        raise UserError(
            f"data.sources: {rows} rows have {len(found):,} labels, such as {shown(min(found))}, "
            f"and at most {MOST:,} are told apart; is data.sources.label the field of the labels?"
        )
    ordered = sorted(found)  # first: 7 and 007 are two labels and one number
    digits = all(label.removeprefix("-").isdecimal() and len(label) < LONG for label in found)
    return tuple(sorted(ordered, key=int) if digits else ordered)


def check_labels(data: Data, names: Iterable[str]) -> None:
    """Raises UserError, with file and line, for a row whose label is none of `names`."""
    known = [*names]
    for key, some in (("validation", data.validation), ("sources", data.sources)):
        for label, where in _labels(data, some):
            if label not in known:
                of = "no row of data.sources" if key == "validation" else "not among model.labels"
                has = "has" if key == "validation" else "is"
                raise UserError(f"{where}: the label {shown(label)} {has} {of}") from None


def held_out_alone(data: Data, label: str) -> UserError:
    """The error of a label that rows have which are held out, and no row that is trained on."""
    where = next((at for one, at in _labels(data, data.sources) if one == label), "data.sources")
    return UserError(
        f"{where}: the label {shown(label)} is of held-out rows alone, and none is trained on; "
        "give more rows of it, or name the held-out rows in data.validation"
    )


def _labels(data: Data, some: Iterable[Text]) -> Iterator[tuple[str, str]]:
    """Yields the label and the place of each row."""
    for one in some:
        take, skipped = Places(one.field, one.label), list[str]()
        empty = True
        for row in documents(one, data.undecodable, skipped=skipped.append, take=take):
            label, _, where = str(row).partition(PAIR)
            yield label, where
            empty = False
        if empty:
            raise nothing_in(one, skipped)
