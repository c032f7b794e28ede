# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's own receiving functions on the state they need, without agent or engine."""

import queue
from collections import Counter
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_checksum.connectors import nixl_push
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
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
    NixlPushConnectorWorker,
)


class PushConsumer:
    """A NIXL push worker of a consumer, as far as it reads notifs."""

    _get_new_notifs = NixlPushConnectorWorker._get_new_notifs
    _handle_heartbeat = print

    def __init__(self, awaited, world_size=1):
        self.kv_checksums = nixl_push.NixlPushChecksums()
        self.world_size = world_size
        self._pending_completion_notifs = queue.Queue()
        self._recving_metadata = {r: SimpleNamespace(pp_size=1) for r in awaited}
        self._recving_transfers = {}
        self.consumer_notification_counts_by_req = Counter()
        self.xfer_stats = SimpleNamespace(record_notification_after_expiry=list)
        # vLLM 0.32.0 also asks whether the notif is for a producer.
        self.transfer_topo = SimpleNamespace()
        self._reqs_to_send, self._reqs_to_process = {}, set()

    def get(self, *notifs) -> list[str]:
        """Loads that are complete once these notifs are read."""
        for notif in notifs:
            self._pending_completion_notifs.put(notif)
        self._get_new_notifs()
        return sorted(self._recving_transfers)


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
    """Requests that a Mooncake consumer pulls from one peer."""
    return {
        r: PullReqMeta(r, "t", [[1]], "p", "addr", pull_tasks_count=1) for r in req_ids
    }
