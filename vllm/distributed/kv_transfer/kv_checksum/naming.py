# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Name requests, blocks and clients' values in log lines: short, on one line."""

from collections.abc import Mapping

import numpy as np

MAX_GROUPS = 4
"""KV cache groups that one line names."""

_MAX_RANGES = 16
_MAX_VALUE_CHARS = 64
_MAX_ID_CHARS = 128


def request_name(req_id: str) -> str:
    """Return a request's id for the log, bounded: clients can choose any text."""
    return shortened(req_id, _MAX_ID_CHARS)


def blocks_named(positions: Mapping[int, list[int]]) -> str:
    """Format blocks of KV cache groups for the log, bounded however many there are.

    Args:
        positions: per KV cache group id, ascending positions in the request.

    """
    said = [
        f"group {i}: {positions_named(at)}"
        for i, at in list(positions.items())[:MAX_GROUPS]
    ]
    if len(positions) > MAX_GROUPS:
        said.append(f"{len(positions) - MAX_GROUPS} more groups")
    return "; ".join(said)


def positions_named(positions: list[int]) -> str:
    """Format ascending positions as ranges; the last ones may only be counted."""
    at = np.array(positions)
    breaks = np.flatnonzero(np.diff(at) != 1)
    firsts, lasts = at[[0, *(breaks + 1)]], at[[*breaks, -1]]
    said = [
        str(first) if first == last else f"{first}-{last}"
        for first, last in zip(firsts[:_MAX_RANGES], lasts[:_MAX_RANGES], strict=True)
    ]
    if len(firsts) > _MAX_RANGES:
        said.append(f"{int((at > lasts[_MAX_RANGES - 1]).sum())} more")
    return f"positions {', '.join(said)}"


def shortened(value: object, limit: int = _MAX_VALUE_CHARS) -> str:
    """Format a client's value for the log: at most `limit` characters, on one line."""
    if not isinstance(value, str | int):
        return f"<{type(value).__name__}>"
    text = str(value)[:limit]
    return "".join(c if c.isprintable() else "?" for c in text)
