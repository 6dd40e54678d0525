"""Jinja for chat templates, which come from strangers: its immutable sandbox, and few names.

The names are those that templates on the Hugging Face hub use (transformers, chat templates):
raise_exception, namespace, dict, range, the filter tojson, loop controls, and {% generation %}.
"""

import json
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from howdah.text.turns import FROM, TO


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what stands between gets a mark on both sides."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The marked block, as a call."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{FROM}{caller()}{TO}"


class PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, through which Python's own objects
    could be reached.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:  # a name may be `self`
        self, rest = args[0], args[1:]
        for name in dict(*rest, **kwargs):
            _require_plain(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: object) -> None:
        _require_plain(name)
        super().__setitem__(name, value)


def _require_plain(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where jinja's own filter escapes what HTML reserves."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> ImmutableSandboxedEnvironment:
    """The environment in which templates are compiled and run."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals = {
        "range": safe_range,
        "dict": _dict,
        "namespace": PlainNamespace,
        "raise_exception": _raise,
    }
    return made
