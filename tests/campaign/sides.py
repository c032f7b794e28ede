# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run P or D without a scheduler: real workers, and the real code for verdicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kv_checksum.rig import caches as u

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumCarrier,
    KVChecksumScheduler,
)
from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import LayerCache
from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    generate_scheduler_kv_cache_config,
)
from vllm.v1.request import RequestStatus

from .drawing import Group
from .models import Attention, Generator, Split
from .strike import Target, Worker

Blocks = dict[int, tuple[int, list[int]]]
"""Per KV cache group, the position of the first block and the blocks' ids."""


@dataclass
class Load:
    """One request: what P computed and D loads.

    Attributes:
        num_tokens: of the prompt, on P.
        first_token, end: D loads tokens ``[first_token, end)``.
        seed: what its content is drawn from.

    """

    req_id: str
    num_tokens: int
    first_token: int
    end: int
    seed: int

    @property
    def prompt(self) -> list[int]:
        return [(self.seed + i) % 2**17 for i in range(self.num_tokens)]


class _Connector:
    """Stands in for a connector that carries payloads in `kv_transfer_params`."""

    get_kv_checksum_sources = KVConnectorBase_V1.get_kv_checksum_sources

    def kv_checksum_carrier(self, request: Any, receiving: bool) -> KVChecksumCarrier:
        return KVChecksumCarrier.KV_TRANSFER_PARAMS


