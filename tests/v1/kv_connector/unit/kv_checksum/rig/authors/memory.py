# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keep blocks in the memory of a process and load them back, with their checksums.

`UnstoredConnector` keeps none, so its loads are the ledger's to check.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

STORES: dict[str, dict[bytes, tuple]] = defaultdict(dict)
"""By the store's name: KV of each layer, and the block's checksum, by block hash."""


@dataclass
class MemoryMetadata(KVConnectorMetadata):
    loads: dict[str, BlockRun] = field(default_factory=dict)
    saves: list[BlockRun] = field(default_factory=list)


class UnstoredConnector(KVConnectorBase_V1):
    """For models of one KV cache group, and one rank."""

    requires_kv_delivery = False

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.store = STORES[extra["store"]]
        self.is_sync = extra.get("sync", False)
        self.block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.requests: dict = {}
        self.loads: dict[str, BlockRun] = {}
        self.entries = None

    def bind_kv_cache_manager(self, kv_cache_manager):
        self.manager = kv_cache_manager

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.found(request, num_computed_tokens, request.num_tokens - 1)

    def found(self, request, num_computed_tokens, most):
        found = 0
        for block_hash in request.block_hashes:
            if block_hash not in self.store or found + self.block_size > most:
                break
            found += self.block_size
        number = max(0, found - num_computed_tokens)
        return number, bool(number) and not self.is_sync

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.requests[request.request_id] = request
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            found = request.num_tokens - 1
            number, _ = self.found(request, 0, found)
            start = (number - num_external_tokens) // self.block_size
            stop = number // self.block_size
            hashes = request.block_hashes[start:stop]
            run = BlockRun(0, start, ids[start:stop], hashes)
            self.loads[request.request_id] = run

    def build_connector_meta(self, scheduler_output):
        meta = MemoryMetadata(loads=self.loads)
        self.loads = {}
        for req_id, number in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            (ids,) = self.manager.get_block_ids(req_id)
            done = request.num_computed_tokens + number
            full = min(done, request.num_prompt_tokens) // self.block_size
            if full:
                meta.saves.append(BlockRun(0, 0, ids[:full], request.block_hashes))
        return meta

    def register_kv_caches(self, kv_caches):
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs):
        self.loads.update(self._get_connector_metadata().loads)
        if self.is_sync:
            for run in self.loads.values():
                self.load(run)
            self.loads = {}

    def load(self, run):
        for block_id, block_hash in zip(run.block_ids, run.block_hashes, strict=True):
            kv, entry = self.store[block_hash]
            for cache, cells in zip(self.caches, kv, strict=True):
                cache[block_id] = cells
            if self.entries is not None:
                self.entries[block_id] = entry

    def wait_for_save(self):
        for run in self._get_connector_metadata().saves:
            self.save(run)

    def save(self, run):
        for block_id, block_hash in zip(run.block_ids, run.block_hashes, strict=False):
            if block_hash not in self.store:
                kv = [cache[block_id].clone() for cache in self.caches]
                entry = None if self.entries is None else int(self.entries[block_id])
                self.store[block_hash] = kv, entry

    def get_transfer_results(self, finished_req_ids):
        results = KVConnectorTransferResults(finished_recving={*self.loads})
        for run in self.loads.values():
            self.load(run)
        self.loads = {}
        return results

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...


class MemoryConnector(UnstoredConnector):
    """Keeps each block's checksum with the block."""

    def get_kv_checksum_sources(self, request):
        return {self._cache_hit_source}

    def on_kv_checksum_failure(self, request, mismatches):
        for position in mismatches[0]:
            self.store.pop(request.block_hashes[position], None)

    def set_kv_checksum_worker(self, worker):
        self.sums = worker
        self.entries = worker.init_block_checksums([0])

    def save(self, run):
        if self.entries is not None:
            hashes = run.block_hashes[: len(run.block_ids)]
            self.sums.save_block_checksums([run._replace(block_hashes=hashes)])
        super().save(run)
