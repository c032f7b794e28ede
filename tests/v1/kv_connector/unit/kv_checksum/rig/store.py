# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Let instances in one process share a store of KV blocks.

Real schedulers and real checksum workers. What is fake: the store and its connector
(a dictionary by block hash; the tests of real servers use a real one) and the
forward.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from . import instances as rig

STORE: dict[bytes, "Value"] = {}

STORES = {
    "MooncakeStoreConnector": dict(
        kv_connector_extra_config={"metadata_server": "x", "store_backend": "none"}
    ),
    "SimpleCPUOffloadConnector": dict(
        kv_connector_extra_config={"cpu_bytes_to_use": 2**20}
    ),
}
"""Settings of vLLM's connectors that store checksums."""


@dataclass
class Value:
    """One stored block: KV by layer number, an entry per worker (or none)."""

    kv: dict
    entries: list | None


@dataclass
class Metadata(KVConnectorMetadata):
    loads: dict[str, BlockRun] = field(default_factory=dict)
    saves: list[BlockRun] = field(default_factory=list)

    def loads_by_request(self):
        """Return block ids per request and group, to compare with what is summed."""
        return {r: {run.group_id: list(run.block_ids)} for r, run in self.loads.items()}


class MemoryStoreConnector(KVConnectorBase_V1):
    """The scheduler's side; `Instance` moves the blocks."""

    requires_kv_delivery = False

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.sources = {self._cache_hit_source}
        self.deaf = False
        self.dropped: list[tuple[str, dict]] = []
        self._loads: dict[str, BlockRun] = {}
        self._requests: dict = {}

    def bind_kv_cache_manager(self, kv_cache_manager):
        self._kv_cache_manager = kv_cache_manager

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found = 0
        for block_hash in request.block_hashes:
            if block_hash not in STORE or found + self.block_size >= request.num_tokens:
                break
            found += self.block_size
        return max(0, found - num_computed_tokens), found > num_computed_tokens

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        (ids,) = blocks.get_block_ids()
        self._requests[request.request_id] = request
        if num_external_tokens:
            size = self.block_size
            start = (len(ids) * size - num_external_tokens) // size
            run = BlockRun(
                0, start, ids[start:], request.block_hashes[start : len(ids)]
            )
            self._loads[request.request_id] = run

    def build_connector_meta(self, scheduler_output):
        meta = Metadata(loads=self._loads)
        self._loads = {}
        for req_id, number in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[req_id]
            (ids,) = self._kv_cache_manager.get_block_ids(req_id)
            done = request.num_computed_tokens + number
            full = min(done, request.num_prompt_tokens) // self.block_size
            if full:
                hashes = request.block_hashes[:full]
                meta.saves.append(BlockRun(0, 0, ids[:full], hashes))
        return meta

    def get_kv_checksum_sources(self, request):
        return self.sources

    def on_kv_checksum_failure(self, request, mismatches):
        self.dropped.append((request.request_id, mismatches))
        if not self.deaf:
            for position in mismatches[0]:
                STORE.pop(request.block_hashes[position], None)

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...


class StoringInstance(rig.Instance):
    """An instance that stores every full block of its prompts and loads hits.

    With `checksums` off it stores values without entries, which a load then leaves
    as they are.
    """

    def __init__(self, model, *, checksums=True, **settings):
        super().__init__(
            model,
            "kv_both",
            kv_connector="MemoryStoreConnector",
            kv_connector_module_path=__name__,
            **settings,
        )
        self.store = self.scheduler.connector
        self.entries = (
            [w.init_block_checksums([0]) for w in self.workers] if checksums else None
        )
        self.invalid_positions: list[int] = []

    def load_block(self, block_id, value):
        for n, kv in value.kv.items():
            self.kv[n][block_id] = kv
        if self.entries is not None and value.entries is not None:
            for entries, entry in zip(self.entries, value.entries, strict=True):
                entries[block_id] = entry

    def save_blocks(self, run):
        if self.entries is not None:
            for worker in self.workers:
                worker.save_block_checksums([run])
        for block_id, block_hash in zip(run.block_ids, run.block_hashes, strict=True):
            if block_hash not in STORE:
                kv = {n: cache[block_id].clone() for n, cache in self.kv.items()}
                entries = self.entries and [int(e[block_id]) for e in self.entries]
                STORE[block_hash] = Value(kv, entries)

    def step(self, producer=None):
        output = self.schedule()
        for req_id, number in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            done = request.num_computed_tokens
            self.write(request, done - number, done)
            self.scheduled.append((req_id, number))
        meta, invalid = output.kv_connector_metadata, set()
        for run in meta.loads.values():
            for i, block_id in enumerate(run.block_ids):
                self.load_block(block_id, STORE[run.block_hashes[i]])
                if run.start + i in self.invalid_positions:
                    invalid.add(block_id)
        finished = set(meta.loads)
        per_worker = []
        for worker in self.workers:
            worker.bind(output.kv_checksum_scheduled)
            result = KVConnectorOutput(finished_recving=finished or None)
            result.invalid_block_ids = invalid
            result.kv_checksums = worker.post_forward(
                finished, set(), output.finished_req_ids
            )
            per_worker.append(self.runner_output(output, result))
        for run in meta.saves:
            self.save_blocks(run)
        return self.finish_step(output, self.aggregator.aggregate(per_worker))


class Executor:
    """Workers that skip what they are told to."""

    def __init__(self, *skipped):
        self.workers = [
            SimpleNamespace(model_runner=SimpleNamespace(kv_connector=self.part(s)))
            for s in skipped
        ]

    @staticmethod
    def part(skipped):
        if skipped is None:  # without checksums, or without a connector
            return SimpleNamespace(kv_checksum_worker=None)
        made = SimpleNamespace(skipped=skipped)
        return SimpleNamespace(kv_checksum_worker=made)

    def collective_rpc(self, method):
        return [method(worker) for worker in self.workers]
