"""What the documentation says is what happens.

    ```console    `$ howdah ...` lines run, one page after the other in one folder, and each line
                  shown must be printed, in this order, letter for letter. `...` stands for
                  anything, and other lines may be printed in between.
    <!-- measured: WORD, WORD --> before such a block: a line that begins with one of these words
                  has numbers that no second run gives again, and is compared as below
    <!-- measured --> all lines of the block have
    <!-- slow --> before such a block: its commands are read and resolved, but not run
    <!-- file: NAME --> before a block: it is written to the folder
    ```python     blocks with >>> run, and must print what they show
    $ python examples/...   runs in this process, on the session's workers (run_examples.py)
    links         lead to files and headings that exist

A clock, a load and a rounding decide the sign of a number, its digits, and how wide its column is.
So in a line with measured numbers these are any numbers:

    -0.25  3.1e-12  7%      what has a fraction, an exponent or a percent sign
    1,827 tokens/s          a rate: a unit per second behind it, or `tps: ` in front

Space is any space there. All else must be as it is shown: words, units, and whole numbers, which
count something (steps, ranks, bytes). A measured whole number is shown as `...`.

The folder has `text/` in it, and what the tour leaves behind: the other pages go on from there.
Tables that repeat what the code says are held to it in test_docs_tables.py.
"""

import doctest
import re
import shlex
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from shutil import copytree

import pytest
import typer.main
from run_examples import run_example
from typer.exceptions import TyperException

from howdah.base.errors import UserError
from howdah.cli import main as cli
from howdah.cli.commands import app
from howdah.config.recipe import Machine, load_run, resolve_run

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour.md"
LONG = {f"docs/{name}.md" for name in ("collectives", "library", "planning", "verify")}  # to play
FOLDERS = ("docs", "bench", "recipes")
PAGES = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))])


def page_name(path):
    return path.relative_to(ROOT).as_posix()


# -- reading pages -------------------------------------------------------------

