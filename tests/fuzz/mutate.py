# SPDX-License-Identifier: Apache-2.0
"""Change a message and keep its form: one node of its tree becomes another.

Bytes changed at random rarely get past a decoder; these do.
"""

from random import Random
from typing import Any

NUMBERS = (
    *(0, 1, -1, 2, 7, 8, 15, 16, 17, 24, 31, 32, 64, 99, 100, 101, 4095, 4096),
    *(2**20, 2**24, 2**30, 2**31 - 16, 2**31, 2**32, 2**40 - 1, 2**40),
    *(2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
)
OTHERS = (None, True, False, 1.5, "", "r", "HB:r", b"", b"\0" * 8, [], {}, [[]])


def mutate(tree: Any, random: Random) -> Any:
    """Return `tree` with one of its nodes changed (it may be changed in place).

    Mostly a leaf, and one that keeps its type.
    """
    children = _children(tree)
    if children and random.random() < 0.95:
        key = random.choice(children)
        tree[key] = mutate(tree[key], random)
        return tree
    if random.random() < 0.05:
        return random.choice(OTHERS)
    if isinstance(tree, bool) or tree is None:
        return random.choice(OTHERS)
    if isinstance(tree, int):
        return _number(tree, random)
    if isinstance(tree, bytes):
        return _bytes(tree, random)
    if isinstance(tree, str):
        return _text(tree, random)
    if isinstance(tree, list):
        return _list(tree, random)
    if isinstance(tree, dict):
        return _dict(tree, random)
    return random.choice(NUMBERS)


def _children(tree: Any) -> list[Any]:
    if isinstance(tree, list):
        return list(range(len(tree)))
    return list(tree) if isinstance(tree, dict) else []


def _number(value: int, random: Random) -> int:
    changed = random.choice(
        (
            random.choice(NUMBERS),
            value + random.choice((-1, 1)),
            value << random.randrange(1, 40),
            value // 2,
            value ^ 1 << random.randrange(64),
        )
    )
    return max(-(2**63), min(2**64 - 1, changed))


def _bytes(value: bytes, random: Random) -> bytes:
    how, words = (
        random.randrange(6),
        [value[i : i + 8] for i in range(0, len(value), 8)],
    )
    if how == 0 or not words:
        return value + random.randbytes(random.choice((1, 8, 16, 64)))
    if how == 1:
        return value[: random.randrange(len(value) + 1) // 8 * 8]
    if how == 2:
        return value[8 * random.randrange(len(words)) :]
    if how == 3:
        at = random.randrange(len(value))
        return (
            value[:at] + bytes([value[at] ^ 1 << random.randrange(8)]) + value[at + 1 :]
        )
    first, second = random.randrange(len(words)), random.randrange(len(words))
    if how == 4:
        words[first], words[second] = words[second], words[first]
    else:
        words[first] = words[second]
    return b"".join(words)


def _text(value: str, random: Random) -> str:
    how = random.randrange(4)
    if how == 0:
        return value[: random.randrange(len(value) + 1)]
    if how == 1:
        return value + random.choice(
            ("=", "A", ":", "\n", "\u00e4", "\U0001f600", ":1")
        )
    if how == 2:
        return value * 2
    return random.choice(("a", "r", "s", "r:1", "r-0123abcd", "unknown"))


def _list(value: list[Any], random: Random) -> list[Any]:
    how = random.randrange(4)
    if how == 0:
        return value[: random.randrange(len(value) + 1)]
    if how == 1:
        return [*value, random.choice((*NUMBERS, *OTHERS))]
    if how == 2:
        return value * 2
    return [value]


def _dict(value: dict[Any, Any], random: Random) -> dict[Any, Any]:
    keys = list(value)
    if not keys:
        return {random.choice((0, "r")): random.choice(OTHERS)}
    key, how = random.choice(keys), random.randrange(3)
    changed = dict(value)
    if how == 0:
        del changed[key]
    elif how == 1:
        other = (
            _number(key, random) if isinstance(key, int) else _text(str(key), random)
        )
        changed[other] = value[key]
    else:
        other = (
            _number(key, random) if isinstance(key, int) else _text(str(key), random)
        )
        changed[other] = changed.pop(key)
    return changed
