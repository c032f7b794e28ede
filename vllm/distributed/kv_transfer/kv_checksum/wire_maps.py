# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Maps in messages: a key that stands twice is refused, not settled by the last."""

from typing import Any, TypeVar

import msgspec

_Map = TypeVar("_Map", bound=dict[Any, Any])


def decode_map(
    decoder: "msgspec.msgpack.Decoder[_Map]", data: bytes | memoryview
) -> _Map:
    """Decode one msgpack map.

    Raises:
        ValueError: malformed, or it holds a key more than once, be it in different
            encodings of one number.

    """
    try:
        found: _Map = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if len(found) != _entries(data):
        raise ValueError("a map holds a key twice")
    return found


def _entries(data: bytes | memoryview) -> int:
    """How many entries the map that `data` begins with claims to have."""
    first = data[0]
    if first < 0x90:
        return first & 0x0F
    return int.from_bytes(data[1 : 3 if first == 0xDE else 5], "big")
