# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand in for NIXL push: payloads travel in the notifs that complete P's WRITEs."""

import msgspec

from vllm.distributed.kv_transfer.kv_checksum.connectors.nixl_push import (
    NixlPushChecksums,
)

from .base import FakeTransport


class FakeNixlPush(FakeTransport):
    name = "push"
    connector = "NixlPushConnector"

    def __init__(self):
        super().__init__()
        self.checksums: dict[int, NixlPushChecksums] = {}
        self.finished_blocks: dict = {}
        self.registrations: dict = {}
        self.remote_ids: dict[str, str] = {}

    def tables(self):
        sides = self.checksums.values()
        return super().tables() | {
            "outgoing": sum(len(s._outgoing) for s in sides),
            "received": sum(len(s._received) for s in sides),
        }

    def side(self, rank: int) -> NixlPushChecksums:
        return self.checksums.setdefault(rank, NixlPushChecksums())

    def take_metadata(self, meta):
        self.finished_blocks.update(meta.push_finished_blocks)
        self.side(0).hold(meta.push_finished_kv_checksums)
        self.registrations.update(meta.push_registrations)
        for req_id, req_meta in meta.reqs_to_recv.items():
            if req_meta.local_block_ids:
                self.loading[req_id] = req_meta.local_block_ids
                self.remote_ids[req_id] = req_meta.remote.request_id

    def remote(self, producer, req_id):
        their_id = self.remote_ids[req_id]
        blocks = producer.transport.finished_blocks.pop(their_id, None)
        return None if blocks is None else (their_id, blocks)

    def carry_payload(self, instance, producer, req_id):
        theirs = producer.transport.side(0)
        their_id = self.remote_ids.pop(req_id)
        registration = msgspec.msgpack.encode(self.registrations.pop(req_id))
        theirs.negotiate(their_id, msgspec.msgpack.decode(registration))
        plain = f"{req_id}:{producer.tp}".encode()
        for rank in range(len(instance.workers)):
            # As many WRITEs as producer ranks hold this worker's heads.
            for _ in range(max(1, producer.tp // instance.tp)):
                notif = theirs.completion_notif(their_id, plain)
                assert self.side(rank).take(notif, {req_id}) == plain

    def add_received(self, rank, results):
        self.side(rank).finish(results)
