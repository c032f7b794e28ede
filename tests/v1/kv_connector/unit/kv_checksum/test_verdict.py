# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the comparison of one group: positions, replicas, block sizes."""

import tracemalloc

import numpy as np
import pytest

from vllm.distributed.kv_transfer.kv_checksum.payload import (
    GroupChecksums,
    KVChecksumPayload,
    OtherCopies,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import Units
from vllm.distributed.kv_transfer.kv_checksum.scheduler.group_comparison import (
    LocalGroup,
    compare_group,
    judge,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    Difference,
    GroupVerdict,
    LoadVerdict,
    Unverified,
)

BLOCKS_OF_16 = Units(16, 1)


def values(number):
    return np.arange(1, number + 1, dtype=np.uint64) * np.uint64(2**60 + 7)


def sent(number, block_size=16):
    return GroupChecksums(1, block_size, 0, values(number))


def test_one_bad_replica_is_enough_and_its_value_is_shown():
    good, bad = values(4), values(4)
    bad[2] += np.uint64(1)
    verdict = compare_group(
        sent(4), 64, LocalGroup(1, BLOCKS_OF_16, 0, [good, bad, good]), 64
    )
    assert verdict.positions == [2] and verdict.compared == 4
    assert verdict.samples == [Difference(2, int(good[2]), int(bad[2]))]


@pytest.mark.parametrize("tokens", [64, 50, 40])
def test_smaller_blocks_of_a_bad_chunk_are_named_up_to_the_last_token(tokens):
    """Compare P's blocks of 16 tokens with D's of 8, which are units of their own."""
    number = -(-tokens // 8)
    theirs = sent(-(-tokens // 16), 16)
    ours = np.zeros(number, np.uint64)
    ours[::2] = theirs.values
    once, twice = (LocalGroup(1, Units(8, 1), 0, [ours] * n) for n in (1, 2))
    verdict = compare_group(theirs, tokens, once, tokens)
    assert verdict == compare_group(theirs, tokens, twice, tokens)
    assert verdict.unverified is None and verdict.positions == []
    ours[2] += np.uint64(1)
    verdict = compare_group(theirs, tokens, once, tokens)
    assert verdict.positions == [2, 3]
    assert verdict.compared == number


def test_sums_that_start_inside_a_chunk_are_compared_from_the_next_on():
    """Compare P's blocks of 8, the first given up by a window, with D's of 16."""
    small = values(8)
    ours = small.reshape(4, 2).sum(axis=1, dtype=np.uint64)
    theirs = GroupChecksums(1, 8, 1, small[1:])
    local = LocalGroup(1, BLOCKS_OF_16, 0, [ours], is_window=True)
    verdict = compare_group(theirs, 64, local, 64)
    assert verdict.positions == [] and verdict.unverified is None
    assert verdict.compared == 3 and verdict.partial
    ours[1] += np.uint64(1)
    assert compare_group(theirs, 64, local, 64).positions == [1]


def test_no_block_behind_the_last_token_is_bad():
    """The last chunk of P's is a part of one; D's blocks end with the request."""
    theirs = GroupChecksums(1, 64, 0, values(2))
    ours = np.zeros(5, np.uint64)
    ours[::4] = theirs.values
    local = LocalGroup(1, BLOCKS_OF_16, 0, [ours])
    assert compare_group(theirs, 80, local, 80).positions == []
    ours[4] += np.uint64(1)
    verdict = compare_group(theirs, 80, local, 80)
    assert verdict.positions == [4] and verdict.compared == 5


def test_a_huge_unit_costs_no_memory():
    """A client may name any; only the units that were loaded count."""
    theirs = GroupChecksums(1, 2**30, 0, values(1))
    local = LocalGroup(1, BLOCKS_OF_16, 0, [values(4)])
    tracemalloc.start()
    verdict = compare_group(theirs, 64, local, 64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert verdict.positions == [0, 1, 2, 3] and peak < 2**20


def test_few_samples_of_many_differences():
    local = LocalGroup(1, BLOCKS_OF_16, 0, [values(1000) + np.uint64(1)])
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
    """Load blocks of 32 tokens, of whose second one P sent the second half alone."""
    theirs = GroupChecksums(1, 16, 3, values(5))
    sums = np.concatenate([values(1), theirs.values])
    sums[3:] += np.uint64(1)
    local = LocalGroup(1, Units(16, 2), 1, [sums])
    group = compare_group(theirs, 128, local, 128)
    assert (group.first, group.partial, group.positions) == (1, True, [2, 3])
    assert LoadVerdict({0: group}).good_blocks(0) == 0
    theirs = GroupChecksums(1, 16, 2, sums.copy())
    sums[3] += np.uint64(1)
    group = compare_group(theirs, 128, local, 128)
    assert (group.first, group.partial, group.positions) == (1, False, [2])
    assert LoadVerdict({0: group}).good_blocks(0) == 2
    assert LoadVerdict({0: GroupVerdict(2, 4)}).good_blocks(0) == 0


@pytest.mark.parametrize(("bad", "block"), [(0, 0), (3, 0), (4, 1), (8, 2)])
def test_a_unit_that_differs_makes_its_block_bad(bad, block):
    """Compare D's blocks of 64 tokens with P's of any multiple of 16."""
    theirs = sent(9)
    sums = np.concatenate([values(9), np.zeros(3, np.uint64)])
    sums[bad] ^= np.uint64(1)
    verdict = compare_group(theirs, 130, LocalGroup(1, Units(16, 4), 0, [sums]), 130)
    assert (verdict.compared, verdict.positions) == (3, [block])
    (sample,) = verdict.samples
    value = int(values(9)[bad])
    assert sample == Difference(block, value, value ^ 1)


@pytest.mark.parametrize(("bad", "compared"), [(1, 1), (2, 2), (3, 1)])
def test_a_last_block_compared_in_part_counts_if_it_differs(bad, compared):
    """Load blocks of 32 tokens, of whose second one P sent the first half alone."""
    sums = values(4)
    sums[bad] ^= np.uint64(1)
    local = LocalGroup(1, Units(16, 2), 0, [sums])
    verdict = compare_group(sent(3), 48, local, 64)
    assert verdict.unverified is Unverified.NUM_TOKENS
    assert verdict.compared == compared
    assert verdict.positions == ([] if bad == 3 else [bad // 2])


def test_units_past_the_last_token_are_not_compared():
    """Compare a block of 64 tokens that holds 20, and one that holds none."""
    sums = np.concatenate([values(2), np.full(6, 9, np.uint64)])
    local = LocalGroup(1, Units(16, 4), 0, [sums])
    verdict = compare_group(sent(2), 20, local, 20)
    assert (verdict.compared, verdict.positions, verdict.unverified) == (1, [], None)


# ---- replicas of the producer


def test_a_copy_counts_where_it_is_alone():
    """D loads from the second unit on; a copy differs in the first."""
    sums = values(6)
    sums[5:] += np.array([99], np.uint64) - values(1)
    local = LocalGroup(1, BLOCKS_OF_16, 1, [sums[1:]])
    assert compare_group(with_copies(), 96, local, 96).positions == [5]


def copies_of(*entries):
    copy, at, found = zip(*entries, strict=True)
    return OtherCopies(np.array(copy), np.array(at), np.array(found, np.uint64))


def with_copies(unit_size=16):
    """Return six values; copy 0 differs at 0, 1, 4, copy 1 at 2, 3, and 4 (else)."""
    first = ((0, 0, 99), (0, 1, 100), (0, 4, 101))
    second = ((1, 2, 200), (1, 3, 201), (1, 4, 102))
    return GroupChecksums(1, unit_size, 0, values(6), copies_of(*first, *second))


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, []),
        ({1: 100}, []),
        ({1: 100, 4: 101}, []),
        ({4: 102}, []),
        ({4: 100}, [4]),
        ({1: 101}, [1]),
        ({0: 100}, [0]),
    ],
)
def test_each_copy_of_the_producer_is_right(changes, positions):
    sums = values(6)
    for at, value in changes.items():
        sums[at] = value
    local = LocalGroup(1, BLOCKS_OF_16, 0, [values(6), sums])
    assert compare_group(with_copies(), 96, local, 96).positions == positions
    local = LocalGroup(1, BLOCKS_OF_16, 1, [sums[1:]])
    verdict = compare_group(with_copies(), 96, local, 96)
    assert verdict.positions == [p for p in positions if p]


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, []),
        ({4: 101}, []),
        ({4: 102}, []),
        ({0: 99, 1: 100, 4: 102}, []),
        ({2: 200, 3: 201}, []),
        ({2: 200}, [1]),
        ({1: 100}, [0]),
        ({4: 100}, [2]),
    ],
)
def test_copies_add_up_over_a_chunk(changes, positions):
    """Compare P's units of 8 tokens with D's of 16."""
    sums = values(6)
    for at, value in changes.items():
        sums[at] = value
    local = LocalGroup(1, BLOCKS_OF_16, 0, [np.add.reduceat(sums, [0, 2, 4])])
    assert compare_group(with_copies(8), 48, local, 48).positions == positions


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
    local = LocalGroup(1, Units(1, 1), 0, [values(1)], is_state=True)
    verdict = compare_group(sums, theirs, local, ours)
    assert verdict.unverified is reason and verdict.compared == (reason is None)
    local = LocalGroup(1, Units(1, 1), 0, [values(1) + np.uint64(1)], is_state=True)
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
    verdict = compare_group(
        theirs, 100, LocalGroup(1, BLOCKS_OF_16, 1, [sums]), our_tokens
    )
    assert verdict.unverified is reason
    assert verdict.positions == [3] * bad
    load = LoadVerdict({0: verdict})
    assert load.outcome == (
        "mismatch" if bad else "unverified" if reason else "verified"
    )


def test_a_state_is_compared_with_a_state_alone():
    local = LocalGroup(1, Units(1, 1), 0, [values(1)], is_state=True)
    verdict = compare_group(GroupChecksums(1, 16, 0, values(1)), 1, local, 1)
    assert verdict.unverified is Unverified.BLOCK_SIZES


def test_of_a_window_the_producer_may_have_given_up_the_first_block():
    """Compare D's blocks of 32 tokens with P's of 16, the first of which has gone."""
    theirs = GroupChecksums(1, 16, 1, values(6)[1:])
    local = LocalGroup(1, Units(16, 2), 0, [values(6)], is_window=True)
    verdict = compare_group(theirs, 96, local, 96)
    assert verdict == GroupVerdict(0, 3, partial=True)
    local.is_window = False
    verdict = compare_group(theirs, 96, local, 96)
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


# ---- what is said of a load that is not verified


def local_of(size=16, start=0, number=7, **more):
    units = Units(16, size // 16) if size % 16 == 0 else Units(size, 1)
    return LocalGroup(1, units, start, [values(number * units.per_block)], **more)


@pytest.mark.parametrize(
    ("theirs", "ours", "our_tokens", "detail"),
    [
        (
            GroupChecksums(0xAB, 16, 0, values(7)),
            local_of(),
            100,
            "00000000000000ab sent, 0000000000000001 here",
        ),
        (sent(4, 24), local_of(), 100, "sums of 24 tokens sent, of 16 here"),
        (
            sent(4, 32),
            local_of(8, start=1),
            100,
            "sums of 32 tokens sent, loaded from token 8 on",
        ),
        (
            sent(1, 1),
            LocalGroup(1, Units(1, 1), 0, [values(1)], is_state=True),
            97,
            "state after 100 tokens sent, after 97 loaded",
        ),
        (sent(7), local_of(), 98, "tokens 0-96 in common, 0-112 loaded"),
        (
            GroupChecksums(1, 16, 2, values(5)),
            local_of(start=1, number=6),
            100,
            "tokens 32-112 in common, 16-112 loaded",
        ),
        (
            GroupChecksums(1, 16, 0, values(2)),
            local_of(start=4, number=3),
            100,
            "chunks 0-2 of 16 tokens sent, 4-7 loaded",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_numbers(theirs, ours, our_tokens, detail):
    verdict = compare_group(theirs, 100, ours, our_tokens)
    assert verdict.unverified is not None and verdict.detail == detail
    assert LoadVerdict({3: verdict}).explanation == f"group 3: {detail}"


def test_groups_of_one_side_alone_are_told():
    payload = KVChecksumPayload(100, 1, {0: sent(7), 1: sent(7)})
    verdict = judge(payload, {0: local_of(), 2: local_of()}, 100)
    details = {i: group.detail for i, group in verdict.groups.items()}
    assert details == {0: "", 1: "sent, not summed here", 2: "summed here, not sent"}
    assert verdict.explanation == "group 1: sent, not summed here"
    shorter = judge(KVChecksumPayload(90, 1, {0: sent(6)}), {0: local_of()}, 100)
    assert shorter.explanation == "90 tokens sent, 100 loaded"