MARK = r"(?:<!-- (?P<mark>[^>]*) -->\n)?"
BLOCK = re.compile(MARK + r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: the language after its fence, and the mark before it."""

    language: str
    mark: str
    body: str


def blocks(text, *, language=None):
    found = [Block(m["language"], m["mark"] or "", m["body"]) for m in BLOCK.finditer(text)]
    return [block for block in found if language in (None, block.language)]


def console(path, *, slow):
    """(command, lines shown as patterns) of a page's console blocks, in order."""
    for block in blocks(path.read_text("utf-8"), language="console"):
        if (block.mark == "slow") is not slow:
            continue
        pattern = reader_of(block)
        for line, shown in commands(block.body):
            yield line, [(text, pattern(text)) for text in shown]


def reader_of(block):
    """A function from a shown line to the pattern that the printed one must match."""
    kind, _, words = block.mark.partition(": ")
    assert kind in ("", "slow", "measured"), f"a console block has no mark {block.mark!r}"
    measured = set(words.split(", ")) - {""}
    begins = {text.split()[0] for text in block.body.splitlines() if text.strip()}
    assert measured <= begins, f"no line begins with {measured - begins}"

    def pattern(text):
        named = not measured or measured.issuperset(text.split()[:1])
        return shape(text) if kind == "measured" and named else letters(text)

    return pattern


def commands(body):
    """A command's line begins with `$ `; what follows is shown.

    >>> list(commands("$ a b\\nx\\ny\\n$ c\\n"))
    [('a b', ['x', 'y']), ('c', [])]
    """
    first, *rest = re.split(r"^\$ ", body, flags=re.M)
    assert first == "", f"a console block begins with a command, not {first!r}"
    for command in rest:
        line, *shown = command.splitlines()
        yield line, shown


ANY_NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
LOOSE = re.compile(
    r"""(?P<anything>\.\.\.)
    | (?P<space>\s+)
    | (?P<number> [+-]?\d[\d,]*\.\d+ (?:e[+-]?\d+)?  # a fraction
                | [+-]?\d[\d,]*e[+-]?\d+             # an exponent
                | [+-]?\d[\d,]*(?=%)
                | \d[\d,]*(?=[ ]\w+/s\b) | (?<=tps:[ ])\d[\d,]* )  # a rate""",
    re.VERBOSE,
)


def shape(line):
    """A shown line as a pattern in which measured numbers are numbers, and spaces are spaces."""
    kinds = {"anything": ".*", "space": r"\s+", "number": ANY_NUMBER}
    pattern, end, line = "", 0, line.strip()
    for found in LOOSE.finditer(line):
        pattern += re.escape(line[end : found.start()]) + kinds[found.lastgroup]
        end = found.end()
    return re.compile(r"\s*" + pattern + re.escape(line[end:]) + r"\s*$")


def letters(line):
    """A shown line as a pattern that only `...` leaves open."""
    return re.compile(".*".join(map(re.escape, line.rstrip().split("..."))) + r"\s*$")


def missing(shown, printed):
    """The first shown line, of pairs with its pattern, that is not printed, in order; or None."""
    lines = iter(printed)
    for line, pattern in shown:
        if not any(pattern.match(other) for other in lines):
            return line
    return None


# -- quick commands --------------------------------------------------------------


def howdah(words, *, refused):
    """Runs a command; its exit code and what it printed.

    Training takes a process of its own: the ranks that it starts print past any redirection.
    """
    if words[0] == "train" and not refused:
        command = [sys.executable, "-m", "howdah", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr
    said = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        patch.setattr(sys, "argv", ["howdah", *words])
        code = cli.run()
    return code, said.getvalue()


def example(words, workers):
    """Runs a script of examples/; its exit code and what it printed."""
    said = StringIO()
    with redirect_stdout(said):
        run_example(*words, workers=workers)
    return 0, said.getvalue()


def play(path, folder, workers):
    """Runs the quick commands of a page."""
    for block in blocks(path.read_text("utf-8")):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.body, "utf-8")
    for line, shown in console(path, slow=False):
        program, *words = shlex.split(line)
        is_ours = program == "howdah"
        runs = is_ours or words[0].startswith("examples/")
        assert runs, f"{line}: only howdah and examples run here; mark the block as slow"
        refused = any(text.startswith("howdah: ") for text, _ in shown)
        with chdir(folder):
            code, printed = howdah(words, refused=refused) if is_ours else example(words, workers)
        assert code == (2 if refused else 0), f"{line} ended with {code}:\n{printed}"
        lost = missing(shown, printed.splitlines())
        assert lost is None, f"{line}: this is shown but not printed: {lost}\n{printed}"


@pytest.fixture(scope="module")
def toured(tmp_path_factory, text, workers):
    """The folder in which the tour was taken; its commands are tested on the way."""
    folder = tmp_path_factory.mktemp("docs")
    copytree(text, folder / "text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOWDAH_CACHE", str(folder / "cache"))
        for launched in ("RANK", "WORLD_SIZE", "FORCE_COLOR"):
            patch.delenv(launched, raising=False)
        play(TOUR, folder, workers)
        yield folder


def test_the_tour_can_be_taken(toured):
    assert (toured / "tiny-hf" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (page_name(path) in LONG), id=page_name(path))
        for path in PAGES
        if path != TOUR and list(console(path, slow=False))
    ],
)
def test_quick_commands_print_what_is_shown(path, toured, workers):
    play(path, toured, workers)


# -- slow commands ---------------------------------------------------------------


