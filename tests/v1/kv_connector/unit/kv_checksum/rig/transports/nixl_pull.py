# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand in for NIXL pull: payloads travel in P's answer, in ``kv_transfer_params``."""

import base64

from vllm.distributed.kv_transfer.kv_checksum import (
    KV_TRANSFER_PARAMS_KEY,
    KVChecksumCarrier,
)

from .base import FakeTransport


class FakeNixlPull(FakeTransport):
    name = "pull"
    connector = "NixlConnector"
    carrier = KVChecksumCarrier.KV_TRANSFER_PARAMS

    def __init__(self):
        super().__init__()
        self.remotes: dict = {}

    def consumer_params(self, producer, params, answer):
        """Return P's answer as a proxy passes it on; `alter` may change its payload."""
        params = dict(answer)
        text = params.pop(KV_TRANSFER_PARAMS_KEY, None)
        if text is None:
            return params
        data = producer.alter(base64.b64decode(text))
        if data is None:
            return params
        return params | {KV_TRANSFER_PARAMS_KEY: base64.b64encode(data).decode()}

    def take_metadata(self, meta):
        for req_id, req_meta in meta.reqs_to_recv.items():
            if req_meta.awaiting_kvs:
                self.loading[req_id] = req_meta.local_block_ids
                self.remotes[req_id] = req_meta.remote

    def remote(self, producer, req_id):
        remote = self.remotes.pop(req_id)
        return remote.request_id, remote.block_ids
