"""Let SimpleCPUOffloadConnector offload checksums with the KV.

The worker's block checksums are one more region to copy. Positions and hashes, which the
worker needs to fill them in and which the manager otherwise keeps to itself, travel
in the step's metadata.
"""

from ..edits import Module, assign
from .base import NOT_STORED_YET, STORED_BY_CONNECTOR

_IMPORT = "from vllm.distributed.kv_transfer.kv_checksum.connectors import simple_cpu_offload as kv_checksums"

connector = Module(
    "distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py"
)
connector.imports(_IMPORT)
with connector.function("SimpleCPUOffloadConnector.__init__") as f:
    f.after(
        "super().__init__(vllm_config, role, kv_cache_config)",
        """
        self._kv_checksums_not_stored = self._why_kv_checksums_not_stored(
            vllm_config, kv_cache_config
        )
        """,
    )
with connector.cls("SimpleCPUOffloadConnector") as c:
    c.prepend(NOT_STORED_YET)
    c.method(STORED_BY_CONNECTOR)
    c.method(
        """
        def set_kv_checksum_worker(self, worker: Any) -> None:
            if self.worker_handler is not None:
                self.worker_handler.kv_checksums = kv_checksums.create_block_region(
                    worker, self._kv_cache_config, self._kv_checksums_not_stored
                )

        def on_kv_checksum_failure(
            self, request: "Request", mismatches: dict[int, list[int]]
        ) -> None:
            assert self.scheduler_manager is not None
            kv_checksums.drop_blocks(
                self.scheduler_manager, request.block_hashes, mismatches
            )

        """
    )

metadata = Module("v1/simple_kv_offload/metadata.py")
metadata.imports("from vllm.distributed.kv_transfer.kv_checksum.stored import BlockRun")
with metadata.cls("SimpleCPUOffloadMetadata") as c:
    c.after(
        "need_flush: bool = False",
        """

        # KV checksums to fill in for the blocks that this step stores.
        kv_checksum_runs: list[BlockRun] = field(default_factory=list)
        """,
    )

manager = Module("v1/simple_kv_offload/manager.py")
manager.imports(_IMPORT)
with manager.cls("SimpleCPUOffloadScheduler") as c:
    c.prepend("kv_checksums = None\n\n")
with manager.function("SimpleCPUOffloadScheduler.__init__") as f:
    f.after(
        "self.vllm_config = vllm_config",
        """
        self.kv_checksums = kv_checksums.create_stored_runs(
            vllm_config, kv_cache_config
        )
        """,
    )
with manager.function("SimpleCPUOffloadScheduler._select_eager_blocks_to_store") as f:
    f.after(
        "gpu_block_ids.append(gpu_block_id)",
        """
        if self.kv_checksums is not None:
            self.kv_checksums.add(g, i, gpu_block)
        """,
    )
with manager.function("SimpleCPUOffloadScheduler.build_connector_meta") as f:
    f.before(
        "return result",
        """
        if self.kv_checksums is not None:
            result.kv_checksum_runs = self.kv_checksums.take()
        """,
    )

worker = Module("v1/simple_kv_offload/worker.py")
worker.imports(
    """
    if TYPE_CHECKING:
        from vllm.distributed.kv_transfer.kv_checksum.connectors.simple_cpu_offload import BlockRegion
    """
)
with worker.cls("SimpleCPUOffloadWorker") as c:
    c.prepend('kv_checksums: "BlockRegion | None" = None\n\n')
with worker.function("SimpleCPUOffloadWorker.register_kv_caches") as f:
    f.before(
        assign("per_tensor_bpb"),
        """
        if self.kv_checksums is not None:
            unique_gpu_caches["@kv_checksums"] = self.kv_checksums.region()
        """,
    )
with worker.function("SimpleCPUOffloadWorker.wait_for_save") as f:
    # Once per store: vLLM 0.30.0 calls the function twice in a step.
    f.before(
        "backend = self._backend",
        """
        if self.kv_checksums is not None:
            self.kv_checksums.save(metadata)
        """,
    )

MODULES = [connector, metadata, manager, worker]
