# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Move KV, and its checksums, through a folder that producer and consumer share."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.v1.request import RequestStatus


@dataclass
class FolderMetadata(KVConnectorMetadata):
    """What one step sends (blocks, checksums) and loads (file, blocks), by request."""

    sends: dict[str, tuple[list[int], bytes | None]]
    loads: dict[str, tuple[str, list[int]]]


class FolderConnector(KVConnectorBase_V1):
    """For models of one KV cache group, and equal TP sizes on both sides."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.folder = Path(extra["folder"])
        self.block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.sends: dict[str, list[int]] = {}
        self.checksums: dict[str, bytes] = {}
        self.loads: dict[str, tuple[str, list[int]]] = {}
        self.sent: set[str] = set()

    # ---- scheduler side: KV checksums

    def kv_checksum_carrier(self, request, receiving):
        return KVChecksumCarrier.CONNECTOR.of_request(request, receiving)

    def send_kv_checksums(self, request, checksums):
        # request_finished has just been called, so they go with its blocks.
        self.checksums[request.request_id] = checksums

    # ---- scheduler side: KV

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        number = request.num_prompt_tokens - num_computed_tokens
        return number, number > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if not num_external_tokens:
            return
        (block_ids,) = blocks.get_block_ids()
        first = (request.num_prompt_tokens - num_external_tokens) // self.block_size
        params = request.kv_transfer_params
        params["do_remote_prefill"] = False  # it is loaded once
        self.loads[request.request_id] = params["file"], block_ids[first:]

    def request_finished(self, request, block_ids):
        params = request.kv_transfer_params or {}
        ended = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        if not (params.get("do_remote_decode") and ended):
            return False, None
        self.sends[request.request_id] = block_ids
        answer = dict(do_remote_prefill=True, do_remote_decode=False)
        return True, answer | {"file": request.request_id}

    def build_connector_meta(self, scheduler_output):
        sends = {r: (i, self.checksums.pop(r, None)) for r, i in self.sends.items()}
        meta = FolderMetadata(sends, self.loads)
        self.sends, self.loads = {}, {}
        return meta

    # ---- worker side

    def register_kv_caches(self, kv_caches):
        self.kv_caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        meta = self._get_connector_metadata()
        for req_id, (block_ids, checksums) in meta.sends.items():
            self.send(req_id, block_ids, checksums)
        self.loads.update(meta.loads)

    def send(self, req_id, block_ids, checksums):
        kv = [cache[block_ids] for cache in self.kv_caches.values()]
        path = self.path(req_id)
        torch.save((kv, checksums), path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        self.sent.add(req_id)

    def get_transfer_results(self, finished_req_ids):
        results = KVConnectorTransferResults(finished_sending=self.sent)
        self.sent = set()
        for req_id, (name, block_ids) in list(self.loads.items()):
            if not self.path(name).exists():
                continue
            del self.loads[req_id]
            self.receive(results, req_id, name, block_ids)
        return results

    def receive(self, results, req_id, name, block_ids):
        kv, checksums = torch.load(self.path(name))
        for cache, blocks in zip(self.kv_caches.values(), kv, strict=True):
            cache[block_ids] = blocks[-len(block_ids) :].to(cache.device)
        if checksums is not None:  # a producer without checksums sends none
            results.kv_checksums[req_id] = checksums
        results.finished_recving.add(req_id)
        self.path(name).unlink()

    def path(self, name):
        return self.folder / f"{name}.{get_tensor_model_parallel_rank()}.kv"

    def wait_for_layer_load(self, layer_name):
        """Do nothing: loads end before the request is scheduled."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Do nothing: whole requests are sent."""

    def wait_for_save(self):
        """Do nothing: what is sent is kept until it is reported."""
