# SPDX-License-Identifier: Apache-2.0
"""Tell which verdicts a load may have, from payloads that are read untyped and added up token by token."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import Any

import msgspec

from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    Difference,
    GroupVerdict,
    LeftOut,
    LoadVerdict,
    Unverified,
)

from .loads import FINGERPRINTS, MASK, STATE, WINDOW, Load
from .untyped import read


def assert_refused(verdict: LoadVerdict, data: bytes) -> None:
    """Check that bytes which are no payload have nothing verified, and say why."""
    try:
        tree = read(data)
    except ValueError:
        tree = None
    reason = Unverified.BAD_PAYLOAD
    version = tree[0] if isinstance(tree, list) and len(tree) == 2 else None
    if type(version) is int and version != 2:
        reason = Unverified.PAYLOAD_VERSION
    assert verdict.unverified is reason and verdict.detail
    assert verdict == LoadVerdict(unverified=reason, detail=verdict.detail)


def assert_right(load: Load, verdict: LoadVerdict, data: bytes) -> None:
    """Check that the verdict on a payload is the one that follows from its bytes."""
    case = load.case
    version, body = msgspec.msgpack.decode(data)
    num_tokens, tp_size, prompt, beginning, inputs, groups = body
    assert version == 2
    bound = not case.embeds
    if prompt and bound and not case.is_of(num_tokens, prompt, beginning):
        assert verdict == LoadVerdict(other_prompt=True)
        assert verdict.outcome == "mismatch" and not load.kept
        return
    if bool(prompt) != bound or inputs != case.inputs_digest(num_tokens):
        assert verdict.detail
        assert verdict == LoadVerdict(
            unverified=Unverified.INPUTS, detail=verdict.detail
        )
        assert verdict.outcome == "unverified"
        return
    assert verdict.unbound == (not bound) and not verdict.other_prompt
    tokens, left_out = load.tokens(num_tokens), {}
    if STATE in case.groups and tp_size != case.tp_size:
        left_out[STATE] = LeftOut.TP_SIZES
    assert verdict.groups.keys() == {*groups, *case.groups} - left_out.keys()
    for group_id, group in verdict.groups.items():
        assert (group.unverified is not None) == bool(group.detail), group
        assert len(group.detail) < 200
        _assert_group(load, group_id, groups.get(group_id), (num_tokens, tokens), group)
        if group.partial and group_id == WINDOW:
            left_out[group_id] = LeftOut.PARTIAL_BLOCKS
    assert verdict.left_out == left_out
    # Otherwise a token is without a checksum.
    short = Unverified.NUM_TOKENS if num_tokens < tokens else None
    assert verdict.unverified is short
    whole = all(g.unverified is None for g in verdict.groups.values())
    if any(g.positions for g in verdict.groups.values()):
        assert verdict.outcome == "mismatch"
    else:
        verified = whole and verdict.groups and not short
        assert verdict.outcome == ("verified" if verified else "unverified")
    if load.kept:
        (group,) = verdict.groups.values()
        assert whole and not short and not group.partial
        assert load.kept == group.positions[0] * case.block_size


@dataclass
class Sent:
    """A group of a payload.

    Attributes:
        copies: by index of a value, other copies' values of it.

    """

    size: int
    start: int
    values: list[int]
    tokens: int
    copies: dict[int, dict[int, int]] = field(default_factory=dict)

    def sums(self, begin: int, end: int) -> list[int] | None:
        """Return the sum of each copy over some tokens; None if one has no value.

        The first copy is the first.
        """
        low = begin // self.size - self.start
        high = -(-min(end, self.tokens) // self.size) - self.start
        if not 0 <= low < high <= len(self.values):
            return None
        first = sum(self.values[low:high])
        others: dict[int, int] = defaultdict(lambda: first)
        for at in self.copies.keys() & range(low, high):
            for copy, value in self.copies[at].items():
                others[copy] += value - self.values[at]
        return [total & MASK for total in (first, *others.values())]


def _assert_group(
    load: Load, group_id: int, theirs: Any, tokens: tuple[int, int], group: GroupVerdict
) -> None:
    """Check that one group's verdict is the one that follows.

    Args:
        theirs: the group in the payload, or None.
        tokens: how many the payload is of, and how many are loaded.

    """
    if theirs is None or group_id not in load.case.groups:
        only = Unverified.ONE_SIDE_ONLY
        assert group == GroupVerdict(unverified=only, detail=group.detail)
        return
    fingerprint, their_size, their_start, data, copies = theirs
    size, _ = load.units(group_id)
    small, large = sorted((size, their_size))
    begins, state = load.starts[group_id] * size, group_id == STATE
    true = {
        Unverified.FINGERPRINT: fingerprint != FINGERPRINTS[group_id],
        Unverified.BLOCK_SIZES: large % small or (state and large > small),
        Unverified.UNALIGNED_START: begins % large,
        Unverified.NUM_TOKENS: state and tokens[0] != tokens[1],
    }
    expected, compared = None, not any(true.values())
    if compared:
        values = [value for (value,) in iter_unpack("<Q", data)]
        sent = Sent(their_size, their_start, values, 1 if state else tokens[0])
        for copy, at, value in iter_unpack("<HIQ", copies):
            sent.copies.setdefault(at, {})[copy] = value
        expected = _expected(load, group_id, sent, 1 if state else tokens[1], tokens[1])
    if expected is None:
        true[Unverified.NOTHING_IN_COMMON] = compared
        assert group.unverified is not None and true[group.unverified]
        expected = GroupVerdict(unverified=group.unverified)
    # A payload says nothing about ranks; copies of verdicts would take time that counts.
    expected.ranks, expected.bad_checks = group.ranks, group.bad_checks
    expected.detail = group.detail
    assert group == expected


def _chunks(
    load: Load, group_id: int, sent: Sent, ends: int, num_tokens: int
) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield what can be compared: a chunk's number, and what was sent and loaded of it.

    Args:
        ends: the token behind the last that counts.
        num_tokens: of what the sums that are held are.

    """
    size = load.units(group_id)[0]
    begins, large = load.starts[group_id] * size, max(size, sent.size)
    held = [sums.tolist() for sums in load.sums(group_id, num_tokens)]
    for begin in range(begins, ends, large):
        end = begin + large
        if sent.tokens != ends and end > min(sent.tokens, ends):
            return  # the two sides hold other tokens of it
        expected = sent.sums(begin, end)
        if expected is not None:
            first, last = ((x - begins) // size for x in (begin, end))
            yield begin // large, expected, [sum(s[first:last]) & MASK for s in held]


def _expected(
    load: Load, group_id: int, sent: Sent, ends: int, num_tokens: int
) -> GroupVerdict | None:
    """Return the verdict by blocks, or None if nothing can be compared; `_chunks`' arguments."""
    size, per_block = load.units(group_id)
    ratio, start, end = (
        max(size, sent.size) // size,
        load.starts[group_id],
        -(-ends // size),
    )
    low = high = -1
    blocks: set[int] = set()
    samples: dict[int, Difference] = {}
    for number, expected, found in _chunks(load, group_id, sent, ends, num_tokens):
        unit = number * ratio
        low, high = unit if low < 0 else low, min(unit + ratio, end)
        differ = [value for value in found if value not in expected]
        if differ:
            block = unit // per_block
            blocks |= {i // per_block for i in range(unit, high)}
            samples.setdefault(block, Difference(block, expected[0], differ[0]))
    if low < 0:
        return None
    # A last block of which a part was compared counts if that part differs.
    stop = max([high // per_block, *(b + 1 for b in blocks)])
    if high == end:
        stop = -(-high // per_block)
    unverified = None
    if high < end:
        unverified = Unverified.NUM_TOKENS
    elif low > start and group_id != WINDOW:
        unverified = Unverified.OTHER_BLOCKS
    return GroupVerdict(
        low // per_block,
        max(0, stop - low // per_block),
        sorted(blocks),
        list(samples.values())[:3],
        unverified,
        partial=low > start,
    )
