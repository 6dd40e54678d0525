"""Rows of conversations: which fields of a record hold what was asked and what was answered.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      two texts, or two lists of messages
    {"prompt": "...", "response": "..."}        the same
    {"instruction": "...", "input": "...", "output": "..."}     Alpaca's: a prompt is made of them

Messages go through the tokenizer's chat template (`template.py`); texts are taken as they are, so a
prompt may have a markup of its own. A source that names `field` and `target` has its prompts and
completions in these; one that names `field` alone has its messages there.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from howdah.base.errors import UserError, nearest, shown
from howdah.text.readers import Bad
from howdah.text.records import Record

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = ("completion", "response")  # behind a prompt
NAMES = ("messages", "prompt", *ANSWERS, "instruction", "input", "output", "tools")
FROM, TO, CUT = "\ufdd0", "\ufdd1", "\ufdd2"  # no characters: `template.py` marks places by them

# The two prompts of Stanford Alpaca (tatsu-lab/stanford_alpaca, train.py).
BELOW = "Below is an instruction that describes a task"
INPUT = ", paired with an input that provides further context"
WRITE = ". Write a response that appropriately completes the request."


@dataclass(frozen=True)
class Conversation:
    """A row. It is hashed by its `encode`, like a text.

    record  messages; or prompt and completion, both texts or both messages; and tools, if any
    where   file and line, for messages to the user
    """

    record: Mapping[str, Any]
    where: str

    def encode(self) -> bytes:
        """The record as JSON."""
        return json.dumps(self.record, ensure_ascii=False, sort_keys=True).encode()

    def __len__(self) -> int:
        return len(self.encode())


@dataclass(frozen=True)
class Turns:
    """Takes the conversation of a record.

    field, target  of prompt and completion; without a target, of messages; "": the usual names
    """

    field: str = ""
    target: str = ""
    others: tuple[str, ...] = NAMES

    @classmethod
    def of(cls, field: str, target: str) -> "Turns":
        """Of the keys of a source, whose `field` is "text" where none is named."""
        return cls("" if field == "text" and not target else field, target)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.field, self.target) if name)

    @property
    def says(self) -> str:
        if self.field:
            return f"the field {shown(self.field)}"
        return "messages, or a prompt and a completion, or an instruction and an output"

    def __call__(self, record: Record, where: str, bad: Bad) -> Iterator[Conversation]:
        """Yields the conversation, unless its text cannot be encoded or a part of it is empty.
        Raises UserError, naming the place, for fields, roles and messages that are none.
        """
        found = self._found(record, where)
        if tools := _tools(record, where):
            found["tools"] = tools
        one = Conversation(found, where)
        try:
            said = one.encode().decode()
        except UnicodeEncodeError:
            bad(f"{where}: a character is not UTF-8, or half of a surrogate pair")
            return
        if marks := [mark for mark in (FROM, TO, CUT) if mark in said]:
            bad(f"{where}: it holds U+{ord(marks[0]):04X}, which is no character of a text")
        elif empty := [name for name in ("prompt", "completion") if found.get(name) == ""]:
            bad(f"{where}: its {empty[0]} is empty")
        else:
            yield one

    def _found(self, record: Record, where: str) -> dict[str, Any]:
        for name in self.columns:
            if name not in record:
                raise UserError(f"{where}: no field {shown(name)}{nearest(name, record)}")
        if self.target:
            return _pair(record, where, (self.field, self.target))
        if self.field:
            return {"messages": _messages(record[self.field], where, self.field)}
        has = {name for name in NAMES if record.get(name) is not None}
        if "messages" in has:
            return {"messages": _messages(record["messages"], where, "messages")}
        for answer in ANSWERS:
            if {"prompt", answer} <= has:
                return _pair(record, where, ("prompt", answer))
        if {"instruction", "output"} <= has:
            return _alpaca(record, where)
        known = ", ".join(map(shown, sorted(map(str, record))[:8])) or "none"
        raise UserError(
            f"{where}: no {self.says} (its fields: {known}); name its fields in data.sources.field "
            "and data.sources.target"
        )


def _pair(record: Record, where: str, names: tuple[str, str]) -> dict[str, Any]:
    asked, answered = (record[name] for name in names)
    if isinstance(asked, str) and isinstance(answered, str):
        return {"prompt": asked, "completion": answered}
    if isinstance(asked, str) or isinstance(answered, str):
        raise UserError(
            f"{where}: {names[0]} and {names[1]} must both be texts, or both lists of messages"
        )
    return {
        "prompt": _messages(asked, where, names[0], answered=False),
        "completion": _messages(answered, where, names[1]),
    }


def _alpaca(record: Record, where: str) -> dict[str, Any]:
    parts = {name: record.get(name) or "" for name in ("instruction", "input", "output")}
    for name, text in parts.items():
        if not isinstance(text, str):
            raise UserError(
                f"{where}: the field {shown(name)} is of type {type(text).__name__}; it must be a "
                "string"
            )
    given = f"\n\n### Input:\n{parts['input']}" if parts["input"] else ""
    about = f"{BELOW}{INPUT if given else ''}{WRITE}"
    prompt = f"{about}\n\n### Instruction:\n{parts['instruction']}{given}\n\n### Response:"
    return {"prompt": prompt, "completion": parts["output"]}


def _messages(value: object, where: str, name: str, *, answered: bool = True) -> list[Any]:
    """A list of messages, without the keys that are None. Raises UserError.

    answered  whether one must be the assistant's
    """
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where}: {name} must be a list of messages, such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    found = [_message(one, f"{where}: message {n} of {name}") for n, one in enumerate(value, 1)]
    if answered and not any(one["role"] == "assistant" for one in found):
        raise UserError(
            f"{where}: no message of {name} has the role assistant, so there is no answer to train "
            "on; remove the row, or rename its roles"
        )
    return found


def checked(messages: object) -> list[Any]:
    """Messages that are to be answered. Raises UserError for what is none."""
    value = list(messages) if isinstance(messages, tuple) else messages
    return _messages(value, "the conversation", "it", answered=False)


def _message(one: object, where: str) -> dict[str, Any]:
    if not isinstance(one, Mapping):
        raise UserError(f"{where} is no object with a role and a content")
    given = {key: value for key, value in one.items() if value is not None}
    role = given.get("role")
    if role not in ROLES:
        theirs = "; from and value are called role and content here" if "from" in given else ""
        what = f"has the role {shown(role)}" if "role" in given else "has no role"
        raise UserError(f"{where} {what}; known are: {', '.join(ROLES)}{theirs}")
    calls = role == "assistant" and given.get("tool_calls")
    if not isinstance(given.get("content", "" if calls else None), str):
        raise UserError(f"{where} has no content that is a string; images and parts are not read")
    return given


def _tools(record: Record, where: str) -> Any:
    """The functions that an assistant may call: a list, or a JSON text of one."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: tools is not JSON ({error}); write a list") from None
    if tools and not isinstance(tools, list):
        raise UserError(f"{where}: tools is {shown(tools)}; it must be a list of functions")
    return tools
