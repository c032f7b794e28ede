# SPDX-License-Identifier: Apache-2.0
"""Comparing one group: positions, replicas, block sizes."""

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_checksum.payload import GroupChecksums
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    Difference,
    GroupVerdict,
    LoadVerdict,
    LocalGroup,
    Unverified,
    compare_group,
)


def values(number):
    return np.arange(1, number + 1, dtype=np.uint64) * np.uint64(2**60 + 7)


def sent(number, block_size=16):
    return GroupChecksums(1, block_size, 0, values(number))


def test_one_bad_replica_is_enough_and_its_value_is_shown():
    good, bad = values(4), values(4)
    bad[2] += np.uint64(1)
    verdict = compare_group(sent(4), 64, LocalGroup(1, 16, 0, [good, bad, good]), 64)
    assert verdict.positions == [2] and verdict.compared == 4
    assert verdict.samples == [Difference(2, int(good[2]), int(bad[2]))]


@pytest.mark.parametrize("tokens", [64, 50, 40])
def test_smaller_blocks_of_a_bad_chunk_are_named_up_to_the_last_token(tokens):
    """P's blocks of 32 tokens against D's of 16."""
    number = -(-tokens // 16)
    theirs = sent(-(-tokens // 32), 32)
    ours = np.zeros(number, np.uint64)
    ours[::2] = theirs.values
    assert compare_group(theirs, tokens, LocalGroup(1, 16, 0, [ours]), tokens) == (
        compare_group(theirs, tokens, LocalGroup(1, 16, 0, [ours, ours]), tokens)
    )
    ours[2] += np.uint64(1)
    verdict = compare_group(theirs, tokens, LocalGroup(1, 16, 0, [ours]), tokens)
    assert verdict.positions == list(range(2, number))
    assert verdict.compared == number


def test_few_samples_of_many_differences():
    local = LocalGroup(1, 16, 0, [values(1000) + np.uint64(1)])
    verdict = compare_group(sent(1000), 16000, local, 16000)
    assert len(verdict.positions) == 1000
    assert [d.position for d in verdict.samples] == [0, 1, 2]


def test_a_group_of_which_nothing_was_compared_is_not_verified():
    verdict = LoadVerdict({0: GroupVerdict(compared=3), 1: GroupVerdict(compared=0)})
    assert verdict.outcome == "unverified"
    assert verdict.reason is Unverified.NOTHING_IN_COMMON
    verdict.groups[1].compared = 1
    assert verdict.outcome == "verified"


def test_what_counts_as_good_before_the_first_bad_block():
    """P's blocks of 32 tokens from its second one on, D's of 16."""
    theirs = GroupChecksums(1, 32, 1, values(3))
    local = LocalGroup(1, 16, 0, [np.repeat(theirs.values, 2)])
    group = compare_group(theirs, 128, local, 128)
    assert group.first == 2 and group.positions[0] == 2
    verdict = LoadVerdict({0: group})
    assert [verdict.good_blocks(0, start) for start in (0, 1, 2)] == [0, 0, 2]
    assert LoadVerdict({0: GroupVerdict(2, 4)}).good_blocks(0, 2) == 0
