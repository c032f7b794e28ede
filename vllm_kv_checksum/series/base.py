"""What a connector says and does about checksums; by default nothing.

A connector declares the carrier of a request's payload. Where that is the connector
itself, it takes opaque bytes on the producer's scheduler and gives them back with the
transfer results of the consumer's workers.
"""

from ..edits import Module, assign

base = Module("distributed/kv_transfer/kv_connector/v1/base.py")
base.imports("from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier")
with base.cls("KVConnectorTransferResults") as c:
    c.after(
        assign("failed_recving"),
        """
        # KV checksums received, by request id; no later than the load finishes.
        kv_checksums: dict[str, bytes] = field(default_factory=dict)
        """,
    )
with base.cls("KVConnectorBase_V1") as c:
    c.after(
        assign("_cache_hit_source"),
        '''
        def kv_checksum_carrier(
            self, request: "Request", receiving: bool
        ) -> KVChecksumCarrier | None:
            """How the request's KV checksums travel; None: it is not checksummed.

            Args:
                request: the request that is sent or loaded.
                receiving: whether this instance loads the request's KV.

            """
            return None

        def send_kv_checksums(self, request: "Request", checksums: bytes) -> None:
            """Carry a finished request's KV checksums beside its KV.

            Called after request_finished of a request whose carrier is
            KVChecksumCarrier.CONNECTOR. The worker that loads the request returns
            the bytes in KVConnectorTransferResults.kv_checksums.

            Args:
                request: the request that finished.
                checksums: opaque bytes.

            """
            raise NotImplementedError

        ''',
    )

MODULES = [base]
