# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare a producer's sums with a consumer's: pure functions.

Sums are compared by the unit. Where the units of the two sides differ, they are
compared by the chunk, which is as long as the larger unit; the smaller units add up
to it.
"""

from dataclasses import dataclass

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.payload import (
    GroupChecksums,
    KVChecksumPayload,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import Units
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import NotComparable
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    MAX_SAMPLES,
    Difference,
    GroupVerdict,
    LoadVerdict,
    Unverified,
)


@dataclass
class LocalGroup:
    """A consumer's whole-model sums of one group.

    `GroupChecksums` holds the producer's: there one copy's sums in full and the others
    where they differ, here one array per check.

    Attributes:
        fingerprint: identifies the group's layers (uint64).
        units: the division of the group's blocks into units.
        start: position of the first loaded block.
        checks: one uint64 array of shape ``(units,)`` per replica check.
        is_state: whether a block holds a state, which is valid for one token count
            alone.
        is_window: whether the producer may have given up blocks that it has passed.

    """

    fingerprint: int
    units: Units
    start: int
    checks: list[np.ndarray]
    is_state: bool = False
    is_window: bool = False


def judge(
    payload: KVChecksumPayload,
    local: dict[int, LocalGroup | NotComparable | None],
    num_tokens: int,
) -> LoadVerdict:
    """Compare one load.

    A group that neither side sums is in neither argument and stays out of the verdict.

    Args:
        payload: the producer's sums.
        local: per KV cache group that this side sums, the sums, or why there are none,
            or None if no block of the group was loaded.
        num_tokens: tokens of the request that the load covers.

    """
    verdict = LoadVerdict()
    for group_id in sorted({*payload.groups, *local}):
        theirs = payload.groups.get(group_id)
        ours = local.get(group_id)
        if group_id not in local:
            outcome = _unverified(Unverified.ONE_SIDE_ONLY, "sent, not summed here")
        elif ours is None:
            continue
        elif theirs is None:
            outcome = _unverified(Unverified.ONE_SIDE_ONLY, "summed here, not sent")
        elif isinstance(ours, NotComparable):
            outcome = _unverified(ours.reason, ours.detail)
        else:
            outcome = compare_group(theirs, payload.num_tokens, ours, num_tokens)
        verdict.groups[group_id] = outcome
    if payload.num_tokens < num_tokens:
        # Some loaded tokens have no checksum.
        verdict.unverified = Unverified.NUM_TOKENS
        verdict.detail = f"{payload.num_tokens} tokens sent, {num_tokens} loaded"
    return verdict


def _unverified(reason: Unverified, detail: str) -> GroupVerdict:
    return GroupVerdict(unverified=reason, detail=detail)


def compare_group(
    theirs: GroupChecksums, their_tokens: int, ours: LocalGroup, our_tokens: int
) -> GroupVerdict:
    """Compare one group.

    A group that does not differ is unverified unless every loaded unit was compared,
    but for the first of a window. A unit counts only if both sides hold equally many
    of its tokens.
    """
    different = _why_not_compared(theirs, their_tokens, ours, our_tokens)
    if different is not None:
        return different
    size = ours.units.size
    large = max(theirs.unit_size, size)
    start = ours.start * ours.units.per_block
    # Units past the last token are sums of no tokens.
    end = min(start + len(ours.checks[0]), -(-our_tokens // size))
    held: np.ndarray = np.array(ours.checks)[:, : max(0, end - start)]
    sent = _chunks(
        theirs.start, theirs.values[None], theirs.unit_size, large, their_tokens
    )
    loaded = _chunks(start, held, size, large, our_tokens)
    low, high = max(sent.first, loaded.first), min(sent.end, loaded.end)
    if their_tokens != our_tokens:
        high = min(high, min(their_tokens, our_tokens) // large)
    if high <= low:
        return _unverified(
            Unverified.NOTHING_IN_COMMON,
            f"chunks {sent.first}-{sent.end} of {large} tokens sent, "
            f"{loaded.first}-{loaded.end} loaded",
        )
    common = _Common(low, sent.between(low, high)[0], loaded.between(low, high))
    differs = common.found != common.expected
    _accept_copies(theirs, large // theirs.unit_size, common, differs)
    return _in_blocks(common, differs, large // size, ours, (start, end))


def _why_not_compared(
    theirs: GroupChecksums, their_tokens: int, ours: LocalGroup, our_tokens: int
) -> GroupVerdict | None:
    """Return an unverified verdict if the two sides' sums cannot be compared."""
    sizes = theirs.unit_size, ours.units.size
    first = ours.start * ours.units.block_size
    if theirs.fingerprint != ours.fingerprint:
        return _unverified(
            Unverified.FINGERPRINT,
            f"{theirs.fingerprint:016x} sent, {ours.fingerprint:016x} here",
        )
    if ours.is_state and their_tokens != our_tokens:
        return _unverified(
            Unverified.NUM_TOKENS,
            f"state after {their_tokens} tokens sent, after {our_tokens} loaded",
        )
    if max(sizes) % min(sizes) or (ours.is_state and sizes[0] != sizes[1]):
        return _unverified(
            Unverified.BLOCK_SIZES,
            f"sums of {sizes[0]} tokens sent, of {sizes[1]} here",
        )
    if first % max(sizes):
        return _unverified(
            Unverified.UNALIGNED_START,
            f"sums of {sizes[0]} tokens sent, loaded from token {first} on",
        )
    return None


