"""NIXL pull carries payloads in ``kv_transfer_params``.

Connectors say how they carry checksums; by default they do not. For NIXL pull the
producer's answer already goes through the proxy to the consumer, so the generic code
only adds a key. Bidirectional loads (`do_remote_decode` on a load) are neither
verified nor counted.
"""

from ..edits import Module, assign

base = Module("distributed/kv_transfer/kv_connector/v1/base.py")
base.imports("from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier")
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

        ''',
    )

nixl = Module("distributed/kv_transfer/kv_connector/v1/nixl/connector.py")
nixl.imports("from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier")
with nixl.cls("NixlPullConnector") as c:
    c.prepend(
        """
        def kv_checksum_carrier(
            self, request: "Request", receiving: bool
        ) -> KVChecksumCarrier | None:
            params = request.kv_transfer_params or {}
            if bool(params.get("do_remote_decode")) == receiving:
                return None
            return KVChecksumCarrier.KV_TRANSFER_PARAMS

        """
    )

MODULES = [base, nixl]
