"""Let NIXL push carry payloads in the completion notifs of its WRITEs.

The producer's scheduler ships a payload with the finished blocks; the writer thread
adds it to the notif if the consumer's registration asked. Both forms of the notif take
the same completion accounting. Once a long form did not come through, registrations
ask no more. The compatibility hash stays vLLM's own.
"""

from ..edits import Module, assign
from .base import SENT_BY_CONNECTOR

_NIXL = "distributed/kv_transfer/kv_connector/v1/nixl/"

metadata = Module(_NIXL + "metadata.py")
with metadata.function("NixlConnectorMetadata.__init__") as f:
    f.after(
        assign("self.push_finished_blocks"),
        """
        # Push mode (P side): KV checksums of those requests.
        self.push_finished_kv_checksums: dict[ReqId, bytes] = {}
        """,
    )

connector = Module(_NIXL + "connector.py")
connector.imports(
    "from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier"
)
with connector.cls("NixlPushConnector") as c:
    c.method(
        """
        def kv_checksum_carrier(
            self, request: "Request", receiving: bool
        ) -> KVChecksumCarrier | None:
            return KVChecksumCarrier.CONNECTOR.of_request(request, receiving)

        """
    )
    c.method(SENT_BY_CONNECTOR)

scheduler = Module(_NIXL + "push_scheduler.py")
scheduler.imports(
    """
    from vllm.distributed.kv_transfer.kv_checksum import support
    from vllm.distributed.kv_transfer.kv_checksum.connectors import nixl_push
    """
)
with scheduler.function("NixlPushConnectorScheduler.__init__") as f:
    f.after(
        assign("self._newly_finished_push_blocks"),
        "self._asks_for_kv_checksums = support.sums_blocks(vllm_config)",
    )
with scheduler.function("NixlPushConnectorScheduler.update_state_after_alloc") as f:
    f.after(
        assign("self._push_pending_registrations[request.request_id]"),
        """
        if self._asks_for_kv_checksums:
            nixl_push.ask(self._push_pending_registrations[request.request_id])
        """,
    )
with scheduler.function("NixlPushConnectorScheduler.build_connector_meta") as f:
    f.after(
        assign("meta.push_finished_blocks"),
        """
        meta.push_finished_kv_checksums = self._newly_finished_kv_checksums
        self._newly_finished_kv_checksums = {}
        """,
    )
with scheduler.cls("NixlPushConnectorScheduler") as c:
    c.prepend(
        """
        # D-side: whether registrations ask for KV checksums.
        _asks_for_kv_checksums = False

        # P-side: KV checksums of the requests in _newly_finished_push_blocks.
        _newly_finished_kv_checksums: dict[ReqId, bytes] = {}

        """
    )
    c.method(
        """
        def send_kv_checksums(self, request: Request, checksums: bytes) -> None:
            # Nothing is pushed for other requests, so nothing would carry these.
            if request.request_id in self._newly_finished_push_blocks:
                # The instance gets a dict of its own in place of the class's.
                kv_checksums = self._newly_finished_kv_checksums or {}
                kv_checksums[request.request_id] = checksums
                self._newly_finished_kv_checksums = kv_checksums

        """,
    )

worker = Module(_NIXL + "push_worker.py")
worker.imports(
    "from vllm.distributed.kv_transfer.kv_checksum.connectors.nixl_push import create_nixl_push_checksums"
)
with worker.cls("NixlPushConnectorWorker") as c:
    c.prepend("kv_checksums = None\n\n")
with worker.function("NixlPushConnectorWorker.__init__") as f:
    f.after(
        assign("self._pending_d_registrations"),
        "self.kv_checksums = create_nixl_push_checksums(vllm_config)",
    )
with worker.function("NixlPushConnectorWorker.start_load_kv") as f:
    f.before(
        "if metadata.push_finished_blocks:",
        """
        if self.kv_checksums is not None:
            self.kv_checksums.hold(metadata.push_finished_kv_checksums)
        """,
    )
with worker.function("NixlPushConnectorWorker._do_send_reg_notif") as f:
    f.before(
        assign("notif_msg"),
        """
        if self.kv_checksums is not None:
            reg_data = self.kv_checksums.registration(reg_data)
        """,
    )
with worker.function("NixlPushConnectorWorker._do_start_push_kv") as f:
    f.before(
        "self._xfer_blocks_for_req(req_id=request_id, meta=push_meta)",
        """
        if self.kv_checksums is not None:
            self.kv_checksums.negotiate(request_id, registration_data)
        """,
    )
with worker.function("NixlPushConnectorWorker._xfer_blocks") as f:
    f.after(
        assign("notif_id"),
        """
        if self.kv_checksums is not None:
            notif_id = self.kv_checksums.completion_notif(request_id, notif_id)
        """,
    )
with worker.function("NixlPushConnectorWorker._get_new_notifs") as f:
    f.before(
        assign("msg"),
        """
        if self.kv_checksums is not None:
            notif = self.kv_checksums.take(notif, self._recving_metadata)
            if not notif:
                continue
        """,
    )
with worker.function("NixlPushConnectorWorker.get_transfer_results") as f:
    f.before(
        "return results",
        """
        if self.kv_checksums is not None:
            self.kv_checksums.finish(results)
        """,
    )

MODULES = [metadata, connector, scheduler, worker]
