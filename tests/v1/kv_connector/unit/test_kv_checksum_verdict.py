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


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        (100, 100, None),
        (100, 97, Unverified.NUM_TOKENS),
        (97, 100, Unverified.NUM_TOKENS),
    ],
)
def test_a_state_is_that_of_one_token_count(theirs, ours, reason):
    sums = GroupChecksums(1, 1, 0, values(1))
    local = LocalGroup(1, 1, 0, [values(1)], is_state=True)
    verdict = compare_group(sums, theirs, local, ours)
    assert verdict.unverified is reason and verdict.compared == (reason is None)
    local = LocalGroup(1, 1, 0, [values(1) + np.uint64(1)], is_state=True)
    assert compare_group(sums, theirs, local, ours).positions == [0] * (reason is None)


@pytest.mark.parametrize(
    ("theirs", "our_tokens", "reason"),
    [
        (sent(7), 100, None),
        (sent(7), 96, None),
        # The last block holds other tokens on the two sides.
        (sent(7), 98, Unverified.NUM_TOKENS),
        # Fewer blocks than the tokens say.
        (sent(6), 100, Unverified.NUM_TOKENS),
        (GroupChecksums(1, 16, 2, values(7)[2:]), 100, Unverified.OTHER_BLOCKS),
    ],
    ids=["all", "whole blocks", "fewer tokens", "cut", "begins later"],
)
@pytest.mark.parametrize("bad", [False, True])
def test_verified_means_that_every_loaded_block_was_compared(
    theirs, our_tokens, reason, bad
):
    number = -(-our_tokens // 16)
    sums = values(7)[1:number]
    sums[2] += np.uint64(bad)
    verdict = compare_group(theirs, 100, LocalGroup(1, 16, 1, [sums]), our_tokens)
    assert verdict.unverified is reason
    assert verdict.positions == [3] * bad
    load = LoadVerdict({0: verdict})
    assert load.outcome == (
        "mismatch" if bad else "unverified" if reason else "verified"
    )


def test_of_a_window_the_producer_may_have_given_up_the_first_block():
    """D's blocks of 32 tokens; P's of 16, the first of which had left its window."""
    theirs = GroupChecksums(1, 16, 1, values(6)[1:])
    sums = np.add.reduceat(values(6), [0, 2, 4])
    verdict = compare_group(
        theirs, 96, LocalGroup(1, 32, 0, [sums], is_window=True), 96
    )
    assert (verdict.first, verdict.compared, verdict.unverified) == (1, 2, None)
    verdict = compare_group(theirs, 96, LocalGroup(1, 32, 0, [sums]), 96)
    assert verdict.unverified is Unverified.OTHER_BLOCKS


def test_a_state_s_first_bad_token_is_the_last_one():
    verdict = LoadVerdict(
        {
            0: GroupVerdict(0, 9, [4, 7]),
            1: GroupVerdict(0, 1, [0]),
            2: GroupVerdict(0, 9),
        }
    )
    first = {0: lambda p: 16 * p, 1: lambda p: 99, 2: lambda p: 0}
    assert verdict.first_bad_token(lambda g, p: first[g](p)) == 64
    assert LoadVerdict().first_bad_token(lambda g, p: 0) is None
