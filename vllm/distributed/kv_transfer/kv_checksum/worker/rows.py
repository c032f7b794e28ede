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

    A block's units follow one another; a unit's number is that in its block plus the
    units of all blocks of lower ids. Blocks follow one another in the request, or each
    has a position of its own. Each group starts at an even column, so that
    reads of it stay 16-byte aligned. A request whose blocks of a group are none has a
    span of no rows.

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
        found = [
            (
                req_id,
                blocks.num_tokens,
                blocks.positions.get(group_id),
                *blocks.groups[group_id],
            )
            for req_id, blocks in work.items()
            if group_id in blocks.groups
        ]
        if not found:
            continue
        req_ids, num_tokens, apart, starts, ids = zip(*found, strict=True)
        per_block = group.units_per_block
        # Without a dtype, an empty list would become an array of floats.
        ids = [np.asarray(i, np.int64) for i in ids]
        lengths = np.array([len(i) for i in ids]) * per_block
        starts = np.array(starts) * per_block
        ends = lengths.cumsum()
        total = int(ends[-1])
        table: np.ndarray = np.zeros((3, total + total % 2), np.int64)
        blocks = np.concatenate(ids)
        if per_block > 1:
            blocks = (blocks[:, None] * per_block + np.arange(per_block)).ravel()
        table[0, :total] = blocks
        position = np.arange(total) - np.repeat(ends - lengths - starts, lengths)
        for end, length, positions in zip(ends, lengths, apart, strict=True):
            if positions is not None:
                units = positions[:, None] * per_block + np.arange(per_block)
                position[end - length : end] = units.ravel()
        if (context := group.context).size > 1:
            # The block at position p holds tokens of the instance's block at p * size
            # + rank, if that is as large.
            position += position // per_block * ((context.size - 1) * per_block)
            position += context.rank * per_block
        first = np.multiply(position, group.unit_size, out=table[1, :total])
        valid = np.repeat(num_tokens, lengths) - first
        np.clip(valid, 0, group.unit_size, out=table[2, :total])
        tables.append(table)
        if total:
            segments.append((group, slice(at, at + total)))
        begins = (at + ends - lengths).tolist()
        parts += [
            RowSpan(req_id, group, start, slice(begin, begin + length))
            for req_id, start, begin, length in zip(
                req_ids, starts.tolist(), begins, lengths.tolist(), strict=True
            )
        ]
        at += table.shape[1]
    rows = np.concatenate(tables, axis=1) if tables else np.zeros((3, 0), np.int64)
    return rows, segments, parts


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
