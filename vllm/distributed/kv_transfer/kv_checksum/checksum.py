# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Define the KV checksum, and the records in which partial sums travel.

Protected: every byte of the K and V cells of a request's tokens, and the
place (layer, KV head, token position) of every piece of them. Not protected:
slots past ``num_tokens``, padding, and scales kept outside the cache. It finds
corruption and misplacement; it is no cryptographic hash. The design document
(docs/design/kv_checksum.md) gives the reasons for each step of the definition.

The value of some tokens is the sum, mod 2**64, of ``term(x, w)`` over their pieces
``x``, with ``w = m * (2*j + 1)``, ``j`` the piece's number in the request
(``token * pieces_per_token + piece``) and ``m`` the factor of its layer and
head. Weights are odd and every step of the term is a bijection of ``x``, so a
change of any one piece always shows. Values of consecutive tokens add up, so they
are summed, sent and compared in *units* of a block (`unit_size`), which fit
together whatever the block sizes of the two sides are.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

DEFINITION = 2
"""Version of the definition. Values of different definitions cannot be compared."""

MAX_KV_HEADS_PER_LAYER = 2**16
"""KV heads that one layer may have, over all of its caches together."""

GOLDEN_FACTOR = 0x9E3779B97F4A7C15
"""2**64 / golden ratio, odd: gives small layer and head numbers large weights."""

FOLD_FACTOR = 0x9E3779B1
"""2**32 / golden ratio, odd: the last fold of a term multiplies by it, so that its
changes do not add up evenly even where pieces have few bits set."""

MASK64 = 2**64 - 1

UNIT_TOKENS = 16
"""Tokens of a unit, where the block size is a multiple of it."""

STATE_BLOCK_SIZE = 1
"""A block that holds a state (Mamba) counts as the request's first token alone."""

_RING_SPEC = "CircularBufferSpec"
"""By name, because vLLM 0.32.0 has no such class."""

ReplicaKey = tuple[int, int]
"""(number of TP ranks that hold the same heads, which of them this one is)."""


class Skipped(str, Enum):
    """Categories of reasons for which a KV cache group is not summed (fixed set).

    A worker's reason is one of these, a colon, and what exactly it found.
    """

    SPEC_CLASS = "spec_class"
    """Blocks that are not numbered by token position, or a class not known."""
    COMPRESSED = "compressed"
    PACKED_HEADS = "packed_heads"
    PACKED_CELLS = "packed_cells"
    """A token's bytes are packed in a format that is not known."""
    HOST_RESIDENT = "host_resident"
    STATES_AND_TOKENS = "states_and_tokens"
    RINGS = "rings"
    """Layers of one group keep rings that differ."""
    STATE_SPLIT = "state_split"
    REPLICAS = "replicas"
    """It is not known how many ranks hold the same heads."""
    TOO_MANY_HEADS = "too_many_heads"
    LAYER_NAMES = "layer_names"
    BACKEND = "backend"
    """The order in which the attention backend keeps tokens is not known."""
    NO_CACHE = "no_cache"
    """The group names a layer that has no cache on this worker."""
    MEMORY_LAYOUT = "memory_layout"
    OTHER = "other"

    @classmethod
    def of(cls, reason: str) -> "Skipped":
        """Return the category with which a worker's reason begins, or `OTHER`."""
        category = reason.partition(":")[0]
        return cls(category) if category in set(cls) else cls.OTHER


def slice_factor(layer: int, head: int) -> int:
    """Compute the odd 64-bit factor ``m`` of one layer and global KV head."""
    return GOLDEN_FACTOR * (2 * (layer * MAX_KV_HEADS_PER_LAYER + head) + 1) & MASK64


def unit_size(block_size: int) -> int:
    """Return the tokens of a unit: the part of a block that has a sum of its own."""
    return block_size if block_size % UNIT_TOKENS else UNIT_TOKENS


def is_ring_spec(spec: object) -> bool:
    """Tell whether blocks of this spec hold rings: a request's last tokens."""
    return type(spec).__name__ == _RING_SPEC


