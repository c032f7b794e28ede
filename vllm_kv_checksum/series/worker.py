"""Let workers sum blocks in the steps that the scheduler names.

`ActiveKVConnector` owns the worker. Loads are summed where their completion is
reported; sends after the forward and, where the runner finalizes the connector
only behind the drafter, in `finalize_step`, on the same output object. (vLLM 0.32.0 never
defers: it calls `post_forward` behind the drafter.)
"""

from ..edits import Module, assign

connector = Module("v1/worker/gpu/kv_connector.py")
connector.imports(
    "from vllm.distributed.kv_transfer.kv_checksum import create_kv_checksum_worker"
)
with connector.cls("ActiveKVConnector") as c:
    c.prepend(
        "kv_checksum_worker = None\n"
        "_deferred_output: KVConnectorOutput | None = None\n\n"
    )
with connector.function("ActiveKVConnector.__init__") as f:
    f.after(
        "self.kv_connector = get_kv_transfer_group()",
        """
        self.kv_checksum_worker = create_kv_checksum_worker(
            vllm_config, self.kv_connector, kv_caches_dict
        )
        """,
    )
with connector.function("ActiveKVConnector.pre_forward") as f:
    f.after(
        "self.kv_connector.bind_connector_metadata(kv_connector_metadata)",
        """
        if self.kv_checksum_worker is not None:
            self.kv_checksum_worker.bind(scheduler_output.kv_checksum_scheduled)
        """,
    )
with connector.function("ActiveKVConnector.post_forward", below="0.33.0") as f:
    f.prepend("defer_finalize = False")
with connector.function("ActiveKVConnector.post_forward") as f:
    f.after(
        assign("output.kv_connector_worker_meta"),
        """
        if self.kv_checksum_worker is not None:
            output.kv_checksums = self.kv_checksum_worker.post_forward(
                output.finished_recving,
                output.failed_recving,
                finished_req_ids,
                defer_sends=defer_finalize,
                received=transfer_results.kv_checksums,
            )
            self._deferred_output = output if defer_finalize else None
        """,
    )
with connector.function("ActiveKVConnector.finalize_step", since="0.33.0") as f:
    f.before(
        "self.kv_connector.wait_for_save()",
        """
        if self._deferred_output is not None:
            assert self.kv_checksum_worker is not None
            output, self._deferred_output = self._deferred_output, None
            output.kv_checksums = self.kv_checksum_worker.finalize_step(
                output.kv_checksums
            )
        """,
    )

MODULES = [connector]
