"""A command line that cannot be read, as one sentence: what is wrong, and what to write instead.

Other trainers take their settings as options. Here they are keys of the recipe:

    howdah train laptop --steps 5        train has no option --steps; write train.steps=5
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from howdah.base.errors import named, nearest, shown
from howdah.base.their_words import otherwise, our_key
from howdah.config.drafts import is_planned
from howdah.config.keys import recipe_keys

MEANT = {  # options of other programs, with those that mean the same here
    "tokens": "--length",
    "max_tokens": "--length",
    "max_new_tokens": "--length",
}

# of typer, or of click, which older versions of typer call
UsageError: Any = typer.BadParameter.__base__


def sentence_on(error: Any, line: Sequence[str]) -> str:
    """What is wrong with the words `line` of a command line, and what to write; empty if they only
    lack a command, which typer answers by its help.
    """
    kind, called = type(error).__name__, error.ctx.command_path if error.ctx else "howdah"
    command = called.removeprefix("howdah ")
    if kind == "NoArgsIsHelpError":
        return ""
    if kind == "NoSuchOption":
        option = error.option_name
        return f"{command} has no option {named(option)}{_instead(error.ctx, option, line)}"
    told = " ".join(error.format_message().split()).rstrip(".")
    if unknown := re.match(r"No such command '(.*?)'", told):
        known = error.ctx.command.commands
        return f"{command} has no command {shown(unknown[1])}{nearest(unknown[1], known)}"
    return f"{command}: {told[:1].lower()}{told[1:]}; see {called} -h"


def _instead(context: Any, option: str, line: Sequence[str]) -> str:
    """The key that an unknown option means, with its value, or the options that are known."""
    takes = {one.name for one in context.command.params if one.param_type_name == "argument"}
    word = option.lstrip("-").replace("-", "_")
    if takes & {"overrides", "keys"} and (meant := [*_as_keys(word, _value_of(option, line))]):
        of_plan = [one for one in meant if "keys" not in takes or is_planned(one.split("=")[0])]
        if of_plan:
            return f"; write {' or '.join(of_plan)}"
        return f"; {meant[0].partition('=')[0]} is no part of a plan"
    if takes & {"overrides", "folder"} and (said := otherwise(word)):
        return f"; {said}"
    known = [name for one in context.command.params for name in one.opts if name[:1] == "-"]
    if MEANT.get(word) in known:
        return f"; write {MEANT[word]}"
    near = nearest(option, known or ["--help"])
    keys = "; `howdah keys` lists what KEY=VALUE can change"
    return near if "did you mean" in near or "overrides" not in takes else keys


def _as_keys(word: str, value: str | None) -> Iterator[str]:
    """KEY=VALUE of the keys whose last word is `word`, or of that which another trainer's means."""
    keys = list(recipe_keys())
    found = [key for key in keys if key.name.rpartition(".")[2] == word]
    for key in found:
        if key.values.startswith("true") and value not in ("true", "false"):
            value = "true"
        yield f"{key.name}={shlex.quote(value or 'VALUE')}"
    meant, _, words = ("" if found else our_key(word)).partition("=")
    if meant in {key.name for key in keys}:
        if words and value and value.isdigit() and words.count("N") == 1:
            words = words.replace("N", value)
        yield f"{meant}={shlex.quote(words or value or 'VALUE')}"


def _value_of(option: str, line: Sequence[str]) -> str | None:
    """The value that the words of a command line give to an option; None if there is none."""
    for word, after in zip(line, [*line[1:], "-"], strict=True):
        if word == option:
            return None if after.startswith("-") else after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