def check_command(line):
    """Raises UserError or a usage error where `line` would be refused."""
    words = shlex.split(line)
    scripts = [word for word in words if word.startswith("examples/")]
    world = None
    if words[0] == "torchrun":
        sizes = {word: int(n) for word, n in pairwise(words) if n.isdigit()}
        world = sizes.get("--nnodes", 1) * sizes["--nproc-per-node"]
        if not scripts:
            words = words[words.index("howdah") :]
    if scripts:
        assert (ROOT / scripts[0]).is_file(), scripts[0]
        return
    command = typer.main.get_command(app).commands[words[1]]
    given = command.make_context(words[1], words[2:]).params
    if "recipe" in given:
        recipe = Path(given["recipe"])
        if recipe.parts[0] == "runs":  # the folder of a recipe's run, or of the laptop recipe's
            recipe = Path("recipes", f"{recipe.name}.toml")
            recipe = recipe if (ROOT / recipe).is_file() else Path("recipes", "laptop.toml")
        machine = Machine(world=world, local_world=world, cores=2, cuda=0, cache=Path())
        with chdir(ROOT):
            resolve_run(load_run(recipe, given["overrides"] or []), machine)


SLOW = [(page_name(p), line) for p in PAGES for line, *_ in console(p, slow=True)]


@pytest.mark.parametrize(("page", "line"), SLOW, ids=[f"{page}: {line}" for page, line in SLOW])
def test_slow_commands_would_be_accepted(page, line):
    check_command(line)


def test_no_page_starts_torchrun_by_a_rendezvous_that_unpickles():
    """Without a master's address and port torchrun takes c10d (docs/security.md)."""
    lines = [line for page in PAGES for line in page.read_text("utf-8").splitlines()]
    shown = [line for line in lines if line.lstrip("$ ").startswith("torchrun")]
    assert shown
    assert [
        line for line in shown if "--master-addr" not in line or "--node-rank" not in line
    ] == []


@pytest.mark.parametrize(
    "line",
    [
        "howdah train recipes/none.toml",
        "howdah train recipes/laptop.toml sead=1",
        "howdah verify recipes/laptop.toml layout=dp2 --step 3",
        "howdah frobnicate",
        "torchrun --nnodes 2 --nproc-per-node 3 -m howdah train recipes/laptop.toml",
    ],
)
def test_a_wrong_command_would_be_found(line):
    with pytest.raises((UserError, KeyError, TyperException)):
        check_command(line)


# -- python ------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_python_prints_what_is_shown(path):
    for block in blocks(path.read_text("utf-8"), language="python"):
        if ">>>" in block.body:
            example = doctest.DocTestParser().get_doctest(block.body, {}, str(path), None, 0)
            said = StringIO()
            assert doctest.DocTestRunner().run(example, out=said.write).failed == 0, said.getvalue()


# -- links -------------------------------------------------------------------------

LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def headings(text):
    """The anchors of a page: headings in lower case, spaces as dashes, punctuation dropped."""
    prose = BLOCK.sub("", text)
    titles = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(path):
    for target, anchor in LINK.findall(BLOCK.sub("", path.read_text("utf-8"))):
        there = path.parent / target if target else path
        if not there.exists():
            yield target
        elif anchor and anchor not in headings(there.read_text("utf-8")):
            yield f"{target}#{anchor}"


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_lead_somewhere(path):
    assert list(broken_links(path)) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A title\n[x](#a-title) [y](b.md) [z](a.md#other) [w](https://example.org)\n")
    assert list(broken_links(page)) == ["b.md", "a.md#other"]


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text())}
    pages = {p for p in PAGES if p.is_relative_to(ROOT / "docs") and p != index}
    assert {page_name(p) for p in pages - listed} == set()


FILE_NAME = re.compile(r"`((?:\w+/)+\w+\.\w+)`")


@pytest.mark.parametrize("path", [p for p in PAGES if "docs" in p.parts], ids=page_name)
def test_files_that_are_named_exist(path):
    """`plan/layout.py` is howdah's, `tests/...` the repository's."""
    for name in FILE_NAME.findall(path.read_text("utf-8")):
        if name.endswith(".py"):
            assert (ROOT / name).is_file() or (ROOT / "howdah" / name).is_file(), name
