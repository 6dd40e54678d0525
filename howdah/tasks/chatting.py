"""Conversations in place of texts: messages are asked, and the assistant's answer comes behind
them, as transformers' pipeline of text-generation has it.
"""

from collections.abc import Mapping
from typing import Any

from howdah.base.errors import UserError, shown


def is_chat(value: object) -> bool:
    """Whether a value is a list of messages."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(one, Mapping) for one in value)
    )


def asked(task: str, inputs: object) -> tuple[list[Any], bool]:
    """(the texts or conversations that a task is asked for, whether it is one alone). Raises
    UserError for other inputs.
    """
    alone = isinstance(inputs, str) or is_chat(inputs)
    found = list(inputs) if isinstance(inputs, list | tuple) and not alone else [inputs]
    for one in found:
        if not isinstance(one, str) and not (is_chat(one) and task == "text-generation"):
            raise UserError(f"{task} takes texts, and one is {shown(one)}; give a str")
    return found, alone


def joined(before: Any, answer: str, *, whole: bool) -> Any:
    """A text and what follows it, or messages and the assistant's; if not `whole`, the latter."""
    if not whole:
        return answer
    if isinstance(before, str):
        return before + answer
    return [*before, {"role": "assistant", "content": answer}]
