# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build the rows of one step: the units to sum, for all requests at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.checksum import KVChecksumBlocks
from vllm.distributed.kv_transfer.kv_checksum.stored import (
    BlockRun,
    block_checksum_tags,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import GroupView


@dataclass
class RowSpan:
    """The rows of the copied buffer that hold one request's sums of one group.

    Attributes:
        req_id: the request.
        group: the group that is summed.
        start: number of the first unit in the request.
        rows: the units' rows, one each.
        stored: whether the buffer's last column holds the block checksums that were
            stored with the units' blocks.

    """

    req_id: str
    group: GroupView
    start: int
    rows: slice
    stored: bool = False


def build_rows(
    groups: Mapping[int, GroupView], work: Mapping[str, KVChecksumBlocks]
) -> tuple[np.ndarray, list[tuple[GroupView, slice]], list[RowSpan]]:
    """Build the rows of all groups, as `SumRows` takes them.

    Each group starts at an even column, so that reads of it stay 16-byte aligned. A
    request whose blocks of a group are none has a span of no rows.

    Args:
        groups: the groups that are summed here, by id.
        work: the blocks to sum, by request id.

    Returns:
        Rows, int64 ``(3, n)``: unit, first token, valid tokens; the columns of each
        group; and those of each group and request.

    """
    tables: list[np.ndarray] = []
    segments: list[tuple[GroupView, slice]] = []
    parts: list[RowSpan] = []
    at = 0
    for group_id, group in groups.items():
        found = {r: b for r, b in work.items() if group_id in b.groups}
        if not found:
            continue
        build = _block_rows if group.ring is None else _ring_rows
        rows, starts, lengths = build(group, found)
        total = rows.shape[1]
        tables.append(rows)
        if total % 2:
            tables.append(np.zeros((3, 1), np.int64))
        if total:
            segments.append((group, slice(at, at + total)))
        begins = (at + lengths.cumsum() - lengths).tolist()
        parts += [
            RowSpan(req_id, group, start, slice(begin, begin + length))
            for req_id, start, begin, length in zip(
                found, starts.tolist(), begins, lengths.tolist(), strict=True
            )
        ]
        at += total + total % 2
    if len(tables) == 1:
        return tables[0], segments, parts
    rows = np.concatenate(tables, axis=1) if tables else np.zeros((3, 0), np.int64)
    return rows, segments, parts


def _block_rows(
    group: GroupView, work: Mapping[str, KVChecksumBlocks]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Build the rows of one group.

    A block's units follow one another; a unit's number is that in its block plus the
    units of all blocks of lower ids. Blocks follow one another in the request, or each
    has a position of its own.

    Returns:
        Rows as `build_rows` does; per request, the number of its first unit, and that
        of its rows.

    """
    per_block = group.units_per_block
    asked = [blocks.groups[group.group_id] for blocks in work.values()]
    # Without a dtype, an empty list would become an array of floats.
    ids = [np.asarray(i, np.int64) for _, i in asked]
    lengths = np.array([len(i) for i in ids]) * per_block
    starts = np.array([start for start, _ in asked]) * per_block
    ends = lengths.cumsum()
    total = int(ends[-1])
    rows: np.ndarray = np.empty((3, total), np.int64)
    blocks: np.ndarray = np.concatenate(ids)
    units = np.arange(per_block)
    np.add(blocks[:, None] * per_block, units, out=rows[0].reshape(-1, per_block))
    position = np.arange(total) - (ends - lengths - starts).repeat(lengths)
    for end, length, of in zip(ends, lengths, work.values(), strict=True):
        positions = of.positions.get(group.group_id)
        if positions is not None:
            of_blocks = positions[:, None] * per_block + units
            position[end - length : end] = of_blocks.ravel()
    if (context := group.context).size > 1:
        # The block at position p holds the tokens of one rank's block p * size + rank.
        position += position // per_block * ((context.size - 1) * per_block)
        position += context.rank * per_block
    first = np.multiply(position, group.unit_size, out=rows[1])
    num_tokens = np.array([of.num_tokens for of in work.values()])
    valid = np.subtract(num_tokens.repeat(lengths), first, out=rows[2])
    np.minimum(np.maximum(valid, 0, out=valid), group.unit_size, out=valid)
    return rows, starts, lengths


def _ring_rows(
    group: GroupView, work: Mapping[str, KVChecksumBlocks]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Build the rows of a group of rings: one for each token that counts.

    A request has one block of it at most. Their sums are added up to one.

    Returns:
        See `_block_rows`.

    """
    assert group.ring is not None
    slots = group.ring.slots
    ids = [of.groups[group.group_id][1][-1:] for of in work.values()]
    held = np.array([len(found) for found in ids])
    first, lengths = group.ring.counted(
        np.array([of.num_tokens for of in work.values()])
    )
    lengths *= held
    ends = lengths.cumsum()
    position = np.arange(int(ends[-1])) - np.repeat(ends - lengths - first, lengths)
    block = np.zeros_like(lengths)
    block[held > 0] = np.concatenate([np.asarray(i, np.int64) for i in ids])
    rows: np.ndarray = np.ones((3, len(position)), np.int64)
    rows[0] = np.repeat(block, lengths) * slots + position % slots
    rows[1] = position
    return rows, np.zeros_like(lengths), lengths


def block_checksum_rows(
    runs: Sequence[BlockRun], parts: Sequence[RowSpan], num_rows: int
) -> tuple[np.ndarray, int]:
    """Build the rows that turn the runs' sums into block checksums.

    Args:
        runs: the blocks whose block checksums are filled in.
        parts: the rows of each run's units; the request id is the run's number.
        num_rows: the number of rows that are summed, padding included.

    Returns:
        Rows, int64 ``(3, num_rows)``: per unit the number of its block checksum (where
        there is no unit, one past the last); per block checksum its block id, and its
        tag. And the number of block checksums.

    """
    number = sum(len(run.block_ids) for run in runs)
    rows: np.ndarray = np.full((3, num_rows), number, np.int64)
    at = 0
    for part in parts:
        run = runs[int(part.req_id)]
        checksums = slice(at, at + len(run.block_ids))
        units = rows[0, part.rows].reshape(-1, part.group.units_per_block)
        units[:] = np.arange(checksums.start, checksums.stop)[:, None]
        rows[1, checksums] = run.block_ids
        tags = block_checksum_tags(run.block_hashes, part.group.fingerprint)
        rows[2, checksums] = tags.view(np.int64)
        at = checksums.stop
    return rows, number
