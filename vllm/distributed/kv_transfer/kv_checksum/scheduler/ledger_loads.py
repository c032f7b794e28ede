# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Enter the sums of the blocks that this instance computes, and judge loads by them.

Where a connector brings back KV without checksums, the instance knows what it must be:
it computed it. The block pool tells which blocks become full in a step (`note`);
workers sum them in that step, like a send, and their sums are entered in the ledger
under the blocks' hashes. Blocks that were loaded are entered only once they are
verified.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumBlocks,
    replica_checks,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import (
    holds_states,
    units_of_group,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.denied import DeniedBlocks
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger import (
    KnownSums,
    Ledger,
    ledger_keys,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import (
    NotComparable,
    PendingLoad,
    PendingSend,
)
from vllm.distributed.kv_transfer.kv_checksum.stored import hashes_of_blocks
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    MAX_SAMPLES,
    Difference,
    GroupVerdict,
    LoadVerdict,
    Unverified,
)
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_NULL_BLOCK = 0

_id_of = attrgetter("block_id")

_ALL_TOKENS = 2**62
"""More tokens than any request has: all slots of full blocks count."""

_ENTERED_PER_STEP = 1024
"""Sums that a step enters at least, where so many wait; it takes about 0.2 ms."""

FULL_BLOCKS = "\0full blocks"
"""The name under which workers report blocks that became full; no request has it."""


@dataclass
class FullBlocks(PendingSend):
    """Blocks that became full in one step, while workers sum them.

    Attributes:
        hashes: the blocks' hashes, by KV cache group.

    """

    hashes: dict[int, list[BlockHash]] = field(default_factory=dict)


@dataclass
class _Waiting:
    """Sums that are to be entered, some of them per step.

    Attributes:
        group_id: their KV cache group.
        hashes: the blocks' hashes.
        sums: their sums, one array per replica check.
        seq: the number under which they were asked for.
        entered: how many are entered already.

    """

    group_id: int
    hashes: list[BlockHash]
    sums: list[np.ndarray]
    seq: int
    entered: int = 0


@dataclass
class _Run:
    """The blocks of one group that became full in a step."""

    ids: list[np.ndarray] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)

    def add(
        self, blocks: Sequence[KVCacheBlock], hashes: Sequence[BlockHash], start: int
    ) -> None:
        # A list of numbers takes as long again to become an array.
        self.ids.append(np.fromiter(map(_id_of, blocks), np.int64, len(blocks)))
        self.hashes += hashes
        self.positions.append(np.arange(start, start + len(blocks)))


