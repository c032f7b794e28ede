# SPDX-License-Identifier: Apache-2.0
"""Comparing what a producer sent with what a consumer holds: pure functions.

*verified* is said only of a load of which every loaded block of every group was
compared and none differed. What cannot be compared is *unverified* with a reason from
a fixed set, never verified.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from .payload import GroupChecksums, KVChecksumPayload


class Unverified(str, Enum):
    """Why a load, or a group of it, could not be compared (fixed set)."""

    NO_PAYLOAD = "no_payload"
    PAYLOAD_VERSION = "payload_version"
    BAD_PAYLOAD = "bad_payload"
    WORKERS_MISSING = "workers_missing"
    OTHER_BLOCKS = "other_blocks"
    ONE_SIDE_ONLY = "one_side_only"
    FINGERPRINT = "fingerprint"
    REPLICA_MISSING = "replica_missing"
    BLOCK_SIZES = "block_sizes"
    UNALIGNED_START = "unaligned_start"
    NOTHING_IN_COMMON = "nothing_in_common"
    NUM_TOKENS = "num_tokens"
    NO_CARRIER = "no_carrier"
    """The connector that loaded it neither carries nor stores checksums."""
    SYNC_LOAD = "sync_load"
    """It was loaded in the step that used it."""
    FROM_DECODE = "from_decode"
    """A decode instance sent it, which sums nothing."""


class LeftOut(str, Enum):
    """Why a group of one request, or a part of it, is not compared (fixed set)."""

    MISSING_BLOCKS = "missing_blocks"
    """Blocks inside the request are missing (a retained window)."""
    TP_SIZES = "tp_sizes"
    """It is not known how TP splits the group, and the TP sizes differ."""
    PARTIAL_BLOCKS = "partial_blocks"
    """The first block of a window holds tokens that had left the producer's; the
    others were compared."""


@dataclass
class LocalGroup:
    """A consumer's whole-model sums of one group.

    Attributes:
        start: position of the first loaded block.
        checks: one uint64 array of shape ``(positions,)`` per replica check.
        is_state: a block holds a state, which is valid for one token count alone.
        is_window: the producer may have given up blocks that it has passed.
    """

    fingerprint: int
    block_size: int
    start: int
    checks: list[np.ndarray]
    is_state: bool = False
    is_window: bool = False


@dataclass
class Difference:
    """One position whose sums differ: producer's and consumer's value."""

    position: int
    expected: int
    found: int


@dataclass
class GroupVerdict:
    """Outcome for one group.

    Attributes:
        first: position of the first block that was compared, on the consumer.
        compared: how many blocks were, from there on.
        positions: those that differ, ascending.
    """

    first: int = 0
    compared: int = 0
    positions: list[int] = field(default_factory=list)
    samples: list[Difference] = field(default_factory=list)
    unverified: Unverified | None = None


@dataclass
class LoadVerdict:
    """Outcome for one load.

    Attributes:
        groups: outcome per group that was to be compared.
        unverified: why the load as a whole was not compared, or None.
        left_out: groups, or parts of them, that stay out of the verdict.
        detail: more about `unverified`, for whoever looks into it.
    """

    groups: dict[int, GroupVerdict] = field(default_factory=dict)
    unverified: Unverified | None = None
    left_out: dict[int, LeftOut] = field(default_factory=dict)
    detail: str = ""

    @property
    def mismatched(self) -> bool:
        return any(group.positions for group in self.groups.values())

    @property
    def reason(self) -> Unverified | None:
        """Why the load is unverified, or None; a mismatch comes before this."""
        if self.unverified is not None:
            return self.unverified
        for group in self.groups.values():
            if group.unverified is not None:
                return group.unverified
            if not group.compared:
                return Unverified.NOTHING_IN_COMMON
        return None if self.groups else Unverified.NOTHING_IN_COMMON

    def first_bad_token(self, first_token: Callable[[int, int], int]) -> int | None:
        """The first token whose KV differs in some group, or None if none does.

        Args:
            first_token: the first token of a block, by group id and position.
        """
        bad = {i: g.positions for i, g in self.groups.items() if g.positions}
        return min((first_token(i, at[0]) for i, at in bad.items()), default=None)

    def good_blocks(self, group_id: int, start: int) -> int:
        """Blocks of a group before the first that differs.

        0 if any before it was loaded and not compared, or none differs.

        Args:
            start: position of the first block that was loaded.
        """
        group = self.groups.get(group_id)
        if group is None or not group.positions or group.first > start:
            return 0
        return group.positions[0]

    @property
    def outcome(self) -> str:
        if self.mismatched:
            return "mismatch"
        return "verified" if self.reason is None else "unverified"

    @property
    def num_compared(self) -> int:
        return sum(group.compared for group in self.groups.values())

    @property
    def num_mismatched(self) -> int:
        return sum(len(group.positions) for group in self.groups.values())


MAX_SAMPLES = 3
"""Differences kept with their values, per group."""


def judge(
    payload: KVChecksumPayload,
    local: dict[int, LocalGroup | Unverified | None],
    num_tokens: int,
) -> LoadVerdict:
    """Compare one load.

    Args:
        payload: what the producer sent.
        local: per KV cache group that this side checksums, what it summed, or
            why it could not, or None if no block of the group was loaded.
        num_tokens: tokens of the request that the load covers.

    A group that neither side checksums is in neither argument and stays out of
    the verdict.
    """
    verdict = LoadVerdict()
    for group_id in sorted({*payload.groups, *local}):
        theirs = payload.groups.get(group_id)
        ours = local.get(group_id)
        if group_id not in local or (theirs is None and ours is not None):
            outcome = GroupVerdict(unverified=Unverified.ONE_SIDE_ONLY)
        elif ours is None:
            continue
        elif isinstance(ours, Unverified):
            outcome = GroupVerdict(unverified=ours)
        else:
            assert theirs is not None
            outcome = compare_group(theirs, payload.num_tokens, ours, num_tokens)
        verdict.groups[group_id] = outcome
    if payload.num_tokens < num_tokens:
        # Part of what was loaded has no checksum.
        verdict.unverified = Unverified.NUM_TOKENS
    return verdict


def compare_group(
    theirs: GroupChecksums, their_tokens: int, ours: LocalGroup, our_tokens: int
) -> GroupVerdict:
    """Compare one group position by position, in chunks of the larger block size.

    A group that does not differ is unverified unless every loaded block was compared,
    but for the first of a window.
    """
    if theirs.fingerprint != ours.fingerprint:
        return GroupVerdict(unverified=Unverified.FINGERPRINT)
    if ours.is_state and their_tokens != our_tokens:
        return GroupVerdict(unverified=Unverified.NUM_TOKENS)
    if ours.is_state and theirs.block_size != ours.block_size:
        return GroupVerdict(unverified=Unverified.BLOCK_SIZES)
    large = max(theirs.block_size, ours.block_size)
    if large % theirs.block_size or large % ours.block_size:
        return GroupVerdict(unverified=Unverified.BLOCK_SIZES)
    if ours.start * ours.block_size % large:
        return GroupVerdict(unverified=Unverified.UNALIGNED_START)
    ratio = large // ours.block_size
    first_t, sums_t = _chunks(
        theirs.start, theirs.values, theirs.block_size, large, their_tokens
    )
    first_o, sums_o = _chunks(
        ours.start, np.stack(ours.checks), ours.block_size, large, our_tokens
    )
    low = max(first_t, first_o)
    high = min(first_t + sums_t.shape[-1], first_o + sums_o.shape[-1])
    # The last chunk counts only if both hold equally many tokens in it.
    if their_tokens != our_tokens:
        high = min(high, min(their_tokens, our_tokens) // large)
    if high <= low:
        return GroupVerdict(unverified=Unverified.NOTHING_IN_COMMON)
    expected = sums_t[low - first_t : high - first_t]
    found = sums_o[:, low - first_o : high - first_o]
    differs = found != expected
    bad = np.flatnonzero(differs.any(axis=0))
    last = -(-our_tokens // ours.block_size)
    unverified = None
    if high * ratio < ours.start + len(ours.checks[0]):
        unverified = Unverified.NUM_TOKENS
    elif low * ratio > ours.start and not ours.is_window:
        unverified = Unverified.OTHER_BLOCKS
    # A chunk may be far longer than the request: the producer names its block size.
    in_chunk = np.arange(min(ratio, last))
    positions = ((low + bad)[:, None] * ratio + in_chunk).ravel()
    samples = [
        Difference(
            int(low + at) * ratio,
            int(expected[at]),
            int(found[differs[:, at].argmax(), at]),
        )
        for at in bad[:MAX_SAMPLES]
    ]
    return GroupVerdict(
        low * ratio,
        min((high - low) * ratio, last - low * ratio),
        positions[positions < last].tolist(),
        samples,
        unverified,
    )


def _chunks(
    start: int, values: np.ndarray, block_size: int, large: int, num_tokens: int
) -> tuple[int, np.ndarray]:
    """Sums of whole chunks of `large` tokens, and the number of the first.

    Blocks are in the last axis of `values`.

    A chunk is kept only if every block of it that holds tokens is in `values`;
    blocks past the last token count as zero. Memory is bounded by `values`.
    """
    ratio = large // block_size
    if ratio == 1:
        return start, values
    first = -(-start // ratio)
    values = values[..., first * ratio - start :]
    number = values.shape[-1]
    whole = number // ratio
    if first * ratio + number >= -(-num_tokens // block_size):
        whole = -(-number // ratio)
    values = values[..., : whole * ratio]
    return first, np.add.reduceat(values, np.arange(whole) * ratio, axis=-1)
