"""Figures of benchmarks in prose are those of the committed results.

    1.02 to 1.92<!-- bench/forms/results.json: least to most of cases/case=*/goals/beside=*/got -->

A comment behind a figure names the file, what is taken of the values (each, least, most, mean, sum,
count, or two of these joined by "to"), and where they are: keys joined by slashes, `key=pattern`
for those rows of lists, a pattern such as `*` for those keys of a dictionary. `sizes of` before the
path leaves their signs out. A page rounds as it likes, and `%` behind a figure stands for
hundredths. The older sections of docs/log.md are history: of each file, the newest section that
quotes it counts, and no newer passage that names the file has figures without a comment.
"""

import json
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
LOG = ROOT / "docs" / "log.md"
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/README.md")])
TAKE = {"least": min, "most": max, "mean": mean, "sum": sum, "count": len}
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
FIGURE = rf"(?P<figure>{NUMBER}(?:(?: to | and |, ){NUMBER})*)(?P<percent> ?%)?"
WORDS = (
    r"(?P<take>each|(?:least|most|mean|sum|count)(?: to (?:least|most))?) of (?P<sizes>sizes of )?"
)
MARK = re.compile(r"<!-- (?P<file>bench/[\w/]+\.json): (?P<words>.*?) -->")
QUOTED = re.compile(rf"(?:{FIGURE})?{MARK.pattern}")
RESULTS = re.compile(r"bench/\w+/(?:results|overhead)\.(?:md|json)")
MEASURED = re.compile(r"\d(?:\.\d| ?%| times)")


@cache
def results(name):
    return json.loads((ROOT / name).read_text("utf-8"))


def values(tree, path):
    """The numbers at a path.

    >>> values({"rows": [{"a": "x", "n": 1}, {"a": "y", "n": 2}]}, "rows/a=*/n")
    [1, 2]
    >>> values({"rows": [{"a": "x", "b": 3, "n": 1}]}, "rows/a=x/b=3/n")
    [1]
    """
    nodes = [tree]
    for step in path.split("/"):
        key, is_filter, pattern = step.partition("=")
        if is_filter:
            rows = [row for node in nodes for row in (node if isinstance(node, list) else [node])]
            nodes = [row for row in rows if fnmatchcase(str(row.get(key)), pattern)]
        elif "*" in step:
            each = [item for node in nodes for item in node.items()]
            nodes = [value for name, value in each if fnmatchcase(name, step)]
        else:
            nodes = [node[step] for node in nodes if step in node]
    return nodes


def wanted(tree, words):
    """The numbers that a comment's words ask for. Raises ValueError for words that ask for none."""
    asked = re.match(WORDS, words)
    found = values(tree, words[asked.end() :]) if asked else []
    if not found or not all(isinstance(value, int | float) for value in found):
        raise ValueError(f"{words!r} leads to {found!r}, and not to numbers")
    found = [abs(value) for value in found] if asked["sizes"] else found
    takes = asked["take"].split(" to ")
    return found if takes == ["each"] else [TAKE[take](found) for take in takes]


def shown(value, like):
    """A value with the digits of a figure."""
    decimals = len(like.partition(".")[2])
    return f"{value:{'+' if like[0] == '+' else ''},.{decimals}f}"


def disagreements(text, of=results, *, chosen=lambda mark: True):
    """A sentence for each figure of a page that its results do not have."""
    for quoted in filter(chosen, QUOTED.finditer(text)):
        numbers = re.findall(NUMBER, quoted["figure"] or "")
        scale = 100 if quoted["percent"] else 1
        right = [scale * value for value in wanted(of(quoted["file"]), quoted["words"])]
        if len(right) > len(numbers):
            yield f"no {len(right)} numbers stand before <!-- {quoted['words']} -->"
            continue
        mine = numbers[-len(right) :]
        theirs = [shown(value, like) for value, like in zip(right, mine, strict=True)]
        if mine != theirs:
            yield f"{', '.join(mine)} should be {', '.join(theirs)}: {quoted['words']}"


def newest(text):
    """Which marks of the log count: for each file, those of the first section that has some."""
    at = {}
    ends = [found.start() for found in re.finditer(r"^## ", text, re.M)] + [len(text)]

    def chosen(mark):
        section = next(number for number, end in enumerate(ends) if mark.start() < end)
        return at.setdefault(mark["file"], section) == section

    return chosen


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_quoted_figures_are_those_of_the_results(path):
    text = path.read_text("utf-8")
    chosen = newest(text) if path == LOG else lambda mark: True
    assert list(disagreements(text, chosen=chosen)) == []


