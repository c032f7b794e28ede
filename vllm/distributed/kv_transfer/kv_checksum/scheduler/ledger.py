# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Remember the sums of full blocks in fixed tables, the oldest out first.

An entry is one sum of one key. Entries are numbered, and lie in the rows of a ring by
their number; those of one hash bucket are chained from the newest to the oldest. An
entry that was overwritten is known by its number, so nothing is ever removed from a
chain. There is no Python object per block.

A key may have several sums, because another batch or another kernel computes the same
KV with other bits. The newest `MAX_SUMS` of a key count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.checksum import GOLDEN_FACTOR, MASK64
from vllm.distributed.kv_transfer.kv_checksum.jit import jit
from vllm.distributed.kv_transfer.kv_checksum.stored import block_checksum_tags

MAX_SUMS = 4
"""Different sums that are kept per key."""

_KEY, _SUM, _OLDER, _DIFFERENT = range(4)
"""Columns of an entry: its key, its sum, the entry before it in its bucket's chain,
and how many different sums its key had when it was entered."""


def ledger_keys(block_hashes: Sequence[bytes], group_id: int) -> np.ndarray:
    """Compute the keys of blocks: uint64, shape ``(blocks,)``.

    Args:
        block_hashes: the blocks' prefix hashes, all of one length. They cover the
            prefix and all that its KV depends on: adapter, cache salt, other inputs.
        group_id: the blocks' KV cache group.

    """
    group_factor = GOLDEN_FACTOR * (2 * group_id + 1) & MASK64
    return block_checksum_tags(block_hashes, group_factor)


class KnownSums(NamedTuple):
    """The sums that a ledger holds of some keys.

    Attributes:
        sums: uint64 ``(keys, MAX_SUMS)``, the newest first; unused places are 0.
        number: how many of them are used, int64 ``(keys,)``.
        dropped: whether the key had sums that are not kept any more, bool ``(keys,)``.

    """

    sums: np.ndarray
    number: np.ndarray
    dropped: np.ndarray

    def equal(self, sums: np.ndarray) -> np.ndarray:
        """Tell per key whether one of its sums equals that of `sums` (uint64)."""
        used = np.arange(MAX_SUMS) < self.number[:, None]
        return ((self.sums == sums[:, None]) & used).any(axis=1)


class Ledger:
    """A fixed table of sums by key: 40 to 48 bytes per entry.

    Args:
        num_entries: sums that it holds, at least 1.

    """

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries
        self._rows: np.ndarray = np.zeros((num_entries, 4), np.uint64)
        # The newest entry of each bucket, or 0; entries are numbered from 1.
        buckets = 1 << (num_entries - 1).bit_length()
        self._heads: np.ndarray = np.zeros(buckets, np.int64)
        self._next = 1
        # Compiled here, so that no step waits for it.
        nothing: np.ndarray = np.zeros(0, np.uint64)
        self.enter(nothing, nothing)
        self.mark_other_sums(nothing)

    def __len__(self) -> int:
        """Return the number of entries that are in use."""
        return min(self._next - 1, self.num_entries)

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes + self._heads.nbytes

    def clear(self) -> None:
        """Forget all sums."""
        self._heads[:] = 0
        self._next = 1

    def known(self, keys: np.ndarray) -> KnownSums:
        """Look up keys (uint64)."""
        size = len(keys)
        sums: np.ndarray = np.zeros((size, MAX_SUMS), np.uint64)
        number: np.ndarray = np.zeros(size, np.int64)
        dropped: np.ndarray = np.zeros(size, np.bool_)
        _look_up(self._rows, self._heads, self._next, keys, sums, number, dropped)
        return KnownSums(sums, number, dropped)

    def enter(self, keys: np.ndarray, sums: np.ndarray) -> None:
        """Enter sums under their keys, both uint64 of one length, in order.

        A sum that the key has already is entered again only if it is among the older
        half of the entries.
        """
        self._next, _ = _enter(self._rows, self._heads, self._next, keys, sums)

    def mark_other_sums(self, keys: np.ndarray) -> None:
        """Note that keys (uint64) have a sum that is not known; what is known stays."""
        sums = np.ascontiguousarray(self.known(keys).sums[:, 0])
        self._next = _mark(self._rows, self._heads, self._next, keys, sums)


