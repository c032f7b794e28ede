# SPDX-License-Identifier: Apache-2.0
"""What moves KV and payloads between instances that share a process.

`FAKES` stand in for the workers of a connector: they copy KV token by token, by the
block ids that the real scheduler side chose, for any TP, PP and block size. Payloads
pass through the feature's real code for that connector. `RealWorkers` runs a
connector's own workers over its real library, for one rank per instance.
"""

import base64

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    SendBlockMeta,
)
from vllm.v1.outputs import KVConnectorOutput

from vllm.distributed.kv_transfer.kv_checksum import (
    KV_TRANSFER_PARAMS_KEY,
    KVChecksumCarrier,
)
from vllm.distributed.kv_transfer.kv_checksum.mooncake import MooncakeChecksums
from vllm.distributed.kv_transfer.kv_checksum.nixl_push import NixlPushChecksums


class FakeTransport:
    """Stands in for the workers of a connector: transfers nothing over a network."""

    connector: str
    carrier = KVChecksumCarrier.CONNECTOR

    def __init__(self):
        # Loads in progress: what the connector's metadata says, by request id.
        self.loading: dict = {}
        self.hold_loads = False
        self.sent: set[str] = set()

    def tables(self) -> dict[str, int]:
        return {"loading": len(self.loading)}

    def producer_params(self, req_id: str) -> dict:
        return dict(do_remote_decode=True, do_remote_prefill=False)

    def consumer_params(self, producer, params: dict, answer: dict | None) -> dict:
        return answer

    def take_metadata(self, meta) -> None:
        """A step's metadata, as the connector's scheduler side built it."""
        raise NotImplementedError

    def remote(self, producer, req_id: str):
        """Producer's request id and block ids per group, or None: not ready."""
        raise NotImplementedError

    def carry_payload(self, instance, producer, req_id: str) -> None:
        """The load's payload travels."""

    def add_received(self, rank: int, results: KVConnectorTransferResults) -> None:
        """What worker `rank` received."""

    def step(self, instance, producer, output) -> list[KVConnectorOutput]:
        """What each worker of `instance` reports for a step."""
        self.take_metadata(output.kv_connector_metadata)
        finished = set()
        for req_id, local in list(self.loading.items()):
            remote = None if self.hold_loads else self.remote(producer, req_id)
            if remote is None:
                continue
            their_id, their_blocks = remote
            copy_tokens(instance, producer, req_id, local, their_id, their_blocks)
            self.carry_payload(instance, producer, req_id)
            producer.transport.sent.add(their_id)
            del self.loading[req_id]
            finished.add(req_id)
        sent, self.sent = self.sent, set()
        reports = []
        for rank, worker in enumerate(instance.workers):
            results = KVConnectorTransferResults(set(sent), set(finished))
            self.add_received(rank, results)
            worker.bind(output.kv_checksum_scheduled)
            report = KVConnectorOutput(
                finished_sending=results.finished_sending or None,
                finished_recving=results.finished_recving or None,
            )
            report.kv_checksums = worker.post_forward(
                report.finished_recving,
                set(),
                output.finished_req_ids,
                received=results.kv_checksums,
            )
            reports.append(report)
        return reports


class FakeNixlPull(FakeTransport):
    connector = "NixlConnector"
    carrier = KVChecksumCarrier.KV_TRANSFER_PARAMS

    def __init__(self):
        super().__init__()
        self.remotes: dict = {}

    def consumer_params(self, producer, params, answer):
        """P's answer, as a proxy passes it on: its payload goes past `alter`."""
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


class FakeNixlPush(FakeTransport):
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


class FakeMooncake(FakeTransport):
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
        """A router sends these to D without waiting for P's answer."""
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


FAKES = {"pull": FakeNixlPull, "push": FakeNixlPush, "mooncake": FakeMooncake}


def copy_tokens(instance, producer, req_id, local, their_id, their_blocks):
    """Copy the tokens of the local blocks, per group, from the producer's blocks."""
    request = instance.scheduler.requests.get(req_id)
    num_tokens = request.num_computed_tokens if request else 0
    rows = instance.scheduler.kv_cache_manager.get_block_ids(req_id)
    transferred = list(instance.kv_config.transfer_group_ids)
    for group, numbers in enumerate(instance.layers):
        if group not in transferred:
            continue
        index = transferred.index(group)
        ours, theirs = local[index], their_blocks[index]
        # Each list ends with the block of its side's last token.
        first = -(-num_tokens // instance.block_size) - len(ours)
        their_tokens = producer.scheduler.requests[their_id].num_computed_tokens
        their_first = -(-their_tokens // producer.block_size) - len(theirs)
        at = torch.arange(first * instance.block_size, num_tokens)
        at = at[at // producer.block_size >= their_first]
        if len(at):
            to = torch.tensor(ours)[at // instance.block_size - first]
            source = torch.tensor(theirs)[at // producer.block_size - their_first]
            for n in numbers:
                instance.kv[n][to, :, at % instance.block_size] = producer.kv[n][
                    source, :, at % producer.block_size
                ]
        assert not ours or rows[group][-len(ours) :] == ours
        instance.damage(instance, req_id, ours)
    instance.copy_states(producer, local, their_blocks)
    instance.loaded(req_id, local)


def scheduler_tables(connector) -> dict[str, int]:
    """Sizes of the checksum tables on the scheduler side of `connector`."""
    names = ("_newly_finished_kv_checksums", "_kv_checksums")
    sides = [
        getattr(c, "connector_scheduler", None)
        for c in getattr(connector, "sub_connectors", [connector])
    ]
    return {n: len(getattr(s, n)) for s in sides for n in names if hasattr(s, n)}
