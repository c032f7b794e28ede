# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Let the machinery of instances that share a store misbehave."""

from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)

from .. import store
from .instances import Faulty


class FaultyStore(Faulty, store.StoringInstance):
    """An instance that loads what it stored."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.loading: dict = {}

    def make_worker(self, kv_config, stage, rank):
        worker = super().make_worker(kv_config, stage, rank)
        entries = worker.init_block_checksums([0])
        if getattr(self, "entries", None):
            self.entries[stage * self.tp + rank] = entries
        return worker

    def move(self, producer, output):
        meta, self.invalid = output.kv_connector_metadata, set()
        for run in meta.saves:
            self.save_blocks(run)
        self.loading |= meta.loads
        for req_id, run in list(self.loading.items()):
            if self.rng.random() < 0.4:
                continue
            del self.loading[req_id]
            self._load(req_id, run)
            self.arrive(req_id, run.block_ids)
        return [
            self.report(rank, output, KVConnectorTransferResults())
            for rank in range(len(self.workers))
        ]

    def _load(self, req_id, run) -> None:
        load = self.loads_now[req_id]
        for block_id, block_hash in zip(run.block_ids, run.block_hashes, strict=True):
            if block_hash not in store.STORE:
                load.failed = {0}  # dropped since the load was planned
                return
            self.load_block(block_id, store.STORE[block_hash])
        self.damage_blocks(load, run.block_ids)
        if self.faults.draw("payload", 0.3):
            at = self.rng.randrange(len(run.block_ids))
            block_hash, value = self.rng.choice(list(store.STORE.items()))
            if block_hash != run.block_hashes[at]:
                self.load_block(run.block_ids[at], value)
                load.payload = "other"
                self.faults.counts["payload: another prefix's value"] += 1

    def tables(self):
        return super().tables() | {"loads": len(self.loading)}


class UncheckedStore(FaultyStore):
    """An instance whose store keeps no checksums: nobody checks what it loads."""

    unchecked = True

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.store.sources = set()


class InStepStore(UncheckedStore):
    """An instance that loads in the step that uses what is loaded."""

    loads_in_step = True

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.local: dict[str, int] = {}
        self._found = self.store.get_num_new_matched_tokens
        self.store.get_num_new_matched_tokens = self._offer
        self._allocated = self.store.update_state_after_alloc
        self.store.update_state_after_alloc = self._plan

    def _offer(self, request, num_computed_tokens):
        self.local[request.request_id] = num_computed_tokens
        return self._found(request, num_computed_tokens)[0], False

    def _plan(self, request, blocks, num_tokens):
        """Leave the blocks behind the loaded ones to what the step computes."""
        self._allocated(request, blocks, 0)
        if num_tokens:
            (ids,) = blocks.get_block_ids()
            local = self.local[request.request_id]
            start, stop = (n // self.block_size for n in (local, local + num_tokens))
            run = BlockRun(0, start, ids[start:stop], request.block_hashes[start:stop])
            self.store._loads[request.request_id] = run

    def load_in_step(self, output):
        meta = output.kv_connector_metadata
        loads, meta.loads = meta.loads, {}
        for req_id, run in loads.items():
            self._load(req_id, run)
            self.loads_now[req_id].arrived = True
