# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand in for Mooncake P2P: payloads travel in the responses to D's pulls."""

import msgspec

from vllm.distributed.kv_transfer.kv_checksum.connectors.mooncake import (
    MooncakeChecksums,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    SendBlockMeta,
)

from .base import FakeTransport


class FakeMooncake(FakeTransport):
    name = "mooncake"
    connector = "MooncakeConnector"

    def __init__(self):
        super().__init__()
        self.checksums: dict[int, MooncakeChecksums] = {}
        self.sends: dict[str, SendBlockMeta] = {}
        self.transfers: dict[str, str] = {}

    def tables(self):
        waiting = sum(s._received.qsize() for s in self.checksums.values())
        return super().tables() | {"received": waiting, "sends": len(self.sends)}

    def producer_params(self, req_id):
        return super().producer_params(req_id) | {"transfer_id": f"xfer-{req_id}"}

    def consumer_params(self, producer, params, answer):
        """Return what a router sends to D without waiting for P's answer."""
        assert answer is None
        return dict(
            do_remote_decode=False,
            do_remote_prefill=True,
            remote_engine_id=producer.config.kv_transfer_config.engine_id,
            remote_bootstrap_addr="http://127.0.0.1:1",
            transfer_id=params["transfer_id"],
        )

    def take_metadata(self, meta):
        for p_req_id, (transfer_id, blocks) in meta.reqs_to_send.items():
            if blocks:
                send = SendBlockMeta(p_req_id, transfer_id, blocks, ready=None)
                send.kv_checksums = meta.kv_checksums.get(p_req_id)
                self.sends[transfer_id] = send
        for pulls in meta.reqs_to_recv.values():
            for req_id, pull in pulls.items():
                if any(pull.local_block_ids):
                    self.loading[req_id] = pull.local_block_ids
                    self.transfers[req_id] = pull.transfer_id

    def remote(self, producer, req_id):
        send = producer.transport.sends.get(self.transfers[req_id])
        return None if send is None else (send.p_req_id, send.local_block_ids)

    def carry_payload(self, instance, producer, req_id):
        send = producer.transport.sends.pop(self.transfers.pop(req_id))
        response = MooncakeXferResponse(MooncakeXferResponseStatus.FINISH, [req_id])
        MooncakeChecksums.add_sent(response, [(req_id, send)])
        encoded = msgspec.msgpack.encode(response)
        response = msgspec.msgpack.decode(encoded, type=MooncakeXferResponse)
        for rank in range(len(instance.workers)):
            side = self.checksums.setdefault(rank, MooncakeChecksums())
            for _ in range(producer.tp * producer.pp):
                side.receive(response.kv_checksums, response.ok_reqs, {req_id})

    def add_received(self, rank, results):
        if rank in self.checksums:
            self.checksums[rank].finish(results)
