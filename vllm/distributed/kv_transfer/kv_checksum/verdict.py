# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Describe the outcome of comparing a load.

A load is *verified* only if every loaded block of every group was compared and none
differed. A load that cannot be compared is *unverified* with a reason from a fixed
set, never verified.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class Unverified(str, Enum):
    """Reasons for which a load, or a group of it, was not compared (fixed set)."""

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
    INPUTS = "inputs"
    """The two sides name other multi-modal inputs, or another LoRA adapter."""
    NO_CARRIER = "no_carrier"
    """The connector that loaded it neither carries nor stores checksums."""
    SYNC_LOAD = "sync_load"
    """It was loaded in the step that used it."""
    FROM_DECODE = "from_decode"
    """A decode instance sent it, and its connector carries nothing back."""
    NOT_IN_LEDGER = "not_in_ledger"
    """This instance does not know, or not any more, what the KV must be."""
    QUARANTINED = "quarantined"
    """It was not loaded, as KV from that engine differed again and again."""


class LeftOut(str, Enum):
    """Reasons for which a group of one request, or a part of it, is not compared.

    The set is fixed.
    """

    MISSING_BLOCKS = "missing_blocks"
    """Blocks inside the request are missing (a retained window)."""
    TP_SIZES = "tp_sizes"
    """It is not known how TP splits the group, and the TP sizes differ."""
    PARTIAL_BLOCKS = "partial_blocks"
    """The first block of a window holds tokens that had left the producer's; the
    others were compared."""
    STATES = "states"
    """The ledger remembers no states (Mamba), and no tier brings rings back."""


@dataclass
class Difference:
    """A block that differs: both sides' values (uint64) of its first unit that does.

    `position` is the consumer's block position in the request.
    """

    position: int
    expected: int
    found: int


@dataclass(slots=True)
class GroupVerdict:
    """Outcome of comparing one group.

    Attributes:
        first: position of the first block that was compared, on the consumer.
        compared: number of blocks that were compared, from there on.
        positions: positions of the blocks that differ, ascending.
        samples: the first differences, at most `MAX_SAMPLES`.
        unverified: why the group was not compared in full, or None.
        partial: the first tokens of `first`, or whole blocks before it, were loaded
            and not compared.
        detail: the numbers that do not fit, if the group is unverified.
        unknown: positions of blocks whose sums this instance does not know.
        bad_checks: the checks in which some block differs, where there are several.
        ranks: PP and TP ranks of the workers that alone hold what differs; none if that
            cannot be told.
        completed: positions of blocks that were loaded in part and completed here,
            with other bits than are known.

    """

    first: int = 0
    compared: int = 0
    positions: list[int] = field(default_factory=list)
    samples: list[Difference] = field(default_factory=list)
    unverified: Unverified | None = None
    partial: bool = False
    detail: str = ""
    unknown: list[int] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    bad_checks: frozenset[int] = frozenset()
    ranks: tuple[tuple[int, int], ...] = ()


@dataclass
class LoadVerdict:
    """Outcome of comparing one load.

    Attributes:
        groups: outcome per group that was to be compared.
        unverified: why the load as a whole was not compared, or None.
        left_out: groups, or parts of them, that stay out of the verdict.
        detail: more about `unverified`, for whoever looks into it.
        other_prompt: all of it is KV of another prompt, whatever the sums are.
        unbound: it is not known of which prompt it is.

    """

    groups: dict[int, GroupVerdict] = field(default_factory=dict)
    unverified: Unverified | None = None
    left_out: dict[int, LeftOut] = field(default_factory=dict)
    detail: str = ""
    other_prompt: bool = False
    unbound: bool = False

    @property
    def mismatched(self) -> bool:
        return self.other_prompt or any(g.positions for g in self.groups.values())

    @property
    def reason(self) -> Unverified | None:
        """Return why the load is unverified, or None. A mismatch comes before this."""
        if self.unverified is not None:
            return self.unverified
        for group in self.groups.values():
            if group.unverified is not None:
                return group.unverified
            if not group.compared:
                return Unverified.NOTHING_IN_COMMON
        return None if self.groups else Unverified.NOTHING_IN_COMMON

    @property
    def explanation(self) -> str:
        """Return the numbers that `reason` rests on, in one short line."""
        if self.unverified is not None:
            return self.detail
        for group_id, group in self.groups.items():
            if group.unverified is not None:
                return f"group {group_id}: {group.detail}"
        return f"groups {sorted(self.groups)}"

    def first_bad_token(self, first_token: Callable[[int, int], int]) -> int | None:
        """Return the first token whose KV differs in some group, or None.

        Args:
            first_token: returns the first token of a block, given the KV cache group
                id and the block's position.

        """
        bad = {i: g.positions for i, g in self.groups.items() if g.positions}
        return min((first_token(i, at[0]) for i, at in bad.items()), default=None)

    def good_blocks(self, group_id: int) -> int:
        """Return the number of a group's blocks before the first that differs.

        Return 0 if any before it was loaded and not compared, or none differs.
        """
        group = self.groups.get(group_id)
        if group is None or not group.positions or group.partial:
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
    def num_unknown(self) -> int:
        return sum(len(group.unknown) for group in self.groups.values())

    @property
    def num_mismatched(self) -> int:
        return sum(len(group.positions) for group in self.groups.values())


MAX_SAMPLES = 3
"""Differences kept with their values, per group."""
