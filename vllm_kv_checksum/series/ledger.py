"""Check loads that bring no checksums against what this instance computed.

The block pool tells the ledger which blocks become full, and when it forgets them all.
OffloadingConnector tells it which blocks it stores anew, and can load a shorter prefix;
other connectors load none of a prefix that holds a block which was bad.
"""

from ..edits import Module, assign

_ATTRIBUTE = """
# LedgerLoads | None: remembers KV checksums of full blocks.
kv_checksum_ledger: Any = None

"""

pool = Module("v1/core/block_pool.py")
with pool.cls("BlockPool") as c:
    c.prepend(_ATTRIBUTE)
with pool.function("BlockPool.cache_full_blocks") as f:
    f.before(
        assign("new_full_blocks"),
        """
        if self.kv_checksum_ledger is not None:
            self.kv_checksum_ledger.note(
                request, kv_cache_group_id, blocks, num_cached_blocks, num_full_blocks
            )
        """,
    )
with pool.function("BlockPool.reset_prefix_cache") as f:
    f.before(
        assign("self.cached_block_hash_to_block"),
        """
        if self.kv_checksum_ledger is not None:
            self.kv_checksum_ledger.clear()
        """,
    )

connector = Module("distributed/kv_transfer/kv_connector/v1/offloading_connector.py")
with connector.cls("OffloadingConnector") as c:
    c.method(
        """
        def limit_matched_tokens(
            self, request: "Request", num_computed_tokens: int, max_num_new_tokens: int
        ) -> tuple[int | None, bool]:
            assert self.connector_scheduler is not None
            return self.connector_scheduler.get_num_new_matched_tokens(
                request, num_computed_tokens, max_num_new_tokens
            )

        def set_kv_checksum_ledger(self, ledger: Any) -> None:
            assert self.connector_scheduler is not None
            self.connector_scheduler.kv_checksum_ledger = ledger

        """,
    )

scheduler = Module("distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py")
with scheduler.cls("OffloadingConnectorScheduler") as c:
    c.prepend(_ATTRIBUTE)
with scheduler.function("OffloadingConnectorScheduler._build_store_jobs") as f:
    f.before(
        assign("gpu_block_idx"),
        """
        if self.kv_checksum_ledger is not None:
            self.kv_checksum_ledger.allow_stored(
                req,
                group_config.group_idx,
                chunk_idx * blocks_per_chunk,
                (chunk_idx + 1) * blocks_per_chunk,
            )
        """,
    )

MODULES = [pool, connector, scheduler]
