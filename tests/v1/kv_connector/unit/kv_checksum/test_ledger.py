# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ledger's table, beside a plain list of what was entered."""

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger import (
    MAX_SUMS,
    Ledger,
    ledger_keys,
)
from vllm.utils.hashing import sha256

UINT64 = np.uint64


class Plain:
    """The same by a list of entries: key, sum, and sums of the key until then."""

    def __init__(self, size):
        self.size = size
        self.entries: list[tuple[int, int, int]] = []

    def left(self, key):
        """A key's entries that are not overwritten, the newest first."""
        start = max(0, len(self.entries) - self.size)
        own = [(at, e) for at, e in enumerate(self.entries) if e[0] == key]
        return [(at, e) for at, e in own[::-1] if at >= start]

    def enter(self, key, value):
        held = self.sums(key)[0]
        same = [at for at, e in self.left(key) if e[1] == value and value in held]
        if same and same[0] >= len(self.entries) - self.size // 2:
            return
        before = self.left(key)[0][1][2] if held else 0
        self.entries.append((key, value, min(before, 5) + (not same)))

    def sums(self, key):
        """The newest different sums, and whether there were more."""
        left = [e for _, e in self.left(key)]
        found = list(dict.fromkeys(value for _, value, _ in left))[:MAX_SUMS]
        return found, bool(left) and left[0][2] > len(found)


def known(ledger, key):
    found = ledger.known(np.array([key], UINT64))
    return found.sums[0, : found.number[0]].tolist(), bool(found.dropped[0])


def enter(ledger, *pairs):
    keys, sums = zip(*pairs, strict=True)
    ledger.enter(np.array(keys, UINT64), np.array(sums, UINT64))


def test_a_key_has_its_sums_newest_first():
    ledger = Ledger(100)
    assert known(ledger, 7) == ([], False)
    enter(ledger, (7, 1), (8, 2), (7, 3))
    assert known(ledger, 7) == ([3, 1], False)
    assert known(ledger, 8) == ([2], False)
    assert len(ledger) == 3


def test_the_fifth_sum_of_a_key_drops_the_first():
    ledger = Ledger(100)
    for value in range(1, MAX_SUMS + 1):
        enter(ledger, (7, value))
    assert known(ledger, 7) == ([4, 3, 2, 1], False)
    enter(ledger, (7, 5))
    assert known(ledger, 7) == ([5, 4, 3, 2], True)


def test_what_is_known_takes_no_further_entry():
    ledger = Ledger(100)
    for _ in range(20):
        enter(ledger, (7, 1), (7, 2))
    assert len(ledger) == 2 and known(ledger, 7) == ([2, 1], False)


def test_the_oldest_go_first():
    ledger = Ledger(10)
    enter(ledger, *((key, key + 100) for key in range(15)))
    assert len(ledger) == 10
    assert [known(ledger, key)[0] for key in range(15)] == [[]] * 5 + [
        [key + 100] for key in range(5, 15)
    ]


def test_what_is_seen_again_stays():
    ledger = Ledger(10)
    for key in range(1, 100):
        enter(ledger, (0, 5), (key, 6))
        assert known(ledger, 0) == ([5], False), key


def test_a_sum_that_went_is_told_from_one_that_never_was():
    """Of two sums the older has left the table: the other alone is no evidence."""
    ledger = Ledger(10)
    enter(ledger, (7, 1))
    enter(ledger, *((key, 0) for key in range(100, 108)))
    enter(ledger, (7, 2))
    assert known(ledger, 7) == ([2, 1], False)
    enter(ledger, (200, 0))
    assert known(ledger, 7) == ([2], True)


@pytest.mark.parametrize("size", [1, 3, 64, 1000])
def test_drawn_entries(size):
    rng = np.random.default_rng(size)
    ledger, plain = Ledger(size), Plain(size)
    for _ in range(60):
        number = int(rng.integers(1, 40))
        keys = rng.integers(0, 50, number) * 2**32
        sums = rng.integers(1, 8, number)
        enter(ledger, *zip(keys.tolist(), sums.tolist(), strict=True))
        for key, value in zip(keys.tolist(), sums.tolist(), strict=True):
            plain.enter(key, value)
        for key in range(50):
            assert known(ledger, key * 2**32) == plain.sums(key * 2**32)


def test_all_is_forgotten():
    ledger = Ledger(10)
    enter(ledger, *((key, 1) for key in range(30)))
    ledger.clear()
    assert len(ledger) == 0 and all(known(ledger, k) == ([], False) for k in range(30))
    enter(ledger, (3, 9))
    assert known(ledger, 3) == ([9], False) and len(ledger) == 1


def test_one_block_takes_at_most_64_bytes():
    for size in (1000, 2**20, 2**20 + 1):
        assert Ledger(size).num_bytes <= 64 * size + 64


def test_keys_differ_by_group_and_hash():
    hashes = [sha256(i) for i in range(100)]
    keys = np.concatenate([ledger_keys(hashes, group) for group in range(50)])
    assert len(np.unique(keys)) == 5000


def test_several_sums_of_a_load_are_looked_up_at_once():
    ledger = Ledger(10)
    enter(ledger, (1, 5), (1, 6), (2, 7))
    found = ledger.known(np.array([1, 2, 3, 1], UINT64))
    assert found.equal(np.array([5, 8, 9, 6], UINT64)).tolist() == [1, 0, 0, 1]
    assert found.equal(np.array([0, 0, 0, 0], UINT64)).tolist() == [0, 0, 0, 0]


def test_a_key_may_be_said_to_have_a_sum_that_is_not_known():
    ledger = Ledger(10)
    enter(ledger, (1, 5), (2, 6))
    ledger.mark_other_sums(np.array([1, 3], UINT64))
    assert known(ledger, 1) == ([5], True) and known(ledger, 2) == ([6], False)
    # Nothing is known of the other, whatever its place holds.
    assert known(ledger, 3)[1]
    enter(ledger, (1, 7), (3, 8))
    assert known(ledger, 1) == ([7, 5], True) and known(ledger, 3)[1]
