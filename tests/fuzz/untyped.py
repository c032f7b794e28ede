# SPDX-License-Identifier: Apache-2.0
"""Read msgpack with nothing lost: maps as pairs, text as it lies."""

from typing import Any, NamedTuple

MAX_DEPTH = 64


class Map(NamedTuple):
    """A map's pairs, in order; a key may stand twice."""

    pairs: list[tuple[Any, Any]]


class Text(NamedTuple):
    """Text, perhaps not UTF-8."""

    data: bytes


class Other(NamedTuple):
    """A float, an extension, nil or a truth value: its type byte and its bytes."""

    kind: int
    data: bytes


class TooDeepError(ValueError):
    """Raised for what is nested deeper than `MAX_DEPTH`."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, number: int) -> bytes:
        found = self.data[self.at : self.at + number]
        if len(found) != number:
            raise ValueError("truncated")
        self.at += number
        return found

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "big", signed=signed)

    def many(self, number: int, depth: int) -> list[Any]:
        return [self.value(depth) for _ in range(number)]

    def map(self, number: int, depth: int) -> Map:
        return Map([(self.value(depth), self.value(depth)) for _ in range(number)])

    def value(self, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise TooDeepError
        kind, depth = self.number(1), depth + 1
        match kind:
            case _ if kind < 0x80:
                return kind
            case _ if kind < 0x90:
                return self.map(kind & 15, depth)
            case _ if kind < 0xA0:
                return self.many(kind & 15, depth)
            case _ if kind < 0xC0:
                return Text(self.take(kind & 31))
            case 0xC4 | 0xC5 | 0xC6:
                return self.take(self.number(1 << kind - 0xC4))
            case 0xC7 | 0xC8 | 0xC9:
                return Other(kind, self.take(1 + self.number(1 << kind - 0xC7)))
            case 0xCA | 0xCB:
                return Other(kind, self.take(4 << kind - 0xCA))
            case 0xCC | 0xCD | 0xCE | 0xCF:
                return self.number(1 << kind - 0xCC)
            case 0xD0 | 0xD1 | 0xD2 | 0xD3:
                return self.number(1 << kind - 0xD0, signed=True)
            case 0xD4 | 0xD5 | 0xD6 | 0xD7 | 0xD8:
                return Other(kind, self.take(1 + (1 << kind - 0xD4)))
            case 0xD9 | 0xDA | 0xDB:
                return Text(self.take(self.number(1 << kind - 0xD9)))
            case 0xDC | 0xDD:
                return self.many(self.number(2 << kind - 0xDC), depth)
            case 0xDE | 0xDF:
                return self.map(self.number(2 << kind - 0xDE), depth)
            case 0xC0 | 0xC2 | 0xC3:
                return Other(kind, b"")
            case _ if kind >= 0xE0:
                return kind - 256
        raise ValueError("no msgpack")


def read(data: bytes) -> Any:
    """Return the one value that `data` holds.

    Raises:
        TooDeepError: nested deeper than `MAX_DEPTH`.
        ValueError: malformed, or something follows.

    """
    reader = _Reader(data)
    found = reader.value()
    if reader.at != len(data):
        raise ValueError("something follows")
    return found