class LedgerLoads:
    """Keeps the ledger of one instance, and judges its loads by it.

    Args:
        ledger: the table of sums.
        kv_cache_config: the KV cache groups.
        hash_block_size: tokens per block hash of a request.
        num_workers: number of workers that must report.

    """

    def __init__(
        self,
        ledger: Ledger,
        kv_cache_config: KVCacheConfig,
        hash_block_size: int,
        num_workers: int,
    ) -> None:
        self.ledger = ledger
        self.denied = DeniedBlocks()
        self._told = 0
        self._num_workers = num_workers
        self._kv_cache_config = kv_cache_config
        self._hash_block_size = hash_block_size
        groups = kv_cache_config.kv_cache_groups
        # States are left out: their blocks were not seen come back from a tier. What
        # is never cached by prefix does not, and request hashes need not divide it.
        self._block_sizes: dict[int, int] = {
            i: groups[i].kv_cache_spec.block_size
            for i in kv_cache_config.prefix_cacheable_group_ids
            if not holds_states(kv_cache_config, i)
        }
        self._notes: list[tuple[Request, int, list[KVCacheBlock], int, int]] = []
        self._rewritten: list[tuple[Request, int, KVCacheBlock, int]] = []
        self._pending: dict[int, FullBlocks] = {}
        self._waiting: deque[_Waiting] = deque()
        # Tokens that were loaded, by request; their blocks are not computed here.
        self._loaded: dict[str, tuple[int, bool]] = {}

    # ---- which blocks become full

    def note(
        self,
        request: Request,
        group_id: int,
        blocks: list[KVCacheBlock],
        start: int,
        stop: int,
    ) -> None:
        """Note that a request's blocks ``[start, stop)`` of a group have become full.

        The block pool calls this for those that it caches.

        Args:
            request: the scheduler's request.
            group_id: the KV cache group.
            blocks: all blocks of the request, of that group.
            start: position of the first of them.
            stop: position behind the last.

        """
        self._notes.append((request, group_id, blocks, start, stop))

    def note_rewritten(
        self, request: Request, rows: Sequence[Sequence[KVCacheBlock]], num_tokens: int
    ) -> None:
        """Note that a step computes the last of a request's loaded tokens again.

        Its bits may be others, in a block that was verified.

        Args:
            request: the scheduler's request.
            rows: its blocks, by KV cache group.
            num_tokens: the number of tokens that were loaded: its last block is full.

        """
        for group_id, size in self._block_sizes.items():
            at = num_tokens // size - 1
            if num_tokens % size == 0:
                self._rewritten.append((request, group_id, rows[group_id][at], at))

    def set_loaded(self, req_id: str, num_tokens: int, is_sync: bool = False) -> None:
        """Take a request's first tokens as loaded: their blocks are not entered."""
        self._loaded[req_id] = num_tokens, is_sync

    def forget(self, req_id: str) -> None:
        """Drop what is known of a request that ended or gave up its blocks."""
        self._loaded.pop(req_id, None)

    def take_full_blocks(
        self, scheduled: Container[str], seq: int
    ) -> KVChecksumBlocks | None:
        """Return the blocks that have become full, for workers to sum in this step.

        Args:
            scheduled: ids of the requests that the step computes.
            seq: the number under which workers report.

        """
        notes, self._notes = self._notes, []
        runs: dict[int, _Run] = {}
        for request, group_id, blocks, start, stop in notes:
            size = self._block_sizes.get(group_id)
            if size is None:
                continue
            loaded, is_sync = self._loaded.get(request.request_id, (0, False))
            if loaded:
                at = loaded // size
                if loaded % size and start <= at < stop and not is_sync:
                    # Completed here, on top of tokens that nobody compared.
                    keys = self.keys_at(request, group_id, at, at + 1)
                    self.ledger.mark_other_sums(keys)
                start = max(start, -(-loaded // size))
            hashes = hashes_of_blocks(
                request.block_hashes, size // self._hash_block_size, start, stop
            )
            run = runs.setdefault(group_id, _Run())
            if request.request_id in scheduled:
                run.add(blocks[start : start + len(hashes)], hashes, start)
                continue
            # The request may have ended, and its blocks may be another's by now.
            for at, (block, block_hash) in enumerate(
                zip(blocks[start:stop], hashes, strict=False), start
            ):
                key = make_block_hash_with_group_id(block_hash, group_id)
                if block.block_hash == key:
                    run.add([block], [block_hash], at)
        rewritten, self._rewritten = self._rewritten, []
        for request, group_id, block, at in rewritten:
            scale = self._block_sizes[group_id] // self._hash_block_size
            hashes = hashes_of_blocks(request.block_hashes, scale, at, at + 1)
            runs.setdefault(group_id, _Run()).add([block], hashes, at)
        full = FullBlocks(FULL_BLOCKS, KVChecksumBlocks(_ALL_TOKENS, {}, seq))
        for group_id, run in runs.items():
            ids = np.concatenate([np.zeros(0, np.int64), *run.ids])
            live = ids != _NULL_BLOCK
            if not live.any():
                continue
            positions = np.concatenate(run.positions)[live]
            full.blocks.groups[group_id] = (0, ids[live])
            full.blocks.positions[group_id] = positions
            full.hashes[group_id] = run.hashes
            if not live.all():
                full.hashes[group_id] = list(compress(run.hashes, live))
        if not full.hashes:
            return None
        self._pending[seq] = full
        return full.blocks

    # ---- entering

    def pending(self) -> Sequence[FullBlocks]:
        """Return what workers were asked to sum and have not reported yet."""
        return list(self._pending.values())

    def enter_reported(self) -> None:
        """Take the sums that all workers have reported, and enter some of them.

        Steps report in their order, so what was asked for before is lost. How much is
        entered is bounded, so that a step which fills many blocks does not wait for it.
        """
        reported = [seq for seq, full in self._pending.items() if full.records]
        for seq in [seq for seq in self._pending if reported and seq <= reported[-1]]:
            self._take(self._pending.pop(seq))
        if self._waiting:
            self._enter_waiting(max(_ENTERED_PER_STEP, self.num_waiting // 8))

    def _take(self, full: FullBlocks) -> None:
        try:
            full.check_reports(self._num_workers)
            skipped = full.skipped()
            for group_id, hashes in full.hashes.items():
                if group_id not in skipped:
                    sums = self._block_sums(full, group_id)
                    waiting = _Waiting(group_id, hashes, sums, full.blocks.seq)
                    self._waiting.append(waiting)
        except NotComparable:
            return

    @property
    def num_waiting(self) -> int:
        return sum(len(w.hashes) - w.entered for w in self._waiting)

    def _enter_waiting(self, most: int = _ALL_TOKENS) -> None:
        """Enter sums that wait, the first ones first; all of them by default."""
        while self._waiting and most > 0:
            first = self._waiting[0]
            part = slice(first.entered, first.entered + most)
            keys = ledger_keys(first.hashes[part], first.group_id)
            self._enter_sums(keys, [s[part] for s in first.sums], first.seq)
            first.entered += len(keys)
            most -= len(keys)
            if first.entered == len(first.hashes):
                self._waiting.popleft()

    def _known(self, keys: np.ndarray) -> KnownSums:
        """Look up keys, when all sums that were reported are entered."""
        self._enter_waiting()
        return self.ledger.known(keys)

    def _enter_sums(self, keys: np.ndarray, sums: list[np.ndarray], seq: int) -> None:
        if self.denied:
            good = ~self.denied.rest_on_bad(keys, seq)
            keys, sums = keys[good], [s[good] for s in sums]
            self.denied.allow_known(keys)
        # Copies of one block that differ between TP ranks are each right.
        for one in sums:
            self.ledger.enter(keys, one)

    def enter_load(self, load: PendingLoad) -> None:
        """Enter the full blocks of a load that was verified."""
        skipped = load.skipped()
        for group_id in load.blocks.groups:
            if group_id in skipped:
                continue
            keys = self._keys_of_full(load, group_id)
            sums = [s[: len(keys)] for s in self._block_sums(load, group_id)]
            self._enter_sums(keys, sums, load.blocks.seq)

    def _block_sums(self, send: PendingSend, group_id: int) -> list[np.ndarray]:
        """Add up the workers' sums by the block, uint64, one array per replica check.

        Raises:
            NotComparable: the sums are of other blocks, or a replica is missing.

        """
        per_block = units_of_group(self._kv_cache_config, group_id).per_block
        try:
            checks = replica_checks(send.parts(group_id, per_block))
        except ValueError as error:
            raise NotComparable(Unverified.REPLICA_MISSING, str(error)) from None
        return [c.reshape(-1, per_block).sum(axis=1, dtype=np.uint64) for c in checks]

    # ---- judging

    def judge(self, load: PendingLoad) -> LoadVerdict:
        """Compare a load with the sums of the same blocks that the ledger holds."""
        try:
            load.check_reports(self._num_workers)
        except NotComparable as error:
            return LoadVerdict(unverified=error.reason, detail=error.detail)
        verdict, skipped = LoadVerdict(), load.skipped()
        for group_id in load.blocks.groups:
            if group_id in skipped:
                continue
            try:
                group = self._judge_group(load, group_id)
            except NotComparable as error:
                group = GroupVerdict(unverified=error.reason, detail=error.detail)
            verdict.groups[group_id] = group
        return verdict

    def _judge_group(self, load: PendingLoad, group_id: int) -> GroupVerdict:
        checks = self._block_sums(load, group_id)
        positions = self._positions(load, group_id)
        keys = self._keys_of_full(load, group_id)
        number = len(keys)
        known = self._known(keys)
        equal = np.logical_and.reduce([known.equal(c[:number]) for c in checks])
        unknown = (known.number == 0) | (known.dropped & ~equal)
        bad = ~equal & ~unknown
        # A block that is loaded in part was completed here, maybe with other bits.
        ends: np.ndarray = (positions[:number] + 1) * self._block_sizes[group_id]
        mixed = bad & (ends > load.num_tokens)
        bad &= ~mixed
        misses = int(unknown.sum())
        reason, detail = None, ""
        if misses:
            reason = Unverified.NOT_IN_LEDGER
            at = positions[np.flatnonzero(unknown)[0]]
            detail = f"{misses} of {len(positions)} blocks, the first at position {at}"
        elif mixed.any() or number < len(positions):
            reason = Unverified.NUM_TOKENS
            detail = f"{load.num_tokens} tokens loaded end inside a block"
        return GroupVerdict(
            int(positions[0]),
            number - misses - int(mixed.sum()),
            positions[:number][bad].tolist(),
            _samples(positions, bad, known, checks),
            reason,
            detail=detail,
            unknown=positions[:number][unknown].tolist(),
            completed=positions[:number][mixed].tolist(),
        )

    def keys_at(
        self, request: Request, group_id: int, start: int, stop: int | None = None
    ) -> np.ndarray:
        """Return the keys of a request's blocks from `start` on that have hashes."""
        return self._keys(request.block_hashes, group_id, start, stop)

    def _keys(
        self,
        block_hashes: Sequence[BlockHash],
        group_id: int,
        start: int = 0,
        stop: int | None = None,
    ) -> np.ndarray:
        scale = self._block_sizes[group_id] // self._hash_block_size
        if stop is None:
            stop = len(block_hashes) // scale
        return ledger_keys(hashes_of_blocks(block_hashes, scale, start, stop), group_id)

    def _positions(self, load: PendingLoad, group_id: int) -> np.ndarray:
        """Return the positions of a load's blocks in the request, int64, ascending."""
        start, ids = load.blocks.groups[group_id]
        apart = load.blocks.positions.get(group_id)
        return np.arange(start, start + len(ids)) if apart is None else apart

    def _keys_of_full(self, load: PendingLoad, group_id: int) -> np.ndarray:
        """Return the keys of a load's first blocks, all slots of which were summed."""
        positions = self._positions(load, group_id)
        size, tokens = self._block_sizes[group_id], load.blocks.num_tokens
        full = positions[(positions + 1) * size <= tokens]
        if not full.size:
            return np.zeros(0, np.uint64)
        first, last = int(full[0]), int(full[-1])
        keys = self._keys(load.block_hashes, group_id, first, last + 1)
        return keys[(full - first)[: np.searchsorted(full - first, len(keys))]]

    # ---- denying

    def deny(self, load: PendingLoad, verdict: LoadVerdict, seq: int) -> None:
        """Keep the blocks of a load that differ from being loaded again.

        Args:
            load: the load, by the ledger.
            verdict: its verdict.
            seq: a number above those of all sums that workers were asked for.

        """
        for group_id, group in verdict.groups.items():
            if group.positions:
                keys = self._keys(load.block_hashes, group_id)
                self.denied.deny_bad(keys[group.positions], seq)

    def deny_from(self, request: Request, first_token: int, seq: int) -> None:
        """Keep what a request holds from a token on from being loaded: it is bad."""
        for group_id, size in self._block_sizes.items():
            keys = self.keys_at(request, group_id, first_token // size)
            self.denied.deny_bad(keys, seq)

    def blocks_at(
        self, load: PendingLoad, verdict: LoadVerdict | None
    ) -> dict[int, set[int]]:
        """Return the ids of the blocks of a load that differ, by group.

        With no verdict, return all of them.
        """
        found: dict[int, set[int]] = {}
        for group_id, (_, ids) in load.blocks.groups.items():
            at: np.ndarray = np.ones(len(ids), bool)
            if verdict is not None:
                group = verdict.groups.get(group_id, GroupVerdict())
                at = np.isin(self._positions(load, group_id), group.positions)
            found[group_id] = set(np.asarray(ids)[at].tolist())
        return found

    def cached_as(
        self,
        load: PendingLoad,
        blocks: Mapping[int, set[int]],
        pool: BlockPool,
    ) -> set[int]:
        """Return those of a load's blocks that the prefix cache holds as its request's.

        The request may have given them up since.

        Args:
            load: the load, by the ledger.
            blocks: ids of some of its blocks, by KV cache group.
            pool: the blocks.

        """
        found = set()
        for group_id, (_, ids) in load.blocks.groups.items():
            positions = self._positions(load, group_id).tolist()
            scale = self._block_sizes[group_id] // self._hash_block_size
            for block_id, at in zip(np.asarray(ids).tolist(), positions, strict=True):
                if block_id not in blocks.get(group_id, ()):
                    continue
                hashes = hashes_of_blocks(load.block_hashes, scale, at, at + 1)
                for block_hash in hashes:
                    key = make_block_hash_with_group_id(block_hash, group_id)
                    if pool.blocks[block_id].block_hash == key:
                        found.add(block_id)
        return found

    def deny_unknown(self, load: PendingLoad, verdict: LoadVerdict, seq: int) -> None:
        """Keep blocks of a load that the ledger does not know from failing again."""
        for group_id, group in verdict.groups.items():
            if group.unknown:
                keys = self._keys(load.block_hashes, group_id)
                self.denied.deny_unknown(keys[group.unknown], seq)

    def note_completed(self, load: PendingLoad, verdict: LoadVerdict) -> None:
        """Note that blocks which came in part have got bits that nobody compared."""
        for group_id, group in verdict.groups.items():
            if group.completed:
                keys = self._keys(load.block_hashes, group_id)[group.completed]
                self.ledger.mark_other_sums(keys)

    def allow_stored(
        self, request: Request, group_id: int, start: int, stop: int
    ) -> None:
        """Allow a request's blocks ``[start, stop)`` that a connector stores anew."""
        if self.denied and group_id in self._block_sizes:
            self.denied.allow_stored(self.keys_at(request, group_id, start, stop))

    def num_allowed(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of the tokens that a connector offers may be loaded.

        Args:
            request: the request that would load them.
            start: the first token that is offered.
            num_tokens: the number of tokens that are offered.

        """
        allowed = num_tokens
        for group_id, size in self._block_sizes.items() if self.denied else ():
            first = start // size
            stop = -(-(start + num_tokens) // size)
            denied = self.denied.contain(self.keys_at(request, group_id, first, stop))
            if denied.any():
                at = (first + int(denied.argmax())) * size
                allowed = min(allowed, max(0, at - start))
        return allowed

    def take_stats(self) -> dict[str, int]:
        """Return what has changed since the last call, by key of `metrics`."""
        stats: dict[str, int] = {}
        if self._told != len(self.ledger):
            self._told = stats[metrics.LEDGER_ENTRIES] = len(self.ledger)
            stats[metrics.LEDGER_BYTES] = self.ledger.num_bytes
        return stats

    def clear(self) -> None:
        """Forget all sums: what is cached and stored is not valid any more."""
        self.ledger.clear()
        self.denied.clear()
        self._notes.clear()
        self._rewritten.clear()
        self._pending.clear()
        self._waiting.clear()


def _samples(
    positions: np.ndarray,
    bad: np.ndarray,
    known: KnownSums,
    checks: Sequence[np.ndarray],
) -> list[Difference]:
    samples = []
    for at in np.flatnonzero(bad)[:MAX_SAMPLES].tolist():
        sums = known.sums[at, : known.number[at]]
        found = next(int(c[at]) for c in checks if c[at] not in sums)
        samples.append(Difference(int(positions[at]), int(sums[0]), found))
    return samples
