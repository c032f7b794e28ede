# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keep the keys of stored blocks that must not be loaded again: a bounded list.

A connector that cannot drop a single block would offer a bad one to every request of
its prefix, and each would fail.
"""

from __future__ import annotations

import numpy as np

MAX_DENIED = 2**16
"""Keys that are kept; the oldest go first."""


class DeniedBlocks:
    """Keys of blocks (uint64), each with a number in the order of sums asked for."""

    def __init__(self) -> None:
        self._bad: dict[int, int] = {}
        self._unknown: dict[int, int] = {}
        self._sorted: np.ndarray = np.zeros(0, np.uint64)

    def __bool__(self) -> bool:
        return bool(self._bad or self._unknown)

    def __len__(self) -> int:
        return len(self._bad) + len(self._unknown)

    def deny_bad(self, keys: np.ndarray, seq: int) -> None:
        """Deny blocks that differ, until they are stored anew.

        Sums that were asked for before `seq` are not to be entered: they may rest on
        the bad KV.
        """
        self._add(self._bad, keys, seq)

    def deny_unknown(self, keys: np.ndarray, seq: int) -> None:
        """Deny blocks whose sum is not known, until it is, or they are stored anew."""
        self._add(self._unknown, keys, seq)

    def _add(self, table: dict[int, int], keys: np.ndarray, seq: int) -> None:
        if not len(keys):
            return
        for key in keys.tolist():
            table.pop(key, None)
            table[key] = seq
        while len(table) > MAX_DENIED:
            del table[next(iter(table))]
        self._sort()

    def _sort(self) -> None:
        both = np.fromiter({**self._bad, **self._unknown}, np.uint64)
        self._sorted = np.sort(both)

    def allow_stored(self, keys: np.ndarray) -> None:
        """Allow blocks that their connector stores anew."""
        self._remove(keys, self._bad, self._unknown)

    def allow_known(self, keys: np.ndarray) -> None:
        """Allow blocks whose sum is known now."""
        if self._unknown:
            self._remove(keys, self._unknown)

    def _remove(self, keys: np.ndarray, *tables: dict[int, int]) -> None:
        found = keys[self.contain(keys)].tolist()
        for key in found:
            for table in tables:
                table.pop(key, None)
        if found:
            self._sort()

    def contain(self, keys: np.ndarray) -> np.ndarray:
        """Tell which keys are denied: bool, of the shape of `keys`."""
        if not len(self._sorted):
            return np.zeros(len(keys), bool)
        at = np.searchsorted(self._sorted, keys)
        return self._sorted[np.minimum(at, len(self._sorted) - 1)] == keys

    def rest_on_bad(self, keys: np.ndarray, seq: int) -> np.ndarray:
        """Tell which sums may rest on bad KV: bool, of the shape of `keys`.

        Args:
            keys: the keys of the sums.
            seq: the number under which the sums were asked for.

        """
        denied = self.contain(keys)
        for at in np.flatnonzero(denied):
            denied[at] = self._bad.get(int(keys[at]), -1) > seq
        return denied

    def clear(self) -> None:
        """Allow all blocks."""
        self._bad.clear()
        self._unknown.clear()
        self._sort()
