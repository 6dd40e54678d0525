"""How a sound input is made wrong: values, keys, types and tables changed at random places.

A mutation of a sound input reaches further than noise: all but one to three of its parts are still
right, so it is not refused at the first of them.
"""

from collections.abc import Iterator
from datetime import date
from random import Random
from typing import Any

INTEGERS = (
    *(0, 1, 2, 3, 4, 7, 8, 12, 64, 255, 256, 1000, 1001, 4096, 16384, 65536),
    *(-1, -2, -1000, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64),
    *(-(2**63), -(2**63) - 1, 10**12, 10**30, 10**400, -(10**400)),
)
FLOATS = (
    *(0.0, -0.0, 0.5, -0.5, 1.0, 1.5, 2.0, 1e-300, 5e-324, 1e-8, 1e9, 1e12, 1e15, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *("", " ", "a", "A", "0", "1", "-1", "true", "null", "None", "nan", "1e999", "dp2", "single"),
    *("dp2 x4", "pp2 1f1b x4", "/", ".", "..", "../..", "/dev/zero", "/proc/self/mem", "stdlib"),
    *(
        "hf_",
        "é",
        "日本",
        "\u2028",
        "a\nb",
        "a\0b",
        "\ud800",
        "\x1b[31m",
        "80 GB",
        "0 GB",
        "1e99 GB",
    ),
    *("80 G", "5 us", "float32", "I64", "F32", "x" * 300, "x" * 5000, "a/b", "a" * 256 + "/b"),
    *("9" * 30, "9" * 5000, "rank-00000.safetensors", "weight", "norm.weight", "llama", "adamw"),
)


def weird(random: Random, deep: int = 3) -> Any:
    """A value of any type and size."""
    kind = random.choices(("int", "float", "text", "word", "list", "table"), (4, 2, 3, 1, 1, 1))[0]
    many = random.choice([0, 1, 2, 3, 3, 40]) if deep else 0
    if kind == "list":
        return [weird(random, deep - 1) for _ in range(many)]
    if kind == "table":
        return {random.choice(TEXTS): weird(random, deep - 1) for _ in range(many)}
    words = (True, False, None, date(2024, 1, 1))
    return random.choice({"int": INTEGERS, "float": FLOATS, "text": TEXTS, "word": words}[kind])


def nested(random: Random, depth: int) -> Any:
    """Lists in lists, or tables in tables."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) of a tree."""
    stack = [tree]
    while stack:
        owner = stack.pop()
        keys = owner if isinstance(owner, dict) else range(len(owner))
        for key in keys:
            yield owner, key
            if isinstance(owner[key], dict | list):
                stack.append(owner[key])


def mutate(random: Random, tree: Any) -> None:
    """One to three changes of a tree of tables and lists, in place."""
    for _ in range(random.choice([1, 1, 1, 2, 2, 3])):
        found = list(places(tree))
        if not found:
            return
        owner, key = random.choice(found)
        change = random.randrange(10)
        if change < 3:
            owner[key] = weird(random)
        elif change < 6:
            owner[key] = near(random, owner[key])
        elif change == 6:
            del owner[key]
        elif change == 7 and isinstance(owner, dict):
            owner[random.choice(TEXTS)] = owner.pop(key)
        elif change == 8:
            other, place = random.choice(found)
            if place in other if isinstance(other, dict) else place < len(other):
                owner[key] = other[place]
                if _has(owner[key], owner):
                    owner[key] = 1  # no tree, but a ring
        else:
            owner[key] = nested(random, random.choice([1, 5, 50, 200]))


def near(random: Random, value: Any) -> Any:
    """A value of the same type, somewhat off."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + random.choice([-1, 1]) * random.choice([1, 2, 1000, value or 1])
    if isinstance(value, float):
        return value * random.choice([-1, 0, 2, 1e6, 1e300])
    if isinstance(value, str) and value:
        at = random.randrange(len(value))
        return value[:at] + random.choice(["", "x", "0", " ", "-", "\0"]) + value[at + 1 :]
    if isinstance(value, list):
        return value * random.choice([0, 2, 3]) if len(value) < 100 else value[:1]
    return value


def _has(tree: Any, owner: Any) -> bool:
    """Whether a container stands somewhere in a tree."""
    if tree is owner:
        return True
    if not isinstance(tree, dict | list):
        return False
    return any(inner[key] is owner for inner, key in places(tree))


def mutate_text(random: Random, text: bytes) -> bytes:
    """One to three changes of bytes: flips, cuts, repeats, and what parsers stumble over."""
    odd = (
        *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 2000, b"{" * 2000, b'"', b"'''", b"\n", b"#"),
        *(b"9" * 5000, b"1e999", b"NaN", b"a." * 1500 + b"a = 1\n", b"\\ud800", b"-", b" " * 5000),
    )
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(text) + 1)
        change = random.randrange(5)
        if change == 0 and at < len(text):
            text = text[:at] + bytes([random.randrange(256)]) + text[at + 1 :]
        elif change == 1:
            text = text[:at]
        elif change == 2:
            text = text[:at] + random.choice(odd) + text[at:]
        elif change == 3:
            text = text[:at] + text[at : at + random.randint(1, 200)] * 2 + text[at:]
        else:
            lines = text.splitlines(keepends=True) or [b""]
            del lines[random.randrange(len(lines))]
            text = b"".join(lines)
    return text