class Side:
    """One instance with a copy of some requests' KV."""

    def __init__(
        self, groups: list[Group], split: Split, loads: list[Load], random: Generator
    ) -> None:
        self.groups, self.split = groups, split
        self.target = Target([[] for _ in groups], [])
        self.rows = self._block_tables(loads, random)
        self.blocks: dict[str, KVCacheBlocks] = {}
        self.caches: list[Any] = []
        self.kv_configs: list[Any] = []
        self.workers = [
            self._worker(stage, rank, random)
            for stage in range(split.pp)
            for rank in range(split.tp)
        ]
        self.checksums = self._scheduler_part()
        self.verdicts = keep_verdicts(self.checksums)

    def _block_tables(
        self, loads: list[Load], random: Generator
    ) -> dict[str, list[list[int]]]:
        """Return scattered blocks for every request, per group."""
        size = self.split.block_size
        need = [-(-load.num_tokens // size) for load in loads]
        self.num_blocks = sum(need) + 9
        rows: dict[str, list[list[int]]] = {load.req_id: [] for load in loads}
        for group in self.groups:
            ids = iter((1 + random.permutation(self.num_blocks - 1)).tolist())
            for load, number in zip(loads, need, strict=True):
                number = number if holds_tokens(group) else 1
                rows[load.req_id].append([next(ids) for _ in range(number)])
            self.target.others.append([next(ids) for _ in range(8)])
        return rows

    def _worker(self, stage: int, rank: int, random: Generator) -> Any:
        caches: dict[str, Any] = {}
        formats: dict[str, Any] = {}
        configs = []
        for group, workers in zip(self.groups, self.target.workers, strict=True):
            here = [
                index
                for index in range(len(group.layers))
                if self.split.stage(index, len(group.layers)) == stage
            ]
            own = [
                group.new_cache(self.split, rank, self.num_blocks, random, index)
                for index in here
            ]
            names = u.names(*(group.layers[index] for index in here))
            caches.update(zip(names, own, strict=True))
            formats.update(group.formats(here))
            configs.append((names, group.spec(self.split, self.split.tp, here)))
            parts = [
                part
                for index, cache in zip(here, own, strict=True)
                for part in group.parts(cache, self.split, self.num_blocks, index)
            ]
            layers = [LayerCache(c, self.num_blocks) for c in own]
            workers.append(Worker(layers, parts, rank))
            self.caches += own
        heads = {g.heads for g in self.groups if isinstance(g, Attention)}
        self.kv_configs.append(u.config(self.num_blocks, *configs))
        return u.worker(
            self.kv_configs[-1],
            caches,
            tp_rank=rank,
            tp_size=self.split.tp,
            pp_rank=stage,
            uniform=heads.pop() if len(heads) == 1 else None,
            formats=formats,
        )

    def _scheduler_part(self) -> KVChecksumScheduler:
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_checksum_fail_closed=False,
                kv_checksum_evidence_dir=None,
                kv_checksum_quarantine=0,
                kv_checksum_quarantine_from_requests=False,
                kv_load_failure_policy="fail",
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.split.tp,
                pipeline_parallel_size=self.split.pp,
                decode_context_parallel_size=1,
            ),
            observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        )
        return KVChecksumScheduler(
            config,
            _Connector(),
            self._cache_manager(),
            generate_scheduler_kv_cache_config(self.kv_configs),
        )

    def _cache_manager(self) -> SimpleNamespace:
        """Return block tables as vLLM keeps them; what is local has a hash."""
        return SimpleNamespace(
            get_block_ids=self.rows.__getitem__,
            get_blocks=lambda req_id: self.blocks[req_id],
            block_pool=SimpleNamespace(hash_block_size=self.split.block_size),
        )

    def write(self, loads: list[Load]) -> None:
        """Put every request's KV into its blocks."""
        for load in loads:
            for group, workers, ids in zip(
                self.groups, self.target.workers, self.rows[load.req_id], strict=True
            ):
                content = group.content(load.num_tokens, load.seed)
                for worker in workers:
                    for part in worker.parts:
                        group.put(
                            part.covered,
                            self.split,
                            worker.rank,
                            part.index,
                            ids,
                            content,
                        )

    def _kv_cache_blocks(self, load: Load) -> KVCacheBlocks:
        """Return a load's blocks as it starts; any before its first token are local."""
        groups = []
        for group, ids in zip(self.groups, self.rows[load.req_id], strict=True):
            blocks = [KVCacheBlock(i) for i in ids]
            if holds_tokens(group):
                blocks = blocks[: -(-load.end // self.split.block_size)]
                for block in blocks[: load.first_token // self.split.block_size]:
                    block.set_block_hash(BlockHashWithGroupId(b"local"))
            groups.append(blocks)
        return KVCacheBlocks(tuple(groups))

    def _sum(self, finished: set[str] | None) -> Any:
        """Step every worker, and return what the executor hands the scheduler."""
        meta = self.checksums.build_checksum_meta()
        outputs = []
        for worker in self.workers:
            worker.bind(meta)
            outputs.append(worker.post_forward(finished, set(), set()))
        merged = outputs[0]
        for output in outputs[1:]:
            merged = merged.aggregate(output)
        return SimpleNamespace(
            kv_checksums=merged,
            finished_recving=finished,
            failed_recving=None,
            invalid_block_ids=None,
        )

    def transferred(self, load: Load, first_token: int, end: int) -> Blocks:
        """Return what connectors transfer of tokens ``[first_token, end)``, per group.

        Of a window what they clip it to, of states the running one, of rings all.
        """
        size, found = self.split.block_size, {}
        for at, (group, row) in enumerate(
            zip(self.groups, self.rows[load.req_id], strict=True)
        ):
            if not holds_tokens(group):
                found[at] = (0, row)
                continue
            first, last = first_token // size, -(-end // size)
            if isinstance(group, Attention) and group.family == "sliding window":
                first = max(first, last - (-(-group.window // size) + 1))
            found[at] = (first, row[first:last])
        return found

    def send(self, loads: list[Load]) -> tuple[dict[str, Any], dict[str, Blocks]]:
        """Return what a producer's answer carries and what was summed, by request."""
        requests = [
            u.Request(
                request_id=load.req_id,
                prompt_token_ids=load.prompt,
                num_prompt_tokens=load.num_tokens,
                kv_transfer_params={},
                status=RequestStatus.FINISHED_LENGTH_CAPPED,
            )
            for load in loads
        ]
        for request in requests:
            self.checksums.add_send(request)
        summed = {r: _plain(p.blocks) for r, p in self.checksums._sends.pending.items()}
        self.checksums.collect(self._sum(None))
        return {
            r.request_id: self.checksums.request_finished(r, {}) for r in requests
        }, summed

    def load(
        self, loads: list[Load], params: dict[str, Any]
    ) -> tuple[dict[str, LoadVerdict], dict[str, Blocks]]:
        """Return, by request id, a consumer's verdict and what was summed."""
        requests = {
            load.req_id: u.Request(
                request_id=load.req_id,
                prompt_token_ids=load.prompt,
                num_tokens=load.num_tokens,
                kv_transfer_params=dict(params[load.req_id]),
                status=RequestStatus.WAITING_FOR_REMOTE_KVS,
                _block_hasher=None,
            )
            for load in loads
        }
        for load in loads:
            self.blocks[load.req_id] = self._kv_cache_blocks(load)
            self.checksums.add_recv(requests[load.req_id], load.first_token, load.end)
        summed = {r: _plain(x.blocks) for r, x in self.checksums._recvs.items()}
        output = self._sum(set(requests))
        self.checksums.collect(output)
        self.verdicts.clear()
        self.checksums.verify(output, requests)
        return dict(self.verdicts), summed


def holds_tokens(group: Group) -> bool:
    """Tell whether blocks of a group follow the tokens, whatever they keep of them."""
    return group.holds in ("tokens", "latents")


def _plain(blocks: KVChecksumBlocks) -> Blocks:
    return {
        g: (start, [int(i) for i in ids]) for g, (start, ids) in blocks.groups.items()
    }


class Verdicts(dict[str, LoadVerdict]):
    """The last verdict by request id, and how many fell."""

    def __init__(self) -> None:
        self.fell: Counter[str] = Counter()


def keep_verdicts(checksums: KVChecksumScheduler) -> Verdicts:
    """Return a list that every verdict from now on is added to."""
    verdicts = Verdicts()
    judge = checksums._judging.judge

    def keep(request: Any, load: Any) -> LoadVerdict:
        verdict = judge(request, load)
        verdicts[request.request_id] = verdict
        verdicts.fell[request.request_id] += 1
        return verdict

    checksums._judging.judge = keep  # type: ignore[method-assign]
    return verdicts
