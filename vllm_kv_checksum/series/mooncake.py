"""Let Mooncake P2P carry payloads in the producer's responses.

A payload is stored on the send before it is marked ready, and answered with the
requests that were sent. The consumer queues it before the load is marked finished, in
one synchronous step of the receiver's loop, and takes the finished loads before it
drains the queue; so no load finishes without the payload that came with it.
"""

from ..edits import Module, assign
from .base import SENT_BY_CONNECTOR

mooncake = Module(
    "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
)
mooncake.imports(
    """
    from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
    from vllm.distributed.kv_transfer.kv_checksum.connectors.mooncake import create_mooncake_checksums, mooncake_carrier
    """
)
with mooncake.cls("MooncakeXferResponse") as c:
    c.after(
        assign("err_msg"),
        """
        # KV checksums of ok_reqs, where the producer has them, by request id. Raw:
        # what does not decode must not fail the transfer.
        kv_checksums: msgspec.Raw = msgspec.Raw()
        """,
    )
with mooncake.cls("SendBlockMeta") as c:
    c.after(assign("sending"), "kv_checksums: bytes | None = None")
with mooncake.function("MooncakeConnectorMetadata.__init__") as f:
    f.after(
        assign("self.reqs_not_processed"),
        """
        # KV checksums of the requests in reqs_to_send that finished.
        self.kv_checksums: dict[ReqId, bytes] = {}
        """,
    )
with mooncake.cls("MooncakeConnector") as c:
    c.method(
        """
        def kv_checksum_carrier(
            self, request: "Request", receiving: bool
        ) -> KVChecksumCarrier | None:
            return mooncake_carrier(request, receiving)

        """
    )
    c.method(SENT_BY_CONNECTOR)
with mooncake.function("MooncakeConnector.get_transfer_results", since="0.31.0") as f:
    f.before(
        "return self.connector_worker.get_transfer_results()",
        """
        if self.connector_worker.kv_checksums is not None:
            results = self.connector_worker.get_transfer_results()
            self.connector_worker.kv_checksums.finish(results)
            return results
        """,
    )
with mooncake.cls("MooncakeConnector", below="0.31.0") as c:
    c.method(
        """
        def get_transfer_results(self, finished_req_ids: set[str]):
            results = super().get_transfer_results(finished_req_ids)
            assert self.connector_worker is not None
            if self.connector_worker.kv_checksums is not None:
                self.connector_worker.kv_checksums.finish(results)
            return results

        """
    )
with mooncake.cls("MooncakeConnectorScheduler") as c:
    c.prepend("_kv_checksums: dict[ReqId, bytes] = {}\n\n")
    c.method(
        """
        def send_kv_checksums(self, request: "Request", checksums: bytes) -> None:
            # Nothing is sent for other requests, so nothing would carry these.
            _, block_ids = self._reqs_need_send.get(request.request_id, (None, []))
            if block_ids:
                # The instance gets a dict of its own in place of the class's.
                self._kv_checksums = self._kv_checksums or {}
                self._kv_checksums[request.request_id] = checksums

        """
    )
with mooncake.function("MooncakeConnectorScheduler.build_connector_meta") as f:
    f.before(
        "self._reqs_need_send.clear()",
        """
        meta.kv_checksums = self._kv_checksums
        self._kv_checksums = {}
        """,
    )
with mooncake.cls("MooncakeConnectorWorker") as c:
    c.prepend("kv_checksums = None\n\n")
with mooncake.function("MooncakeConnectorWorker.__init__") as f:
    f.after(
        assign("self._invalid_block_ids"),
        "self.kv_checksums = create_mooncake_checksums(vllm_config)",
    )
with mooncake.function("MooncakeConnectorWorker.record_send_reqs") as f:
    f.before(
        "send_meta.ready.set()",
        """
        if self.kv_checksums is not None:
            send_meta.kv_checksums = metadata.kv_checksums.get(p_req_id)
        """,
    )
with mooncake.function("MooncakeConnectorWorker.send_kv_to_decode") as f:
    f.after(
        assign("response", keyword="ok_reqs"),
        """
        if self.kv_checksums is not None:
            self.kv_checksums.add_sent(response, ok_ready_reqs)
        """,
    )
with mooncake.function("MooncakeConnectorWorker.process_pulling_result") as f:
    f.after(
        assign("ok_reqs"),
        """
        if self.kv_checksums is not None:
            self.kv_checksums.receive(response.kv_checksums, ok_reqs, pull_metas)
        """,
    )

MODULES = [mooncake]