def checksum_terms(pieces: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute the terms of uint64 `pieces` under odd uint64 `weights`.

    Both are broadcast together; the result is uint64. With ``x`` a piece and ``w``
    its weight, ``term(x, w) = y ^ low32(t ^ (t >> 32))`` where
    ``y = (x ^ (x >> 33)) * w`` and ``t = (y >> 32) * FOLD_FACTOR``.
    """
    mixed = (pieces ^ (pieces >> np.uint64(33))) * weights
    folded = (mixed >> np.uint64(32)) * np.uint64(FOLD_FACTOR)
    return mixed ^ ((folded ^ (folded >> np.uint64(32))) & np.uint64(2**32 - 1))


@dataclass
class KVChecksumBlocks:
    """The blocks of one request that workers sum.

    Attributes:
        num_tokens: tokens of the request that count; slots past them are left out.
        groups: per KV cache group id, the position of the first block in the
            request and the ids of that block and the following ones.
        seq: number of the send or load; workers echo it so that sums of a step
            that was rolled back are told from those of its repetition, and those
            of a request that ended from those of the next one of its id.
        stored: a load whose blocks bring stored checksums back, which workers
            report beside their sums.
        positions: per KV cache group id, the positions of all blocks (int64), where
            they do not follow one another; `groups` then gives 0 for the first.

    """

    num_tokens: int
    groups: dict[int, tuple[int, np.ndarray | list[int]]]
    seq: int = 0
    stored: bool = False
    positions: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass
class KVChecksumScheduled:
    """The blocks that one step asks workers to sum, by request id.

    `reqs_to_send` are summed in this step; `reqs_to_recv` (loads from another
    instance) and `reqs_to_load` (loads from an offload tier) in the step that
    reports their load finished. `sync_loads` end with this step itself and are summed
    in it, after the forward; those without groups are not. `full_blocks` are of any
    requests, by made-up names: summed after the forward as well.
    """

    reqs_to_send: dict[str, KVChecksumBlocks] = field(default_factory=dict)
    reqs_to_recv: dict[str, KVChecksumBlocks] = field(default_factory=dict)
    reqs_to_load: dict[str, KVChecksumBlocks] = field(default_factory=dict)
    sync_loads: dict[str, KVChecksumBlocks] = field(default_factory=dict)
    full_blocks: dict[str, KVChecksumBlocks] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.reqs_to_send
            or self.reqs_to_recv
            or self.reqs_to_load
            or self.sync_loads
            or self.full_blocks
        )


@dataclass
class KVChecksumGroup:
    """One worker's partial sums for one request and KV cache group.

    Attributes:
        start: number of the first unit in the request; 0 if the blocks do not follow
            one another.
        replica_keys: the replica key of each column of `values`.
        values: uint64, shape ``(units, len(replica_keys))``.

    """

    start: int
    replica_keys: tuple[ReplicaKey, ...]
    values: np.ndarray


@dataclass
class KVChecksumRecord:
    """The report of one worker for one step.

    Every request that the worker processed is in `checksums`, with no groups if
    none of its layers are here, so that the scheduler can count reports.

    Attributes:
        checksums: per request id, per KV cache group id.
        skipped_groups: groups with layers here that are not summed; reason by id,
            which begins with a `Skipped` category.
        equal_tp_groups: groups whose sums can be compared only with those of an
            instance of equal TP size.
        fingerprints: per group id, the sum mod 2**64 of the hashes of its layers.
        num_tokens: per request id, the token count that the sums cover.
        seqs: per request id, the number of the send or load.
        received: per request id, the payload that the worker's connector received.
        stored: per request id and group id, the stored checksums that came with
            the loaded blocks: uint64, shape ``(blocks,)``.

    """

    pp_rank: int
    tp_rank: int
    checksums: dict[str, dict[int, KVChecksumGroup]]
    skipped_groups: dict[int, str] = field(default_factory=dict)
    equal_tp_groups: frozenset[int] = frozenset()
    fingerprints: dict[int, int] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    seqs: dict[str, int] = field(default_factory=dict)
    received: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)


def add_records(
    records: Iterable[KVChecksumRecord], req_id: str, group_id: int
) -> dict[ReplicaKey, KVChecksumGroup]:
    """Add the workers' parts of one request and group, per replica key.

    Raises:
        ValueError: two workers summed different blocks.

    """
    total: dict[ReplicaKey, KVChecksumGroup] = {}
    for record in records:
        part = record.checksums.get(req_id, {}).get(group_id)
        if part is None:
            continue
        for column, key in enumerate(part.replica_keys):
            values = part.values[:, column]
            have = total.get(key)
            if have is None:
                total[key] = KVChecksumGroup(part.start, (key,), values.copy())
            elif have.start != part.start or have.values.shape != values.shape:
                raise ValueError(f"workers summed different blocks of group {group_id}")
            else:
                have.values += values
    return total


def replica_checks(parts: dict[ReplicaKey, KVChecksumGroup]) -> list[np.ndarray]:
    """Add parts keyed by replica to whole-model sums, one array per check.

    Check ``k`` adds copy ``k % R`` of the layers that ``R`` ranks replicate, so
    each check covers every layer once and every copy is in some check.

    Returns:
        As many uint64 arrays of shape ``(units,)`` as the most replicated layer has
        copies.

    Raises:
        ValueError: a replica is missing, or parts cover different blocks.

    """
    sizes = sorted({replicas for replicas, _ in parts})
    if not sizes:
        raise ValueError("no worker summed this group")
    if len({(p.start, len(p.values)) for p in parts.values()}) != 1:
        raise ValueError("workers summed different blocks")
    checks = []
    for k in range(max(sizes)):
        copies = [parts.get((replicas, k % replicas)) for replicas in sizes]
        if any(copy is None for copy in copies):
            raise ValueError("a replica is missing")
        checks.append(
            np.add.reduce([c.values for c in copies if c is not None], dtype=np.uint64)
        )
    return checks
