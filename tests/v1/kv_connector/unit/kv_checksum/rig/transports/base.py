# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand in for a connector's workers: copy KV token by token between two instances."""

import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)
from vllm.v1.outputs import KVConnectorOutput


class FakeTransport:
    """Stands in for the workers of a connector: transfers nothing over a network.

    Attributes:
        name: names the path that KV takes, in tests.
        connector: the connector whose scheduler side plans the transfers.
        carrier: what carries the payloads.

    """

    name: str
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
        """Take a step's metadata, as the connector's scheduler side built it."""
        raise NotImplementedError

    def remote(self, producer, req_id: str):
        """Return the producer's request id and block ids per group, or None if the
        blocks are not ready."""
        raise NotImplementedError

    def carry_payload(self, instance, producer, req_id: str) -> None:
        """Carry the load's payload from the producer to this instance."""

    def add_received(self, rank: int, results: KVConnectorTransferResults) -> None:
        """Add what worker `rank` received to its results."""

    def copy(self, instance, producer, req_id, local, their_id, their_blocks):
        """Copy what a load brings into the local blocks, per group."""
        copy_tokens(instance, producer, req_id, local, their_id, their_blocks)

    def step(self, instance, producer, output) -> list[KVConnectorOutput]:
        """Return what each worker of `instance` reports for a step."""
        self.take_metadata(output.kv_connector_metadata)
        finished = set()
        for req_id, local in list(self.loading.items()):
            remote = None if self.hold_loads else self.remote(producer, req_id)
            if remote is None:
                continue
            their_id, their_blocks = remote
            self.copy(instance, producer, req_id, local, their_id, their_blocks)
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
    """Return the sizes of the checksum tables on the scheduler side of `connector`."""
    names = ("_newly_finished_kv_checksums", "_kv_checksums")
    sides = [
        getattr(c, "connector_scheduler", None)
        for c in getattr(connector, "sub_connectors", [connector])
    ]
    return {n: len(getattr(s, n)) for s in sides for n in names if hasattr(s, n)}
