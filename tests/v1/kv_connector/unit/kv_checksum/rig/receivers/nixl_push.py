# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read notifs with vLLM's own NIXL push worker, without an agent."""

import queue
from collections import Counter
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_checksum.connectors import nixl_push
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
        """Read notifs, and return the loads that are complete then."""
        for notif in notifs:
            self._pending_completion_notifs.put(notif)
        self._get_new_notifs()
        return sorted(self._recving_transfers)