def test_every_comment_of_a_figure_is_read():
    for path in PAGES:
        text = path.read_text("utf-8")
        assert text.count("<!-- bench/") == len(MARK.findall(text)), path


def unquoted(text):
    """Lines that send to results and have figures of which no comment says where they stand."""
    for line in text.splitlines():
        if RESULTS.search(line) and MEASURED.search(line) and not MARK.search(line):
            yield line


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path != LOG and "bench" not in path.relative_to(ROOT).parts],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_figures_beside_a_link_to_results_say_where_they_stand(path):
    assert list(unquoted(path.read_text("utf-8"))) == []


def unquoted_in_log(text):
    """Passages of the log that name results and have figures, all without a comment, where no newer
    section or the same passage has one of these results.
    """
    quoted = set()
    for section in re.split(r"^## ", text, flags=re.M):
        passages = re.split(r"\n(?=- |\n|### )", section)
        quoted |= {mark["file"] for mark in MARK.finditer(section)}
        for passage in passages:
            names = {f"{name}.json" for name in re.findall(r"bench/\w+/results", passage)}
            if names - quoted and MEASURED.search(passage):
                yield passage


def test_figures_of_the_log_say_where_they_stand():
    assert list(unquoted_in_log(LOG.read_text("utf-8"))) == []


def test_a_passage_of_the_log_without_a_comment_is_found():
    link, mark = "`bench/a/results.md`", "<!-- bench/a/results.json: count of rows/who=*/got -->"
    assert list(unquoted_in_log(f"## New\n\n- One 1.9, {link}\n- Two 3 %\n")) == [
        f"- One 1.9, {link}"
    ]
    assert not [*unquoted_in_log(f"## New\n\n- 3{mark}\n\n## Old\n\n- One 1.9 ({link})\n")]
    assert [*unquoted_in_log(f"## New\n\n- One 1.9 ({link})\n\n## Old\n\n- 3{mark}\n")]


TREE = {
    "rows": [
        {"who": "a b", "got": 1.046, "by": {"x": {"n": -0.25}, "y": {"n": 0.125}}},
        {"who": "a c", "got": 1.9, "by": {"x": {"n": 0.5}}},
        {"who": "z", "got": 3000},
    ]
}


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        ("1.05 to 1.90", "least to most of rows/who=a*/got"),
        ("1.05, 1.9 and 3,000", "each of rows/who=*/got"),
        ("3,000", "each of rows/who=z/got"),
        ("in 17 rows 2", "count of rows/who=a*/got"),
        ("-25 to 50 %", "least to most of rows/who=*/by/*/n"),
        ("12.5 to 50.0%", "least to most of sizes of rows/who=*/by/*/n"),
        ("1.5", "mean of rows/who=a*/got"),
        ("+12.5 %", "each of rows/who=*/by/y/n"),
    ],
)
def test_a_figure_is_compared_with_its_digits(figure, words):
    def told(text):
        page = f"It is {text}<!-- bench/a/results.json: {words} --> times as fast."
        return list(disagreements(page, lambda name: TREE))

    assert told(figure) == []
    last = figure.rstrip(" %")[-1]
    at = figure.rindex(last)
    other = figure[:at] + ("1" if last != "1" else "2") + figure[at + 1 :]
    assert len(told(other)) == 1, other
    assert len(told("many")) == 1


@pytest.mark.parametrize("words", ["least of rows/who=q/got", "got", "each of rows/who=z/who"])
def test_a_comment_that_leads_to_no_number_is_an_error(words):
    with pytest.raises(ValueError, match="not to numbers"):
        list(disagreements(f"1<!-- bench/a.json: {words} -->", lambda name: TREE))


def test_of_the_log_the_newest_section_counts():
    mark = "<!-- bench/a/results.json: count of rows/who=*/got -->"
    text = f"# Log\n\n## New\n\n3{mark} and 3{mark}\n\n## Old\n\n9{mark}\n"
    assert list(disagreements(text, lambda name: TREE, chosen=newest(text))) == []
    assert len(list(disagreements(text, lambda name: TREE))) == 1


def test_a_figure_that_says_not_where_it_stands_is_found():
    link = "[results](../bench/forms/results.md)"
    assert list(unquoted(f"It is 1.92 times as fast ({link}).\n{link}\nIt is 1.92.\n")) != []
    assert list(unquoted(f"See {link} for two of 20 layouts.\n")) == []
