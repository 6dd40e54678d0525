"""Chat templates: conversations as tokens, and which of these tokens are trained on.

A template is a Jinja text that comes with a tokenizer (chat_template.jinja, or a key of
tokenizer_config.json) and writes messages as one text. What the assistant writes stands between
{% generation %} and {% endgeneration %} (transformers, apply_chat_template):

    template   <|im_start|>assistant\\n{% generation %}{{ content }}<|im_end|>{% endgeneration %}\\n
    text       <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    trained                                                              ^^^^^^^^^^^^^^^

A template is the text of strangers: it runs in Jinja's sandbox, sees the row alone, and cannot
change it. `strftime_now`, the date of today, is not given: tokens would differ from day to day, and
templates that ask for it have a date of their own.

A special token that a message holds is cut in two, and so is encoded as the text that it is; what
the template writes, and texts that go through no template, keep theirs.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from howdah.base.errors import UserError, brief, named
from howdah.base.files import kind_of, parse_json, read_file, read_text
from howdah.text import tokenizer as tokenizers
from howdah.text.turns import CUT, FROM, TO, Conversation

CHAT = "chat.json"  # of a token cache and a run folder: what `Manner` holds
TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
LARGEST = 8 << 20  # bytes
MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
MARKS = re.compile(f"([{FROM}{TO}{CUT}])")

Trained = npt.NDArray[np.bool_]
Encoded = tuple[list[int], Trained]


@dataclass(frozen=True)
class Manner:
    """How a tokenizer writes conversations.

    template  the Jinja text; "": it has none
    special   its special tokens by name, such as eos_token
    """

    template: str = ""
    special: Mapping[str, str] = field(default_factory=dict)

    @property
    def end(self) -> str | None:
        """The token that ends a text, or a turn."""
        return self.special.get("eos_token")

    def text(self) -> str:
        """As JSON, as `read_manner` reads it."""
        return json.dumps({"template": self.template, "special": dict(self.special)}, indent=1)

    @property
    def fingerprint(self) -> str:
        return blake2b(self.text().encode(), digest_size=16).hexdigest()


def read_manner(path: Path) -> Manner:
    """What `Manner.text` wrote. Raises UserError."""
    found = _json(path)
    template, special = found.get("template"), found.get("special")
    if not isinstance(template, str) or not isinstance(special, dict):
        raise UserError(f"{named(path)} is damaged; restore it, or remove it")
    return Manner(template, special)


def manner_of(tokenizer: str) -> Manner:
    """What the folder of a tokenizer says; `tokenizer` is that folder, or its tokenizer.json.

    Raises UserError for files that cannot be read.
    """
    folder = tokenizers.find(tokenizer).parent
    if kind_of(folder / CHAT) == "file":  # of a run
        return read_manner(folder / CHAT)
    config = _json(folder / CONFIG) if kind_of(folder / CONFIG) == "file" else {}
    special = {}
    for name, token in config.items():
        word = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(word, str):
            special[name] = word
    template = config.get("chat_template") or ""
    if isinstance(template, list):  # several by name
        by_name = {one.get("name"): one for one in template if isinstance(one, dict)}
        template = by_name.get("default", {}).get("template", "")
    path = folder / TEMPLATE
    if kind_of(path) == "file":
        try:
            template = read_text(path, LARGEST)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data.tokenizer: cannot read {named(path)}: {brief(error)}") from error
    if not isinstance(template, str):
        raise UserError(f"data.tokenizer: chat_template of {named(folder / CONFIG)} is no text")
    return Manner(template, special)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_file(path, LARGEST))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {named(path)}: {brief(error)}; repair it") from error
    if not isinstance(found, dict):
        raise UserError(f"{named(path)} holds no JSON object; repair it")
    return found


# -- rendering -------------------------------------------------------------------


class Chat:
    """Makes tokens of conversations.

    manner     the template and the special tokens
    tokenizer  which encodes special tokens in a text as such
    every      whether every token is trained on, or answers alone
    name       of the tokenizer, for messages
    """

    def __init__(self, manner: Manner, tokenizer: Tokenizer, *, every: bool, name: str) -> None:
        self.manner, self.every, self.name = manner, every, name
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = False
        added = tokenizer.get_added_tokens_decoder().values()
        words = [re.escape(one.content) for one in added if one.special and len(one.content) > 1]
        self._special = re.compile(f"(?=({'|'.join(words)}))(.)" if words else "(?!)", re.S)

    @cached_property
    def _template(self) -> Any:
        """The compiled template. Raises UserError."""
        if not self.manner.template:
            raise UserError(
                f"{self.name} has no chat template, by which messages are written; add a "
                f"{TEMPLATE} beside its tokenizer.json, or give prompts and completions that are "
                "texts"
            )
        environment = import_module("howdah.text.sandbox").environment
        try:
            return environment().from_string(self.manner.template)
        except Exception as error:  # of a syntax error, or of a limit of Python's compiler
            line = getattr(error, "lineno", None)
            raise UserError(
                f"data.tokenizer: the chat template of {self.name} is not a Jinja template"
                f"{f', line {line}' if line else ''}: {brief(error)}; repair it"
            ) from error

    def write(
        self, messages: Sequence[Any], where: str, *, tools: Any = None, answer: bool = False
    ) -> str:
        """The text of messages, with marks of what the assistant writes and of cuts.

        answer  whether it ends where the assistant begins its answer

        Raises UserError, with the place, where the template refuses them.
        """
        template = self._template
        given = {**self.manner.special, "messages": self._cut(messages), "tools": self._cut(tools)}
        try:
            found = template.render(**given, documents=None, add_generation_prompt=answer)
        except Exception as error:  # whatever the template's own expressions raise
            raise UserError(
                f"{where}: the chat template of {self.name} refuses it ({brief(error)})"
            ) from error
        return str(found)

    def _cut(self, value: Any) -> Any:
        """`value` with a mark behind the first character of each special token in its texts."""
        if isinstance(value, str):
            return self._special.sub(rf"\2{CUT}", value)
        if isinstance(value, Mapping):
            return {key: self._cut(one) for key, one in value.items()}
        return [self._cut(one) for one in value] if isinstance(value, list | tuple) else value

    def prompt(self, messages: Sequence[Any], where: str) -> list[int]:
        """The tokens of messages that the assistant is to answer. Raises UserError."""
        return self._marked(self.write(messages, where, answer=True))[0]

    # -- encoding ------------------------------------------------------------------

    def __call__(self, one: Conversation) -> Encoded:
        """The tokens of a conversation and which of them are trained on: never the first, which
        nothing predicts. Raises UserError, with its place.
        """
        record, tools = one.record, one.record.get("tools")
        if "messages" in record:
            ids, trained = self._of_messages(record["messages"], one.where, tools)
        else:
            ids, first = self._of_pair(record["prompt"], record["completion"], one.where, tools)
            trained = np.arange(len(ids)) >= first
        trained |= self.every
        trained[:1] = False
        return ids, trained

    def _of_messages(self, messages: Sequence[Any], where: str, tools: Any) -> Encoded:
        if not self.every:
            self._require_answers()
        ids, trained = self._marked(self.write(messages, where, tools=tools))
        if not self.every and not trained.any():
            raise UserError(
                f"{where}: the chat template of {self.name} marks none of its tokens as the "
                "assistant's; repair the template or the row, or train on every token: "
                "data.chat=all"
            )
        return ids, trained

    def _of_pair(self, prompt: Any, answer: Any, where: str, tools: Any) -> tuple[list[int], int]:
        """(tokens, where the answer begins: where prompt and answer together differ from the prompt
        alone).
        """
        if isinstance(prompt, str):
            end = self.manner.end
            if end is None:
                raise UserError(
                    f"data.tokenizer: {self.name} does not say which token ends a completion; "
                    f"write it as eos_token into its {CONFIG}"
                )
            whole = prompt + answer + ("" if answer.endswith(end) else end)
            alone, both = (list(self._encode(text, whole=True).ids) for text in (prompt, whole))
        else:
            alone = self._marked(self.write(prompt, where, tools=tools, answer=True))[0]
            both = self._marked(self.write([*prompt, *answer], where, tools=tools))[0]
        same = (a == b for a, b in zip(alone, both, strict=False))
        return both, next((at for at, equal in enumerate(same) if not equal), len(alone))

    def _encode(self, text: str, *, whole: bool = False) -> Encoding:
        """Tokens of a text; of a whole one with those that the tokenizer puts around it."""
        return tokenizers.encode_one(self._tokenizer, text, special=whole)

    def _marked(self, text: str) -> Encoded:
        """The tokens of a text with marks; those that the assistant writes, if only in part."""
        ids, trained = list[int](), [np.zeros(0, np.bool_)]
        for piece, inside in _pieces(text):
            found = self._encode(piece)
            before = np.concatenate([[0], np.cumsum(inside)])
            first, stop = np.array(found.offsets, np.int64).reshape(-1, 2).T
            first = np.where(first == stop, np.maximum(stop - 1, 0), first)  # trimmed: all blank
            ids += found.ids
            trained.append(before[stop] > before[first])
        return ids, np.concatenate(trained)

    # -- what a template must do ---------------------------------------------------

    def _require_answers(self) -> None:
        """Raises UserError for a template that does not say what the assistant writes."""
        if self._template and self._lack is not None:
            raise UserError(self._lack)

    @cached_property
    def _lack(self) -> str | None:
        template = f"the chat template of {self.name}"
        if not MARKED.search(self.manner.template):
            return (
                f"data.chat is answers, and {template} does not mark what the assistant writes; "
                "put {% generation %} and {% endgeneration %} around it in the template, "
                "end-of-turn token included, or give rows a prompt and a completion, or train on "
                "every token: data.chat=all"
            )
        turns = (("user", "dummy"), ("assistant", "dummy"), ("user", "dummy"))
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            text = self.write(messages, "")
        except UserError:
            return None  # the template is particular about conversations
        marked = re.findall(f"{FROM}([^{FROM}{TO}]*)", text)
        if marked and marked[-1].rstrip().endswith("dummy"):
            return (
                f"{template} marks the assistant's answer without what ends its turn, so a model "
                "would not learn to stop; move {% endgeneration %} behind that token in the "
                "template, or train on every token: data.chat=all"
            )
        return None


def _pieces(text: str) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Yields a marked text in pieces between cuts: each with, by character, whether it is the
    assistant's.
    """
    piece, inside, depth = "", list[int](), 0
    for part in MARKS.split(text):
        if part == CUT:
            yield piece, np.array(inside, np.int64)
            piece, inside = "", []
        elif part in (FROM, TO):
            depth += 1 if part == FROM else -1
        else:
            piece += part
            inside += [int(depth > 0)] * len(part)
    yield piece, np.array(inside, np.int64)
