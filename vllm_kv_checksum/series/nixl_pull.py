"""Let NIXL pull carry payloads in ``kv_transfer_params``.

The producer's answer already goes through the proxy to the consumer, so the generic
code only adds a key. Bidirectional loads (`do_remote_decode` on a load) are verified by
the decode instance's answer, whose last output the scheduler holds back until the
request's blocks are summed.

It is the connector of which it is known what each rank transfers under context
parallelism.
"""

from ..edits import Module, assign

nixl = Module("distributed/kv_transfer/kv_connector/v1/nixl/connector.py")
nixl.imports("from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier")
with nixl.cls("NixlPullConnector") as c:
    c.method(
        """
        _kv_checksums_follow_context = True

        def kv_checksum_carrier(
            self, request: "Request", receiving: bool
        ) -> KVChecksumCarrier | None:
            carrier = KVChecksumCarrier.KV_TRANSFER_PARAMS
            return carrier.of_request(request, receiving)

        """
    )

scheduler = Module("v1/core/sched/scheduler.py")
with scheduler.function("Scheduler.update_from_output") as f:
    f.before(
        assign("engine_core_outputs"),
        """
        if self.kv_checksum is not None:
            self.kv_checksum.exchange_answers(outputs)

        """,
    )

MODULES = [nixl, scheduler]
