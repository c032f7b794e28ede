# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read responses with vLLM's own Mooncake worker, without an engine."""

from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_checksum.connectors.mooncake import (
    MooncakeChecksums,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorWorker,
    PullReqMeta,
)


class MooncakeReceiver:
    """A Mooncake worker of a consumer, as far as it reads responses."""

    process_pulling_result = MooncakeConnectorWorker.process_pulling_result

    def __init__(self):
        self.kv_checksums = MooncakeChecksums()
        self.seen_when_finished: list[dict[str, bytes]] = []
        # vLLM 0.32.0 adds to this set itself.
        self.finished_recving_reqs = SimpleNamespace(add=self._complete_pull_task)

    def take(self) -> dict[str, bytes]:
        results = KVConnectorTransferResults()
        self.kv_checksums.finish(results)
        return results.kv_checksums

    def _complete_pull_task(self, pull_meta):
        # What the engine's thread would find the moment a load is marked finished.
        self.seen_when_finished.append(self.take())


def pull(*req_ids):
    """Return requests that a Mooncake consumer pulls from one peer."""
    return {
        r: PullReqMeta(r, "t", [[1]], "p", "addr", pull_tasks_count=1) for r in req_ids
    }
