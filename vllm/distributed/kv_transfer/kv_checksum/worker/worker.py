# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sum a request's blocks on a worker and bring the sums to the host.

Nothing here waits for the device on the engine step. Sums are added up on the
device; the worker's own stream copies them to pinned memory, and whoever needs
them first (the pickling thread, or the scheduler in the same process) waits for
that copy's event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumBlocks,
    KVChecksumGroup,
    KVChecksumRecord,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun, why_not_summed
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import (
    LayerFormat,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.groups import (
    build_group,
    describe_group,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (
    Prepare,
    select_backend,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.rows import (
    RowSpan,
    block_checksum_rows,
    build_rows,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (
    ContextShard,
    GroupView,
    Sharding,
    SkipGroup,
    SumRows,
)
from vllm.logger import init_logger
from vllm.utils import torch_utils

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = [
    "KVChecksumOutput",
    "KVChecksumWorker",
]

logger = init_logger(__name__)


@dataclass
class PendingCopy:
    """Sums that are being copied to the host, and the record that they complete.

    Attributes:
        record: the worker's report, without the sums.
        parts: the rows of each request and group.
        host: int64 ``(rows, columns)``, the destination of the copy.
        device: the source of the copy, kept alive until `event` has passed.
        event: passes when the copy is complete; None if nothing had to be copied.

    """

    record: KVChecksumRecord
    parts: list[RowSpan]
    host: torch.Tensor
    device: torch.Tensor
    event: torch.cuda.Event | None = None

    def finalize(self) -> KVChecksumRecord:
        """Wait for the copy and return the completed record."""
        if self.event is not None:
            self.event.synchronize()
        values = self.host.numpy().view(np.uint64)
        for part in self.parts:
            keys, group_id = part.group.replica_keys, part.group.group_id
            sums = values[part.rows, : len(keys)]
            if part.group.ring is not None:
                sums = sums.sum(axis=0, dtype=np.uint64, keepdims=True)
            self.record.checksums[part.req_id][group_id] = KVChecksumGroup(
                part.start * part.group.context.size,
                keys,
                part.group.of_all_ranks(sums.copy()),
            )
            if part.stored:
                stored = self.record.stored.setdefault(part.req_id, {})
                per_block = part.group.units_per_block
                stored[group_id] = values[part.rows, -1][::per_block].copy()
        return self.record


class KVChecksumOutput:
    """Records of one or more workers for one step, possibly still being copied.

    Pickles as its records; `finalize` may be called from any thread, repeatedly.
    """

    def __init__(self, records: list[PendingCopy | KVChecksumRecord]) -> None:
        self._records = records

    def finalize(self) -> list[KVChecksumRecord]:
        """Wait for the copies and return the records."""
        self._records = [
            r.finalize() if isinstance(r, PendingCopy) else r for r in self._records
        ]
        return list(self._records)  # type: ignore[arg-type]

    def aggregate(self, other: KVChecksumOutput | None) -> KVChecksumOutput:
        """Return a new output with the records of both, without waiting."""
        return KVChecksumOutput(self._records + (other._records if other else []))

    def __reduce__(self) -> tuple[type, tuple[list[KVChecksumRecord]]]:
        return KVChecksumOutput, (self.finalize(),)


class KVChecksumWorker:
    """Sums KV blocks of this worker's layers.

    Groups that cannot be summed are in `skipped`, with their reasons, and are logged.

    Args:
        kv_cache_config: vLLM's KV cache configuration of this worker.
        kv_caches: per layer name, its ``[B, H, N, C]`` cache.
        tp_rank, tp_size, pp_rank: this worker's place in the instance.
        uniform_kv_heads: the model's KV head count if every layer shares it.
        context: the tokens of every request that this worker holds.
        over_pcp: whether `tp_rank` and `tp_size` count PCP ranks.
        formats: per layer name, how vLLM's layer keeps its cache; a layer that is
            missing is read by its spec alone.

    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        tp_rank: int,
        tp_size: int,
        pp_rank: int,
        uniform_kv_heads: int | None,
        formats: Mapping[str, LayerFormat] | None = None,
        context: ContextShard | None = None,
        over_pcp: bool = False,
    ) -> None:
        self.tp_rank, self.pp_rank = tp_rank, pp_rank
        self.groups: dict[int, GroupView] = {}
        self.skipped: dict[int, str] = {}
        # All groups that any worker of the instance skips, once that is known.
        self.skipped_anywhere = self.skipped
        shard = Sharding(
            tp_rank, tp_size, uniform_kv_heads, context or ContextShard(), over_pcp
        )
        for group_id in kv_cache_config.transfer_group_ids:
            group = kv_cache_config.kv_cache_groups[group_id]
            try:
                view = build_group(
                    group_id,
                    group,
                    kv_caches,
                    kv_cache_config.num_blocks,
                    shard,
                    formats or {},
                )
            except SkipGroup as reason:
                self.skipped[group_id] = str(reason)
                continue
            if view is not None:
                self.groups[group_id] = view
        self._num_blocks: int = kv_cache_config.num_blocks
        # One block checksum per block of the groups whose checksums are stored.
        self._block_checksums: torch.Tensor | None = None
        self._stored_groups: frozenset[int] = frozenset()
        device = next(iter(kv_caches.values())).device if kv_caches else "cpu"
        self.device = torch.device(device)
        self._copy_stream = (
            None if self.device.type == "cpu" else torch.cuda.Stream(self.device)
        )
        self._prepare(select_backend(self.device, _max_gather_bytes()))
        self._columns = max(
            (len(g.replica_keys) for g in self.groups.values()), default=1
        )
        self._sends: dict[str, KVChecksumBlocks] = {}
        self._full_blocks: dict[str, KVChecksumBlocks] = {}
        self._recvs: dict[str, KVChecksumBlocks] = {}
        self._started: set[str] = set()
        self._equal_tp = frozenset(i for i, g in self.groups.items() if g.equal_tp)
        self._log_coverage(kv_cache_config, tp_size)

    def _log_coverage(self, kv_cache_config: KVCacheConfig, tp_size: int) -> None:
        """Log at startup one line on what is covered and one on what is not."""
        here = f"PP rank {self.pp_rank}, TP rank {self.tp_rank}"
        kinds = {
            i: describe_group(kv_cache_config.kv_cache_groups[i])
            for i in kv_cache_config.transfer_group_ids
        }
        covered = [f"{i} ({kinds[i]})" for i in sorted(self.groups)]
        logger.info(
            "KV checksums cover KV cache groups %s on %s",
            ", ".join(covered) or "none",
            here,
        )
        missing = [f"group {i} ({kinds[i]}): {r}" for i, r in self.skipped.items()]
        for i, group in self.groups.items():
            missing += [f"of group {i}: {remark}" for remark in group.remarks]
            if group.equal_tp:
                missing.append(
                    f"group {i} if the other side's TP size is not {tp_size}"
                )
        if missing:
            logger.warning(
                "KV checksums do not cover, on %s: %s", here, "; ".join(missing)
            )

    def _prepare(self, prepare: Prepare) -> None:
        """Build the summing functions of every group, one per replica key, and compile.

        A replica key is a column of the sums. Each function is called on one row of
        which no token counts, which compiles the kernels that it needs, so that no
        step waits for that; layers of one shape share a compiled variant.
        """
        rows = torch.zeros((3, 1), dtype=torch.int64, device=self.device)
        out = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        self._sums: dict[int, list[tuple[int, SumRows]]] = {}
        for group_id, group in self.groups.items():
            self._sums[group_id] = []
            for column, key in enumerate(group.replica_keys):
                layers = [x for x in group.layers if x.replica_key == key]
                sum_rows = prepare(layers)
                sum_rows(rows, out[:, 0])
                self._sums[group_id].append((column, sum_rows))

    def bind(self, scheduled: KVChecksumScheduled | None) -> None:
        """Take over the blocks that the scheduler asks for. Call this once per step."""
        self._sends, self._full_blocks, self._started = {}, {}, set()
        if scheduled is not None:
            self._sends = scheduled.reqs_to_send
            loads = {r: b for r, b in scheduled.sync_loads.items() if b.groups}
            self._full_blocks = {**loads, **scheduled.full_blocks}
            started = {**scheduled.reqs_to_recv, **scheduled.reqs_to_load}
            self._recvs.update(started)
            self._started = {*started}

    def post_forward(
        self,
        finished_recving: set[str] | None,
        failed_recving: set[str],
        finished_req_ids: set[str],
        defer_sends: bool = False,
        received: dict[str, bytes] | None = None,
    ) -> KVChecksumOutput | None:
        """Sum the loads that finished and, unless deferred, this step's sends.

        Args:
            finished_recving: requests whose load this worker reports finished.
            failed_recving: those of them whose load failed.
            finished_req_ids: requests that ended since the last step.
            defer_sends: whether the drafter still writes KV and `finalize_step`
                follows.
            received: payloads that the connector received, by request id.

        Returns:
            The records of this step so far, or None if there are none.

        """
        work: dict[str, KVChecksumBlocks] = {}
        if self._recvs:
            # A load that starts in this step belongs to a new request of the same id.
            for req_id in finished_req_ids - self._started:
                self._recvs.pop(req_id, None)
            for req_id in finished_recving or ():
                blocks = self._recvs.pop(req_id, None)
                if blocks is not None and req_id not in failed_recving:
                    work[req_id] = blocks
        output = self._sum(work) if work else None
        if received:
            record = KVChecksumRecord(
                self.pp_rank, self.tp_rank, checksums={}, received=received
            )
            output = KVChecksumOutput([record]).aggregate(output)
        if not defer_sends:
            output = self.finalize_step(output)
        return output

    def finalize_step(self, output: KVChecksumOutput | None) -> KVChecksumOutput | None:
        """Sum what this step writes or loads, after everything that writes KV.

        A request may be sent and loaded in one step, so there are two records.
        """
        sends, self._sends = self._sends, {}
        full_blocks, self._full_blocks = self._full_blocks, {}
        for work in (sends, full_blocks):
            if work:
                sums = self._sum(work)
                output = sums if output is None else output.aggregate(sums)
        return output

    def init_block_checksums(self, group_ids: Collection[int]) -> torch.Tensor:
        """Keep a block checksum per block for these KV cache groups.

        The connector moves a block checksum wherever it moves the block's KV, and
        writes it back before it reports the load finished.

        Returns:
            The block checksums, int64 ``(num_blocks,)`` on the cache's device; the
            same tensor at every call.

        Raises:
            ValueError: some worker does not sum a group; the message says why.

        """
        reason = why_not_summed(self.skipped_anywhere, group_ids)
        if reason is not None:
            raise ValueError(reason)
        self._stored_groups |= frozenset(group_ids)
        if self._block_checksums is None:
            self._block_checksums = torch.zeros(
                self._num_blocks, dtype=torch.int64, device=self.device
            )
        return self._block_checksums

    def save_block_checksums(self, runs: Sequence[BlockRun]) -> None:
        """Fill in the block checksums of full blocks, queued on the current stream.

        Call this after the forward that wrote the blocks and before the connector
        reads them. Blocks of groups that have no layers here are left out.

        Raises:
            ValueError: no block checksums are kept, or hashes are malformed.

        """
        if self._block_checksums is None:
            raise ValueError("init_block_checksums was not called")
        runs = [run for run in runs if run.group_id in self.groups]
        sizes = {i: group.block_size for i, group in self.groups.items()}
        work = {str(i): r.blocks(sizes[r.group_id]) for i, r in enumerate(runs)}
        rows, segments, parts = build_rows(self.groups, work)
        if not segments:
            return
        targets, number = block_checksum_rows(runs, parts, rows.shape[1])
        device_rows, sums = self._queue_sums(
            np.concatenate([rows, targets]), segments, self._columns
        )
        # The last one takes the sums of rows that only pad.
        totals = torch.zeros(number + 1, dtype=torch.int64, device=self.device)
        totals.index_add_(0, device_rows[3], sums.sum(dim=1))
        blocks, tags = device_rows[4:, :number]
        self._block_checksums[blocks] = totals[:number] ^ tags

    def _queue_sums(
        self, rows: np.ndarray, segments: list[tuple[GroupView, slice]], columns: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the sums of rows on the current stream.

        Args:
            rows: int64 ``(k, n)``, whose first three rows are those of `SumRows`.
            segments: the columns of `rows` that belong to each group.
            columns: columns of the sums; those that no replica key uses stay 0.

        Returns:
            The rows, and the sums, int64 ``(n, columns)``, both on the device.

        """
        device_rows = torch_utils.async_tensor_h2d(
            torch.from_numpy(rows), device=self.device
        )
        sums = torch.zeros(
            (rows.shape[1], columns), dtype=torch.int64, device=self.device
        )
        for group, segment in segments:
            for column, sum_rows in self._sums[group.group_id]:
                sum_rows(device_rows[:3, segment], sums[segment, column])
        return device_rows, sums

    def _sum(self, work: dict[str, KVChecksumBlocks]) -> KVChecksumOutput:
        """Queue the sums of blocks by request id, of one request at least."""
        record = KVChecksumRecord(
            self.pp_rank,
            self.tp_rank,
            checksums={req_id: {} for req_id in work},
            skipped_groups=self.skipped,
            equal_tp_groups=self._equal_tp,
            fingerprints={i: g.fingerprint for i, g in self.groups.items()},
            num_tokens={req_id: b.num_tokens for req_id, b in work.items()},
            seqs={req_id: b.seq for req_id, b in work.items()},
        )
        rows, segments, parts = build_rows(self.groups, work)
        if not parts:
            return KVChecksumOutput([record])
        for part in parts:
            part.stored = (
                work[part.req_id].stored and part.group.group_id in self._stored_groups
            )
        with_stored = any(part.stored for part in parts)
        device_rows, sums = self._queue_sums(
            rows, segments, self._columns + with_stored
        )
        if with_stored:
            assert self._block_checksums is not None
            for group, segment in segments:
                blocks = device_rows[0, segment] // group.units_per_block
                sums[segment, -1] = self._block_checksums[blocks]
        return KVChecksumOutput([self._copy_to_host(record, parts, sums)])

    def _copy_to_host(
        self, record: KVChecksumRecord, parts: list[RowSpan], sums: torch.Tensor
    ) -> PendingCopy:
        if self._copy_stream is None:
            return PendingCopy(record, parts, sums, sums)
        # The current stream is looked up here, because the runner switches streams
        # after this object is built.
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._copy_stream):
            host.copy_(sums, non_blocking=True)
            event.record(self._copy_stream)
        sums.record_stream(self._copy_stream)
        return PendingCopy(record, parts, host, sums, event)


def _max_gather_bytes() -> int:
    """Return the bound that is set on this package, under the name that users know."""
    from vllm.distributed.kv_transfer.kv_checksum import worker as package

    return package._MAX_GATHER_BYTES