@dataclass
class _Chunks:
    """Sums of consecutive chunks, shape ``(checks, chunks)``; `first` numbers them."""

    first: int
    sums: np.ndarray

    @property
    def end(self) -> int:
        return self.first + self.sums.shape[1]

    def between(self, low: int, high: int) -> np.ndarray:
        return self.sums[:, low - self.first : high - self.first]


def _chunks(
    start: int, values: np.ndarray, size: int, large: int, num_tokens: int
) -> _Chunks:
    """Add up units of `size` tokens to whole chunks of `large` tokens.

    A chunk is kept only if every unit of it that holds tokens is in `values`; units
    past the last token count as zero. Memory is bounded by `values`.

    Args:
        start: number of the first unit.
        values: uint64 ``(checks, units)``.
        size: tokens per unit, a divisor of `large`.
        large: tokens per chunk.
        num_tokens: tokens of the request that the sums cover.

    """
    ratio = large // size
    if ratio == 1:
        return _Chunks(start, values)
    first = -(-start // ratio)
    values = values[:, first * ratio - start :]
    number = values.shape[1]
    whole = number // ratio
    if first * ratio + number >= -(-num_tokens // size):
        whole = -(-number // ratio)
    values = values[:, : whole * ratio]
    sums = np.add.reduceat(values, np.arange(whole) * ratio, axis=1)
    return _Chunks(first, sums)


@dataclass
class _Common:
    """The chunks that both sides hold.

    Attributes:
        low: number of the first chunk.
        expected: the producer's sums, uint64 ``(chunks,)``.
        found: the consumer's sums, uint64 ``(checks, chunks)``.

    """

    low: int
    expected: np.ndarray
    found: np.ndarray


def _accept_copies(
    theirs: GroupChecksums, ratio: int, common: _Common, differs: np.ndarray
) -> None:
    """Clear in `differs` the chunks that equal another copy of the producer.

    Args:
        theirs: the producer's sums.
        ratio: the producer's units per chunk.
        common: the chunks that both sides hold.
        differs: bool ``(checks, chunks)``, changed in place.

    """
    copies = theirs.copies
    if copies is None:
        return
    number = len(common.expected)
    chunk: np.ndarray = (theirs.start + copies.at) // ratio - common.low
    inside = (chunk >= 0) & (chunk < number)
    change = copies.values - theirs.values[copies.at]
    keys, where = np.unique(
        copies.copy[inside] * number + chunk[inside], return_inverse=True
    )
    sums: np.ndarray = np.zeros(len(keys), np.uint64)
    np.add.at(sums, where, change[inside])
    chunk = keys % number
    sums += common.expected[chunk]
    for check, found in zip(differs, common.found, strict=True):
        np.logical_and.at(check, chunk, found[chunk] != sums)


def _firsts(ascending: np.ndarray) -> np.ndarray:
    """Return the indices at which another number begins."""
    return np.flatnonzero(np.diff(ascending, prepend=-1))


def _differences(
    common: _Common, differs: np.ndarray, ratio: int, per_block: int, end: int
) -> tuple[list[int], list[Difference]]:
    """Return the positions of the consumer's blocks that differ, and samples of them.

    Args:
        common: the chunks that both sides hold.
        differs: bool ``(checks, chunks)``; some chunk does.
        ratio: the consumer's units per chunk.
        per_block: its units per block.
        end: the unit behind the last that was loaded.

    """
    bad = np.flatnonzero(differs.any(axis=0))
    # A chunk may be far longer than the request, because the producer chooses its unit.
    units = (common.low + bad)[:, None] * ratio + np.arange(min(ratio, end))
    blocks = units[units < end] // per_block
    at = _firsts((common.low + bad) * ratio // per_block)
    samples = [
        Difference(
            int(common.low + chunk) * ratio // per_block,
            int(common.expected[chunk]),
            int(common.found[differs[:, chunk].argmax(), chunk]),
        )
        for chunk in bad[at[:MAX_SAMPLES]]
    ]
    return blocks[_firsts(blocks)].tolist(), samples


def _in_blocks(
    common: _Common,
    differs: np.ndarray,
    ratio: int,
    ours: LocalGroup,
    loaded: tuple[int, int],
) -> GroupVerdict:
    """Convert differing chunks to a verdict by blocks of the consumer.

    Args:
        common: the chunks that both sides hold.
        differs: bool ``(checks, chunks)``.
        ratio: the consumer's units per chunk.
        ours: the consumer's sums.
        loaded: the first loaded unit, and the one behind the last.

    """
    per_block, (start, end) = ours.units.per_block, loaded
    positions: list[int] = []
    samples: list[Difference] = []
    if differs.any():
        positions, samples = _differences(common, differs, ratio, per_block, end)
    low = common.low * ratio
    high = min((common.low + len(common.expected)) * ratio, end)
    unverified, detail = None, ""
    if high < end:
        unverified = Unverified.NUM_TOKENS
    elif low > start and not ours.is_window:
        unverified = Unverified.OTHER_BLOCKS
    if unverified is not None:
        size = ours.units.size
        detail = f"tokens {low * size}-{high * size} in common, "
        detail += f"{start * size}-{end * size} loaded"
    first, stop = low // per_block, high // per_block
    if high == end:
        stop = -(-high // per_block)
    elif positions:
        stop = max(stop, positions[-1] + 1)
    verdict = GroupVerdict(
        first,
        max(0, stop - first),
        positions,
        samples,
        unverified,
        partial=low > start,
        detail=detail,
    )
    if positions:
        verdict.bad_checks = frozenset(np.flatnonzero(differs.any(axis=1)).tolist())
    return verdict