@jit
def _append(
    rows: np.ndarray,
    heads: np.ndarray,
    upcoming: int,
    key: np.uint64,
    value: np.uint64,
    different: int,
) -> int:
    """Append an entry, and return the number of the next one."""
    bucket = np.int64(key & np.uint64(len(heads) - 1))
    row = upcoming % len(rows)
    rows[row, _KEY], rows[row, _SUM] = key, value
    rows[row, _OLDER] = np.uint64(heads[bucket])
    rows[row, _DIFFERENT] = np.uint64(different)
    heads[bucket] = upcoming
    return upcoming + 1


@jit
def _mark(
    rows: np.ndarray,
    heads: np.ndarray,
    upcoming: int,
    keys: np.ndarray,
    sums: np.ndarray,
) -> int:
    for i in range(len(keys)):
        upcoming = _append(rows, heads, upcoming, keys[i], sums[i], MAX_SUMS + 1)
    return upcoming


@jit
def _row(entry: int, upcoming: int, size: int) -> int:
    """Return the row of one of the last `size` entries; a division takes longer."""
    row = upcoming % size - (upcoming - entry)
    return row if row >= 0 else row + size


@jit
def _sums_of(
    rows: np.ndarray,
    heads: np.ndarray,
    upcoming: int,
    key: np.uint64,
    sums: np.ndarray,
    value: np.uint64,
) -> tuple[int, int, int]:
    """Walk a bucket's chain; write the sums of `key` to `sums`, the newest first.

    Returns:
        The number of sums found; how many different ones were entered; and the number
        of the entry that holds `value`, or 0.

    """
    size = len(rows)
    oldest = max(1, upcoming - size)
    entry = heads[np.int64(key & np.uint64(len(heads) - 1))]
    number = different = holder = 0
    while entry >= oldest:
        row = _row(entry, upcoming, size)
        if rows[row, _KEY] == key:
            if not number:
                different = int(rows[row, _DIFFERENT])
            fresh = True
            for i in range(number):
                fresh &= sums[i] != rows[row, _SUM]
            if fresh:
                sums[number] = rows[row, _SUM]
                holder = entry if sums[number] == value else holder
                number += 1
                if number == min(different, MAX_SUMS):
                    break
        entry = np.int64(rows[row, _OLDER])
    return number, different, holder


@jit
def _touch(
    rows: np.ndarray, heads: np.ndarray, upcoming: int, keys: np.ndarray
) -> np.uint64:
    """Read where chains begin, so that the caches hold it.

    Reads that do not wait for one another overlap, those of a walk do not.
    """
    size = len(rows)
    oldest = max(1, upcoming - size)
    entries: np.ndarray = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        entries[i] = heads[np.int64(keys[i] & np.uint64(len(heads) - 1))]
    read = np.uint64(0)
    for i in range(len(keys)):
        if entries[i] >= oldest:
            read ^= rows[_row(entries[i], upcoming, size), _OLDER]
    return read


@jit
def _look_up(
    rows: np.ndarray,
    heads: np.ndarray,
    upcoming: int,
    keys: np.ndarray,
    sums: np.ndarray,
    number: np.ndarray,
    dropped: np.ndarray,
) -> np.uint64:
    read = _touch(rows, heads, upcoming, keys)
    for i in range(len(keys)):
        number[i], different, _ = _sums_of(
            rows, heads, upcoming, keys[i], sums[i], np.uint64(0)
        )
        dropped[i] = different > number[i]
    return read


@jit
def _enter(
    rows: np.ndarray,
    heads: np.ndarray,
    upcoming: int,
    keys: np.ndarray,
    sums: np.ndarray,
) -> tuple[int, np.uint64]:
    """Enter sums; return the number of the next entry, and what was read ahead."""
    read = _touch(rows, heads, upcoming, keys)
    have: np.ndarray = np.zeros(MAX_SUMS, np.uint64)
    size = len(rows)
    for i in range(len(keys)):
        key, value = keys[i], sums[i]
        _, different, holder = _sums_of(rows, heads, upcoming, key, have, value)
        if holder and holder >= upcoming - size // 2:
            continue
        different = min(different, MAX_SUMS + 1) + (0 if holder else 1)
        upcoming = _append(rows, heads, upcoming, key, value, different)
    return upcoming, read
