"""Store checksums with KV in the Mooncake store, and check them on load.

The worker's block checksums are one more region of every value, filled in before the event
that the sending thread waits for. Blocks that failed their checksums are removed for
every rank by the worker of rank 0, which answers on the lookup channel; values of
another size by the loading thread that could not load them.
"""

from ..edits import Module, assign
from .base import NOT_STORED_YET, STORED_BY_CONNECTOR

_PATH = "distributed/kv_transfer/kv_connector/v1/mooncake/store"

connector = Module(f"{_PATH}/connector.py")
connector.imports(
    "from vllm.distributed.kv_transfer.kv_checksum.connectors import mooncake_store as kv_checksums"
)
with connector.function("MooncakeStoreConnector.__init__") as f:
    f.after(
        assign("self._kv_cache_config"),
        """
        self._kv_checksums_not_stored = self._why_kv_checksums_not_stored(
            vllm_config, kv_cache_config
        )
        """,
    )
with connector.cls("MooncakeStoreConnector") as c:
    c.prepend(NOT_STORED_YET)
    c.method(STORED_BY_CONNECTOR)
    c.method(
        """
        def set_kv_checksum_worker(self, worker: Any) -> None:
            store_worker = self.connector_worker
            assert store_worker is not None
            store_worker.kv_checksums = kv_checksums.create_mooncake_store_checksums(
                store_worker, worker, self._kv_checksums_not_stored
            )

        def on_kv_checksum_failure(
            self, request: Request, mismatches: dict[int, list[int]]
        ) -> None:
            assert self.connector_scheduler is not None
            kv_checksums.remove_failures(self.connector_scheduler, request, mismatches)

        """
    )

worker = Module(f"{_PATH}/worker.py")
worker.imports(
    "from vllm.distributed.kv_transfer.kv_checksum.connectors.mooncake_store import REMOVE_MSG, MooncakeStoreChecksums"
)
with worker.cls("MooncakeStoreWorker") as c:
    c.prepend("kv_checksums: MooncakeStoreChecksums | None = None\n\n")
with worker.function("MooncakeStoreWorker.register_kv_caches") as f:
    f.before(
        assign("registered_buffers"),
        """
        if self.kv_checksums is not None:
            self.kv_checksums.register()
        """,
    )
with worker.function("MooncakeStoreWorker.wait_for_save") as f:
    f.before(
        "current_event = None",
        """
        if self.kv_checksums is not None:
            self.kv_checksums.save(metadata.requests)
        """,
    )
with worker.cls("KVCacheStoreRecvingThread") as c:
    c.prepend("kv_checksums: MooncakeStoreChecksums | None = None\n\n")
with worker.function("MooncakeStoreWorker.register_kv_caches") as f:
    f.after(
        assign("recv_thread.name"),
        "recv_thread.kv_checksums = self.kv_checksums",
    )
with worker.function("KVCacheStoreRecvingThread._handle_request") as f:
    f.before(
        "if failed:",
        """
        if failed and self.kv_checksums is not None:
            self.kv_checksums.drop_malformed(
                req_id, batch_keys, batch_sizes, res
            )
        """,
    )
with worker.function("LookupKeyServer.__init__.process_request") as f:
    f.before(
        "if msg_type == LOOKUP_MSG:",
        """
        if (
            msg_type == REMOVE_MSG
            and self.store_worker.kv_checksums is not None
        ):
            self.socket.send(self.store_worker.kv_checksums.remove(all_frames))
            continue
        """,
    )

MODULES = [connector, worker]
